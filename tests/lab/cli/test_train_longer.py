"""`reefknot train RUN training.epochs=N` trains a finished run longer; the model card shows its unknown words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from reefknot.lab.interop.model_card import build_card
from reefknot.lab.tasks import open_run

from .conftest import Outcome

Cli = Callable[..., Outcome]


def test_run_is_named_in_place_of_a_recipe(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("training.epochs=1", "vocabulary.max_size=9")
    assert cli("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", *settings).code == 0
    short = json.loads((run / "result.json").read_text())
    for options, message in (
        (("--row", "tied"), "--row has no effect on a run, which has its own; leave --row out"),
        (("--seeds", 2), "--seeds has no effect on a run"),
        (("training.epochs=1",), ""),
        (("encoder.dropout=0.5",), "only its length can change"),
    ):
        outcome = cli("train", run, "--device", "cpu", *options)
        assert (outcome.code == 0, message in outcome.err) == (message == "", True), outcome.err
    assert "--accept-difference has no effect on a recipe" in cli("train", recipe, "--accept-difference").err

    outcome = cli("train", run, "training.epochs=2", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "epoch 2/2  valid perplexity" in outcome.out
    assert json.loads((run / "result.json").read_text())["training"]["earlier"] == ["epochs-1"]
    assert json.loads((run / "earlier/epochs-1/result.json").read_text()) == short
    assert cli("compare", run / "earlier/epochs-1", run).code == 0
    page = tmp_path / "page.html"
    assert cli("report", run / "earlier", "-o", page, "--json").json()["runs"] == 1
    assert cli("report", tmp_path, "-o", page, "--json").json()["runs"] == 1, "the record is not a run of its own"

    # The folder above a run is not a recipe.
    outcome = cli("train", tmp_path, "training.epochs=3")
    assert outcome.code == 2
    assert f"it is a folder that contains runs such as {run}; to train a run longer" in outcome.err
    assert "lists the shipped recipes" not in outcome.err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"`reefknot train --text {empty}` trains on the texts" in cli("train", empty).err

    card = build_card(open_run(run))
    share = short["test"]["unknown_share"]
    assert share > 0.05
    assert f" unknown words, {100 * share:.1f} % of {short['test']['words']:,} words and line ends" in card
    assert "of the words of the test text are unknown and scored as `<unk>`" in card
