"""Press & Wolf's small models: shared training, and perplexities scored like the authors' program."""

from __future__ import annotations

import pytest

from reefknot.lab.recipes.recipe import load_recipe


@pytest.mark.parametrize("table", ["table5", "table6", "table7"])
def test_training_text_is_scored_where_the_paper_reports_it(table: str) -> None:
    recipe = load_recipe(f"press2017/{table}")
    rows_with_train_score = [row for row in recipe.rows if "train" in row.paper]
    assert rows_with_train_score
    for row in rows_with_train_score:
        evaluation = recipe.experiments[row.name].evaluation
        assert (evaluation.streams, evaluation.protocol, evaluation.train) == (20, "zaremba", True)


@pytest.mark.parametrize(
    ("row_of_table3", "row_of_table6"), [("Small, PTB", "Small model"), ("Small + WT, PTB", "Small + WT")]
)
def test_models_of_table_3_are_trained_like_those_of_table_6(row_of_table3: str, row_of_table6: str) -> None:
    experiment3 = load_recipe("press2017/table3").experiments[row_of_table3]
    experiment6 = load_recipe("press2017/table6").experiments[row_of_table6]
    assert experiment3.evaluation.similarity
    same_evaluation = {"evaluation": experiment6.evaluation}
    assert experiment3.model_copy(update=same_evaluation) == experiment6, "only the evaluation differs"
