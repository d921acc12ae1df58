"""`reefknot sweep`: combinations, ranking, hidden test scores, and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.errors import SettingsError, Stopped
from reefknot.lab.cli.combinations import combine, parse_settings
from reefknot.lab.cli.jobs import Job, run_jobs

from .conftest import Outcome, Runs, run_command
from .test_results_page import documented_fields

Cli = Callable[..., Outcome]
RATE = "training.optimiser.learning_rate"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Run jobs in this process, which has already imported everything, and return the list of jobs."""
    finished: list[Job] = []

    def run(jobs: list[Job], max_parallel: int) -> None:
        for job in jobs:
            outcome = run_command(*job.command())
            assert outcome.code == 0, outcome.err
            assert "test perplexity" not in outcome.out
            finished.append(job)

    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", run)
    return finished


def test_combinations_are_trained_ranked_and_resumed(
    cli: Cli, recipe: Path, tmp_path: Path, trained: list[Job]
) -> None:
    root = tmp_path / "sweep"
    words = ("--row", "tied", "--out", root, "--device", "cpu", "training.epochs=1")
    outcome = cli("sweep", recipe, f"{RATE}=0.001,2", *words)
    assert outcome.code == 0, outcome.err
    assert "tied: 2 combinations of settings" in outcome.out
    assert f"2 runs in {root}, 0 of them done" in outcome.out
    assert outcome.out.index("learning_rate=2 ") < outcome.out.index("learning_rate=0.001 ")
    assert "Every row: settings differ from the recipe (training.epochs: 2 -> 1)" in outcome.out
    assert "1 of 2" in outcome.out
    assert "test" not in outcome.out.replace(str(tmp_path), "")

    summary = json.loads((root / "sweep.json").read_text("utf-8"))
    assert [trial["settings"] for trial in summary["trials"]] == [{RATE: 2}, {RATE: 0.001}]
    assert summary["trials"][0]["runs"] == [f"{RATE}=2/seed0"]
    assert summary["trials"][0]["valid"]["mean"] < summary["trials"][1]["valid"]["mean"]
    assert "test_of_the_best" not in summary
    page = (root / "report.html").read_text("utf-8")
    assert "validation perplexity" in page
    record = json.loads((root / f"{RATE}=2" / "seed0" / "result.json").read_text("utf-8"))
    assert f"<td>{record['valid']['nll']:.4f}</td>" in page
    assert f"<td>{record['test']['nll']:.4f}</td>" not in page

    again = cli("sweep", recipe, f"{RATE}=0.5,2,0.001", *words, "--test")
    assert "3 runs in" in again.out
    assert "2 of them done" in again.out
    assert [job.out.parent.name for job in trained[2:]] == [f"{RATE}=0.5"]
    assert again.out.count("test perplexity of the best (learning_rate=") == 1
    summary = json.loads((root / "sweep.json").read_text("utf-8"))
    assert summary["test_of_the_best"]["n"] == 1
    assert set(summary) == documented_fields("sweep")

    as_json = cli("sweep", recipe, f"{RATE}=0.5,2,0.001", *words, "--test", "--json")
    assert as_json.json() == summary


def test_every_combination_has_every_seed(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Job] = []
    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", lambda jobs, max_parallel: planned.extend(jobs))
    monkeypatch.chdir(tmp_path)
    outcome = cli("sweep", recipe, "training.clip=1,5", "encoder.dropout=0.1,0.2", "--row", "tied", "--seeds", 3)
    assert (outcome.code, len(planned)) == (0, 12)
    first = planned[0]
    assert first.out == Path("runs/sweeps/tiny/tied/encoder.dropout=0.1,training.clip=1/seed0")
    assert "--withhold-test" in first.command()
    assert {"training.clip=1", "encoder.dropout=0.1"} <= set(first.command())
    assert not list(tmp_path.rglob("sweep.json"))  # no run has finished

    planned.clear()
    outcome = cli("sweep", recipe, "training.clip=1,5", "--row", "tied", "--seeds", 2, "--first-seed", 100)
    assert outcome.code == 0, outcome.err
    assert [(job.seed, job.out.name) for job in planned] == [(100, "seed100"), (101, "seed101")] * 2
    assert "training.seed=101" in planned[1].command()


def test_mistakes_are_reported_before_anything_is_trained(
    cli: Cli, recipe: Path, tmp_path: Path, trained: list[Job]
) -> None:
    outcome = cli("sweep", recipe, "encoder.dropout=0.1,2", "tables.words.dim=8,9", "--row", "tied", "--out", tmp_path)
    assert outcome.code == 2
    assert 'combination "dropout=0.1, dim=9"' in outcome.err
    assert 'combinations "dropout=2, dim=8", "dropout=2, dim=9"' in outcome.err
    assert trained == []
    assert "choose a row with --row" in cli("sweep", recipe, "training.clip=1,2").err


