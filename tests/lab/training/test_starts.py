"""A second stage of training that starts from the best weights of another row's finished run."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.errors import DataError, ReefknotError, SettingsError, Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.cli.jobs import Job, JobFailed, _report_failures, _run_in_order
from reefknot.lab.experiment import is_done
from reefknot.lab.recipes.recipe import Recipe, default_folder, load_recipe
from reefknot.lab.recipes.starts import find_start, start_folder
from reefknot.lab.runs.folder import RunFolder, config_hash
from reefknot.lab.tasks import sequence_model
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World

STAGES = """
[[rows]]
name = "finetune"
[rows.set.training]
start = { row = "tied" }
averaging = { start = "at_once" }
stop = { rule = "nonmonotone", interval = 1 }
random_steps = { most = 10 }
optimiser = { kind = "sgd", learning_rate = 0.5, weight_decay = 1e-3 }

[[rows]]
name = "quoted"
quoted = true
"""


@pytest.fixture
def staged(tiny_recipe: Callable[..., Path]) -> Callable[..., str]:
    """A function that writes the tiny recipe with a second stage of its tied row and, optionally, more rows."""

    def write(more: str = "") -> str:
        path = tiny_recipe()
        path.write_text(path.read_text(encoding="utf-8") + STAGES + more, encoding="utf-8")
        return str(path)

    return write


def train(recipe: Recipe, row: str, out: Path | None = None, start: Path | None = None) -> Any:
    result = experiments.train(recipe, recipe.row(row), out, world=World(), display=SilentDisplay(), start=start)
    return result and result.record()


def test_second_stage_starts_from_the_best_weights_of_the_first(
    tmp_path: Path, staged: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = staged()
    recipe = load_recipe(name)
    with pytest.raises(SettingsError) as caught:
        train(recipe, "finetune")
    assert f"no finished run in {tmp_path}/runs/tiny/tied/seed0" in str(caught.value)
    assert f"`reefknot train {name} --row tied`" in str(caught.value)
    assert not Path("runs/tiny/finetune").exists()

    assert train(recipe, "tied")["start"] is None
    first = RunFolder.open(Path("runs/tiny/tied/seed0"))
    first_weights: list[dict[str, torch.Tensor]] = []
    make = sequence_model.Trainer

    def record_weights(model: Any, *args: Any, **options: Any) -> Any:
        first_weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return make(model, *args, **options)

    monkeypatch.setattr(sequence_model, "Trainer", record_weights)
    result = train(load_recipe(name, row="finetune"), "finetune")
    best = first.best_weights()
    assert all(torch.equal(best[name], first_weights[0][name]) for name in best)
    second = RunFolder.open(Path("runs/tiny/finetune/seed0"))
    assert second.config["start"].keys() == {"config_hash", "weights_sha256"}
    assert second.config["start"]["config_hash"] == config_hash(first.config)
    assert result["start"] == second.config["start"]
    assert result["training"]["averaged_from_epoch"] == 1


def test_error_names_the_complete_command_to_run_first(tmp_path: Path, staged: Callable[..., str]) -> None:
    recipe = load_recipe(staged(), ["training.seed=3", "corpus.tokens=500", "training.start.row=tied"], "finetune")
    command = r"--row tied corpus\.tokens=500 training\.seed=3 --data texts --out \S+/tied`, or"
    with pytest.raises(SettingsError, match=command):
        find_start(recipe, recipe.row("finetune"), 3, None, tmp_path / "run", Path("texts"))
    with pytest.raises(SettingsError, match=f"training.seed=3 --out {tmp_path}/tied`, or"):
        train(recipe, "finetune", tmp_path / "run")


def test_missing_explicit_start_is_reported(tmp_path: Path, staged: Callable[..., str]) -> None:
    recipe = load_recipe(staged())
    named = tmp_path / "nope"
    advice = f"`reefknot train {recipe.given_name} --row tied --out {named}`"

    def error() -> str:
        with pytest.raises(SettingsError) as caught:
            train(recipe, "finetune", tmp_path / "run", start=named)
        assert f"--start {named}:" in str(caught.value)
        return str(caught.value)

    assert "does not exist" in (message := error())
    assert advice in message
    named.mkdir()
    assert "no result.json" in (message := error())
    assert advice in message
    train(recipe, "tied", named / "seed0")
    assert f"such as {named / 'seed0'}" in error()
    assert not (tmp_path / "run").exists()


def test_first_stage_is_found_next_to_the_second(
    tmp_path: Path, staged: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(staged())
    row = recipe.row("finetune")
    folders = {"a/tied": "a/second", "b/tied/seed0": "b/finetune/seed0", "runs/tiny/tied/seed0": "elsewhere/run"}
    for first, out in folders.items():
        train(recipe, "tied", Path(first))
        assert find_start(recipe, row, 0, None, Path(out)) == Path(first)
    train(recipe, "untied", Path("c/tied"))  # the name of a folder is not enough
    assert find_start(recipe, row, 0, None, Path("c/second")) == Path("runs/tiny/tied/seed0")


def test_different_start_weights_are_rejected(tmp_path: Path, staged: Callable[..., str]) -> None:
    recipe = load_recipe(staged())
    for name in ("one", "twin"):
        train(recipe, "tied", tmp_path / name)
    train(load_recipe(recipe.given_name, ["training.seed=1"]), "tied", tmp_path / "other")
    train(recipe, "finetune", tmp_path / "second", start=tmp_path / "one")
    again = train(recipe, "finetune", tmp_path / "second", start=tmp_path / "twin")
    assert again == json.loads((tmp_path / "second" / "result.json").read_text(encoding="utf-8"))
    with pytest.raises(SettingsError, match="second holds a run that began with other weights; leave out --start"):
        train(recipe, "finetune", tmp_path / "second", start=tmp_path / "other")
    experiment = recipe.experiments["finetune"]
    dataset = open_dataset(experiment.corpus, experiment.vocabulary)
    for start, done in (("one", True), ("twin", True), ("other", False), ("absent", True)):
        row = recipe.row("finetune")
        assert is_done(tmp_path / "second", recipe, row, 0, dataset, tmp_path / start) is done


def test_stage_with_checkpoints_does_not_need_its_start(
    tmp_path: Path, staged: Callable[..., str], signal_in_step: Callable[[int], None], outcome: Any
) -> None:
    recipe = load_recipe(staged())
    first, out = tmp_path / "first", tmp_path / "second"
    train(recipe, "tied", first)
    result = train(recipe, "finetune", tmp_path / "whole", start=first)
    signal_in_step(2)
    with pytest.raises(Stopped):
        train(recipe, "finetune", out, start=first)
    signal_in_step(0)
    first.rename(tmp_path / "away")
    assert train(recipe, "finetune", tmp_path / "whole", start=first) == result
    with pytest.raises(SettingsError, match=r"\(encoder\.dropout: 0\.3 -> 0\.1\)"):
        train(load_recipe(recipe.given_name, ["encoder.dropout=0.1"]), "finetune", tmp_path / "whole", start=first)
    train(recipe, "finetune", out, start=first)
    assert {**outcome(out), "weights": None} == {**outcome(tmp_path / "whole"), "weights": None}
    # A run that was stopped before its first checkpoint has only its settings.
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((out / "config.json").read_bytes())
    with pytest.raises(ReefknotError, match="this folder does not exist"):
        train(recipe, "finetune", tmp_path / "bare", start=first)


def test_start_must_be_requested_and_match_the_model(
    tmp_path: Path, staged: Callable[..., str], made_text: Callable[[int], Path]
) -> None:
    recipe = load_recipe(staged())
    train(recipe, "untied", tmp_path / "untied")
    with pytest.raises(SettingsError, match=r'"tied" does not start from a run; --start needs training\.start'):
        train(recipe, "tied", tmp_path / "run", start=tmp_path / "untied")
    with pytest.raises(DataError, match=r"cannot start from \S+/untied: .* a different model: \S+ do not match"):
        train(recipe, "finetune", tmp_path / "run", start=tmp_path / "untied")
    changed_text = made_text(120)
    path = changed_text / "train.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("w7", "v7"), encoding="utf-8")
    train(load_recipe(recipe.given_name, [f"corpus.name={changed_text}"]), "tied", tmp_path / "words")
    with pytest.raises(DataError, match=r"words: it has another vocabulary"):
        train(recipe, "finetune", tmp_path / "run", start=tmp_path / "words")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("start = { row = 'tide' }", 'no trained row is called "tide"; there are: "tied", "untied", "finetune", "new"'),
        ("start = { row = 'quoted' }", 'no trained row is called "quoted"'),
        ("start = { row = 'new' }", 'a row cannot start from its own weights: "new" <- "new"'),
        (
            "start = { row = 'untied' }",
            '"untied" has another model; these parameters differ: output.classifier.table.weight',
        ),
        ("start = {}", "training.start.row: must be set"),
    ],
)
def test_invalid_starts_are_rejected(staged: Callable[..., str], row: str, message: str) -> None:
    name = staged(f'\n[[rows]]\nname = "new"\n[rows.set.training]\n{row}\n')
    for requested in (None, "new"):
        if requested and "another model" in message:
            continue  # the models are compared only if all rows are loaded
        with pytest.raises(SettingsError) as caught:
            load_recipe(name, row=requested)
        assert 'row "new":' in str(caught.value)
        assert message in str(caught.value)


def test_circular_starts_are_rejected(staged: Callable[..., str]) -> None:
    chain = "".join(
        f'\n[[rows]]\nname = "{name}"\n[rows.set.training]\nstart = {{ row = "{start}" }}\n'
        for name, start in (("a", "b"), ("b", "c"), ("c", "b"))
    )
    with pytest.raises(SettingsError) as caught:
        load_recipe(staged(chain))
    assert '"a" <- "b" <- "c" <- "b"' in str(caught.value)
    # A different dropout rate is not a different model.
    assert load_recipe(staged(), ["encoder.dropout=0.1"]).rows[2].name == "finetune"


def test_folder_of_a_start_has_the_row_and_the_seed(staged: Callable[..., str]) -> None:
    recipe = load_recipe(staged())
    rows = {row.name: row for row in recipe.rows}
    assert start_folder(recipe, rows["finetune"], 2) == default_folder(recipe, rows["tied"], 2)
    assert start_folder(recipe, rows["finetune"], 2, Path("out")) == Path("out/tied/seed2")
    assert start_folder(recipe, rows["tied"], 0) is None


def make_job(name: str, start: str | None = None) -> Job:
    return Job("recipe", name, seed=0, out=Path(name), start=Path(start) if start else None)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_job_runs_after_the_job_it_starts_from(at_once: int) -> None:
    order: list[str] = []
    jobs = [
        make_job("third", "second"),
        make_job("second", "first"),
        make_job("first"),
        make_job("alone"),
        make_job("late", "done before"),
    ]

    def run(job: Job) -> int:
        order.append(job.row)
        return 0

    with ThreadPoolExecutor(at_once) as pool:
        assert _run_in_order(jobs, lambda job: pool.submit(run, job)) == [0] * 5
    assert sorted(order) == sorted(job.row for job in jobs)
    assert order.index("first") < order.index("second") < order.index("third")
    assert jobs[0].command()[-2:] == ["--start", "second"]
    assert "--start" not in jobs[2].command()


def test_job_is_not_run_if_its_start_fails() -> None:
    jobs_run = []

    def submit(job: Job) -> Future[int]:
        jobs_run.append(job.row)
        ended: Future[int] = Future()
        ended.set_result(4 if job.row == "first" else 0)
        return ended

    jobs = [make_job("third", "second"), make_job("second", "first"), make_job("first"), make_job("alone")]
    codes = _run_in_order(jobs, submit)
    assert codes == [4, 4, 4, 0]
    assert jobs_run == ["first", "alone"]
    with pytest.raises(JobFailed, match=r"^these runs failed: first; .* not run: third, second$") as caught:
        _report_failures(jobs, codes)
    assert caught.value.exit_code == 4
