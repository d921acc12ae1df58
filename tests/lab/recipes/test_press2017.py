"""Press & Wolf's small models: shared training, and perplexities scored like the authors' program."""

from __future__ import annotations

import pytest

from reefknot.lab.recipes.recipe import load_recipe


@pytest.mark.parametrize("table", ["table5", "table6", "table7"])
def test_training_text_is_scored_where_the_paper_reports_it(table: str) -> None:
    recipe = load_recipe(f"press2017/{table}")
    scored = {row.name: recipe.experiments[row.name].evaluation for row in recipe.rows if "train" in row.paper}
    assert scored
    assert {(evaluation.streams, evaluation.protocol, evaluation.train) for evaluation in scored.values()} == {
        (20, "zaremba", True)
    }


@pytest.mark.parametrize(
    ("row_of_table3", "row_of_table6"), [("Small, PTB", "Small model"), ("Small + WT, PTB", "Small + WT")]
)
def test_models_of_table_3_are_trained_like_those_of_table_6(row_of_table3: str, row_of_table6: str) -> None:
    table3, table6 = (load_recipe(f"press2017/{table}") for table in ("table3", "table6"))
    first, second = table3.experiments[row_of_table3], table6.experiments[row_of_table6]
    assert first.evaluation.similarity
    assert first.model_copy(update={"evaluation": second.evaluation}) == second, "only the evaluation differs"