def test_second_stage_starts_from_the_first(
    cli: Cli, recipe: Path, runs: Runs, tmp_path: Path, trained: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    staged = tmp_path / "tiny.toml"
    second = '\n[[rows]]\nname = "second"\nset.training.start.row = "tied"\n'
    staged.write_text(recipe.read_text("utf-8") + second, encoding="utf-8")
    words = ("sweep", staged, "training.clip=1,5", "training.epochs=1", "--row", "second", "--device", "cpu")
    outcome = cli(*words)
    assert (outcome.code, trained) == (2, [])
    assert outcome.err.count("starts from row") == 1
    command = f"`reefknot train {staged} --row tied training.epochs=1`"
    assert f"no finished run in {tmp_path}/runs/tiny/tied/seed0. Train it: {command}, or" in outcome.err
    assert cli(*words, "--seeds", 2, "--start", runs.tied.parent).err.count("/seed1: row") == 1
    outcome = cli(*words, "--start", runs.tied)
    assert outcome.code == 0, outcome.err
    assert [job.start for job in trained] == [runs.tied, runs.tied]
    assert "2 of them done" in cli(*words, "--start", runs.tied).out


def test_encoder_kind_can_vary(cli: Cli, recipe: Path, tmp_path: Path, trained: list[Job]) -> None:
    words = ("--row", "tied", "--device", "cpu", "--out", tmp_path, "training.epochs=1")
    outcome = cli("sweep", recipe, "encoder.kind=gru,rnn", *words)
    assert outcome.code == 0, outcome.err
    assert [job.label for job in trained] == ["kind=gru", "kind=rnn"]
    config = json.loads((trained[0].out / "config.json").read_text("utf-8"))
    assert config["settings"]["encoder"] == {"kind": "gru", "hidden_dim": 8, "layers": 1, "dropout": 0.2, "biases": 1}


@pytest.mark.parametrize("max_parallel", [1, 2])
def test_output_of_every_run_has_its_label(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, max_parallel: int
) -> None:
    monkeypatch.setattr(Job, "command", lambda job: ["ls", "schedules"])
    run_jobs([Job("demo", "tied", seed=0, out=Path(name), label=name) for name in ("clip=1", "clip=5")], max_parallel)
    lines = capfd.readouterr().out.splitlines()
    if max_parallel == 1:
        half = len(lines) // 2
        assert [lines[0], lines[half]] == ["clip=1", "clip=5"]
        assert lines[1:half] == lines[half + 1 :]
        assert lines[1] == "schedules"
    else:
        assert {"clip=1  schedules", "clip=5  schedules"} <= set(lines)
        assert all(line.startswith("clip=") for line in lines)


def test_stopped_sweep_shows_finished_runs(
    cli: Cli, recipe: Path, tmp_path: Path, trained: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reefknot.lab.cli import jobs

    run = jobs.run_jobs

    def stop(planned: list[Job], max_parallel: int) -> None:
        run(planned[:1], max_parallel)
        raise Stopped("stopped")

    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", stop)
    outcome = cli(
        "sweep", recipe, f"{RATE}=1,2", "training.epochs=1", "--row", "tied", "--out", tmp_path, "--device", "cpu"
    )
    assert outcome.code == Stopped.exit_code
    assert "learning_rate=1" in outcome.out
    assert len(json.loads((tmp_path / "sweep.json").read_text("utf-8"))["trials"]) == 1


def test_commas_inside_brackets_and_quotes_do_not_separate_values() -> None:
    fixed, varied = parse_settings(["a.b=[1,2],[3]", "c={x=1,y=2},{x=3}", "d='p,q',r", "e=[7,8]"])
    assert varied == {"a.b": ["[1,2]", "[3]"], "c": ["{x=1,y=2}", "{x=3}"], "d": ["'p,q'", "r"]}
    assert fixed == ["e=[7,8]"]
    combinations = combine(varied)
    assert len(combinations) == 8
    assert combinations[0].settings == {"a.b": [1, 2], "c": {"x": 1, "y": 2}, "d": "p,q"}
    assert combinations[-1].name == "b=[3], c={x=3}, d=r"


def test_names_are_short_only_if_unambiguous() -> None:
    first, *_ = combine({"encoder.dropout": ["0.1"], "output.classifier.dropout": ["0.2"], "training.clip": ["1"]})
    assert first.name == "encoder.dropout=0.1, output.classifier.dropout=0.2, clip=1"


def test_folder_is_named_after_its_settings() -> None:
    def folder(**settings: str) -> str:
        return combine({key: [value] for key, value in settings.items()})[0].folder

    assert folder(b="1e-5", a="x") == "a=x,b=1e-5"
    assert folder(a="x", b="1e-5") == folder(b="1e-5", a="x")
    odd = [folder(a="[1,2]"), folder(a="[1 ,2]"), folder(a="/1,2/"), folder(a="y" * 300)]
    assert len(set(odd)) == 4
    assert all("/" not in name and len(name) < 120 for name in odd)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.epochs=3"], "no setting has several values"),
        (["a=1,2", "a=3"], "a is given twice"),
        (["a=1,,2"], "'a=1,,2': a value is missing; list all values, as a=a,b,c"),
        (["encoder.dropout="], "'encoder.dropout=': a value is missing"),
        (["training.seed=0,1"], "use --seeds"),
        (["a=0.5,0.50"], "0.50 is listed twice"),
        ([f"a={','.join(map(str, range(40)))}", f"b={','.join(map(str, range(40)))}"], "1,600 combinations"),
    ],
)
def test_mistyped_settings_are_rejected(settings: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        combine(parse_settings(settings)[1])
