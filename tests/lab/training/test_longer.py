"""A finished run that is trained longer equals a run of that length from the start, and keeps its earlier result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import DataError, SettingsError, Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.longer import check_longer, load_run_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import collect_runs
from reefknot.lab.training.distributed import World
from reefknot.storage import manifest

Outcome = Callable[[Path], dict[str, Any]]
Lengthen = Callable[..., Any]

COSINE = "training.schedule={kind='cosine', period=5, warmup=2}"


@pytest.fixture
def lengthen(display: Any) -> Lengthen:
    """Trains a run longer in this process, and returns the notes and what result.json holds."""

    def run(path: Path, *overrides: str, accept_difference: bool = False) -> Any:
        recipe, row = load_run_recipe(path, overrides)
        experiment = recipe.experiments[row.name]
        notes = check_longer(RunFolder.open(path), experiment, accept_difference=accept_difference)
        result = experiments.train(recipe, row, path, world=World(), display=display, longer=True)
        assert result is not None
        return notes, result.record()

    return run


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("training.schedule={kind='decay', hold=1, factor=0.5}",),
        (COSINE,),
        ("training.averaging={start='at_once'}",),
        ("training.stop={rule='patience', interval=9}", "training.validate_every=2"),
        ("evaluation.average=2",),
    ],
    ids=["constant", "decay", "cosine", "averaging", "validate_every", "mean"],
)
def test_longer_run_equals_a_run_from_the_start(
    tmp_path: Path, train: Any, lengthen: Lengthen, outcome: Outcome, settings: tuple[str, ...]
) -> None:
    expected = train(tmp_path / "start", "training.epochs=3", *settings)
    short = train(tmp_path / "run", "training.epochs=1", *settings)
    notes, longer = lengthen(tmp_path / "run", "training.epochs=3")
    assert [("cosine" in note) for note in notes] == [True] * (COSINE in settings)
    first, second = outcome(tmp_path / "start"), outcome(tmp_path / "run")
    # The mean of the shorter run's checkpoints stays, too.
    second["weights"] = {name: weights for name, weights in second["weights"].items() if name in first["weights"]}
    assert second == first
    assert longer["training"]["earlier"] == ["epochs-1"]
    same = ("row", "recipe", "config_hash", "changed", "paper", "parameters", "averaged")
    assert {key: longer.get(key) for key in same} == {key: expected.get(key) for key in same}
    assert json.loads((tmp_path / "run/earlier/epochs-1/result.json").read_text()) == short


def test_earlier_result_stays_readable(tmp_path: Path, train: Any, lengthen: Lengthen) -> None:
    out = tmp_path / "runs/one"
    short = train(out, "training.epochs=1")
    (out / "evaluations").mkdir()
    (out / "evaluations/note.txt").write_text("of the shorter run")
    lengthen(out, "training.epochs=2")
    _, longer = lengthen(out, "training.epochs=3")
    assert longer["training"]["earlier"] == ["epochs-1", "epochs-2"]
    assert longer["training"]["epochs"] == 3
    earlier = RunFolder.open(out / "earlier/epochs-1")
    assert earlier.result is not None
    assert earlier.result.record() == short
    manifest.verify(earlier.path)
    manifest.verify(out)
    assert set(earlier.read_scores()) == {"valid", "test"}
    assert (earlier.path / "evaluations/note.txt").is_file()
    assert not (out / "evaluations").exists(), "they belong to the weights of the shorter run"
    with pytest.raises(DataError, match="is the record of a run, without weights"):
        earlier.best_checkpoint()
    # A folder of runs has one run, and the record is read if it is named.
    (run,) = collect_runs([tmp_path / "runs"])
    assert run.epochs == 3
    (record,) = collect_runs([out / "earlier/epochs-1"])
    assert record.epochs == 1


def test_interrupted_longer_training_continues(
    tmp_path: Path,
    train: Any,
    lengthen: Lengthen,
    outcome: Outcome,
    signal_in_step: Callable[[int], None],
) -> None:
    expected = train(tmp_path / "start", "training.epochs=3")
    train(tmp_path / "run", "training.epochs=1")
    signal_in_step(3)
    with pytest.raises(Stopped):
        lengthen(tmp_path / "run", "training.epochs=3")
    assert RunFolder.open(tmp_path / "run").result is None
    _, longer = lengthen(tmp_path / "run")  # without a length, to the length that is recorded
    assert outcome(tmp_path / "run")["scores"] == outcome(tmp_path / "start")["scores"]
    assert longer["changed"] == expected["changed"]
    # A finished run of this length is done.
    assert lengthen(tmp_path / "run", "training.epochs=3") == ([], longer)


def test_updates_can_be_extended_from_a_validation(
    tmp_path: Path, train: Any, lengthen: Lengthen, outcome: Outcome
) -> None:
    settings = ("training.epochs=default", "training.validate_every=4")
    train(tmp_path / "start", "training.updates=10", *settings)
    train(tmp_path / "run", "training.updates=8", *settings)
    lengthen(tmp_path / "run", "training.updates=10")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "start")


def test_different_outcome_needs_a_request(tmp_path: Path, train: Any, lengthen: Lengthen) -> None:
    train(tmp_path / "run", "training.validate_every=4", "training.epochs=1")
    before = (tmp_path / "run/result.json").read_bytes()
    difference = "training has validated at its end, after update 6, where a longer run does not validate"
    with pytest.raises(SettingsError, match=f"from the start, because {difference}; pass --accept-difference"):
        lengthen(tmp_path / "run", "training.epochs=2")
    assert (tmp_path / "run/result.json").read_bytes() == before
    (note,), longer = lengthen(tmp_path / "run", "training.epochs=2", accept_difference=True)
    assert note.endswith(difference)
    assert longer["training"]["steps"] == 12


def test_rules_that_the_last_validation_skipped(tmp_path: Path, train: Any, lengthen: Lengthen) -> None:
    """A run that ends does not start to average and does not stop early, but a longer run would have."""
    rate = "training.schedule={kind='decay', hold=1, factor=60.0}"  # so that the loss becomes worse
    rule = "={%s='nonmonotone', interval=1}"
    train(tmp_path / "averaged", "training.epochs=3", rate, "training.averaging" + rule % "start")
    with pytest.raises(SettingsError, match="a longer run starts to average its weights after update 18"):
        lengthen(tmp_path / "averaged", "training.epochs=4")
    train(tmp_path / "stopped", "training.epochs=3", rate, "training.stop" + rule % "rule")
    with pytest.raises(SettingsError, match="a longer run ends at the same update, because training stops there by"):
        lengthen(tmp_path / "stopped", "training.epochs=4")
    train(tmp_path / "early", "training.epochs=9", rate, "training.stop" + rule % "rule")
    with pytest.raises(SettingsError, match="because training stopped after epoch 3 by the non-monotone rule"):
        lengthen(tmp_path / "early", "training.epochs=10")


def test_mistakes_leave_the_run_unchanged(tmp_path: Path, train: Any, lengthen: Lengthen) -> None:
    out = tmp_path / "run"
    train(out)
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*") if path.name != ".lock")
    for override, message in (
        ("training.epochs=1", "1 epochs is not longer than 2 epochs"),
        ("training.batch=3", "only its length can change .* not training.batch"),
        ("training.epochs=two", "training.epochs"),
    ):
        with pytest.raises(SettingsError, match=message):
            lengthen(out, override)
    with pytest.raises(SettingsError, match=r"or train this run longer with: reefknot train .*run training.epochs=4"):
        train(out, "training.epochs=4")
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*") if path.name != ".lock") == before


def test_unfinished_run_is_continued_with_its_command(
    tmp_path: Path, train: Any, lengthen: Lengthen, signal_in_step: Callable[[int], None]
) -> None:
    signal_in_step(3)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    with pytest.raises(SettingsError, match="not finished; continue it with the command that started it: "):
        lengthen(tmp_path / "run", "training.epochs=3")
