"""Press & Wolf's small models: one training, and perplexities as the authors' program scores."""

from __future__ import annotations

import pytest

from reefknot.lab.recipes.recipe import load_recipe


@pytest.mark.parametrize("table", ["table5", "table6", "table7"])
def test_training_texts_are_scored_where_the_paper_gives_figures(table: str) -> None:
    recipe = load_recipe(f"press2017/{table}")
    scored = {row.name: recipe.experiments[row.name].evaluation for row in recipe.rows if "train" in row.paper}
    assert scored
    assert {(each.streams, each.protocol, each.train) for each in scored.values()} == {(20, "zaremba", True)}


@pytest.mark.parametrize(("judged", "trained"), [("Small, PTB", "Small model"), ("Small + WT, PTB", "Small + WT")])
def test_the_vectors_of_table_3_are_those_of_table_6(judged: str, trained: str) -> None:
    ours, theirs = (load_recipe(f"press2017/{table}") for table in ("table3", "table6"))
    one, other = ours.experiments[judged], theirs.experiments[trained]
    assert one.evaluation.similarity
    assert one.model_copy(update={"evaluation": other.evaluation}) == other, "trained alike"
