"""`reefknot evaluate` on language models: its modes, saved scores, and options that are rejected."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.cli.main import load_verb
from reefknot.lab.config.upgrade import RENAMED_OPTIONS
from reefknot.lab.evaluation import cache, dynamic
from reefknot.lab.tasks import TASKS, load_task
from reefknot.lab.tasks.requests import EvaluationRequest
from tiny import encoder

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture
def plain(cli: Cli, runs: Runs) -> float:
    return float(cli("evaluate", runs.tied, "--json").json()["perplexity"])


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_dynamic_evaluation_learns_and_leaves_the_run_unchanged(cli: Cli, runs: Runs, plain: float) -> None:
    before = read_files(runs.tied)
    options = ("--dynamic-rate", 0.001, "--dynamic-decay", 0.01, "--dynamic-segment", 4)
    record = cli("evaluate", runs.tied, "--dynamic", *options, "--json").json()
    assert record["perplexity"] == pytest.approx(math.exp(record["nll"]))
    assert record["perplexity"] != pytest.approx(plain, rel=1e-5)
    assert "segments of 4 tokens are scored, then trained on" in record["definition"]
    assert "eta 0.001, lambda 0.01, epsilon 2e-05 on the scale 'mean'" in record["definition"]
    assert "search" not in record
    summed = cli("evaluate", runs.tied, "--dynamic", "--dynamic-scale", "sum", "--limit", 40)
    assert "eta 0.002, lambda 0.02, epsilon 0.001 on the scale 'sum'" in summed.out
    assert read_files(runs.tied) == before


def test_cache_reports_its_settings_and_the_plain_perplexity(cli: Cli, runs: Runs, plain: float) -> None:
    options = ("--cache-weight", 0.2, "--cache-theta", 0.5, "--cache-window", 30, "--cache-fill", "full")
    outcome = cli("evaluate", runs.tied, "--cache", *options)
    assert outcome.out.startswith("test perplexity ")
    assert "weight 0.2, theta 0.5, over the last 30 positions, used only once the cache is full" in outcome.out
    assert f"without it: perplexity {plain:,.2f}" in outcome.out


def test_monte_carlo_depends_only_on_its_seed(cli: Cli, runs: Runs, plain: float) -> None:
    first, again, other = (
        cli("evaluate", runs.tied, "--monte-carlo", 3, "--limit", 50, "--monte-carlo-seed", seed, "--json").json()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first["perplexity"] != other["perplexity"]
    assert len(first["passes"]) == 3
    # New masks are drawn for every 10 tokens, the length of a training window.
    assert "mean probability of 3 passes, masks drawn for every 10 tokens (seed 1)" in first["definition"]


def test_search_tunes_the_cache(cli: Cli, runs: Runs) -> None:
    words = ("evaluate", runs.tied, "--cache", "--search", "--cache-window", 20)
    record = cli(*words, "--json").json()
    points = record["search"]["points"]
    assert {point["window"] for point in points} == {20}
    initial_grid = {(theta, weight) for theta in cache.THETAS for weight in cache.WEIGHTS}
    assert {(point["theta"], point["weight"]) for point in points[:30]} == initial_grid
    lowest = min(points, key=lambda point: point["nll"])
    best = record["search"]["best"]
    assert best == {name: lowest[name] for name in ("window", "theta", "weight")}
    assert f"weight {best['weight']:.4g}, theta {best['theta']:.4g}, over the last 20" in record["definition"]
    table, _, scores = cli(*words).out.partition("test perplexity")
    title, header, *rows = table.splitlines()
    assert re.fullmatch(r"perplexity of the valid text, \d+ tokens \(\* the best\)", title)
    assert header.split()[:3] == ["window", "theta", "weight"]
    assert "weight 0.05  weight 0.1  weight 0.15" in header
    assert sum(row.count("*") for row in rows) == 1
    assert f"{math.exp(lowest['nll']):,.2f}*" in table
    assert "continuous cache" in scores


def test_search_tunes_dynamic_evaluation(cli: Cli, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "ETA_FACTORS", (1.0, 10.0))
    monkeypatch.setattr(dynamic, "LAMBDA_FACTORS", (1.0, 2.0))
    words = ("evaluate", runs.tied, "--dynamic", "--search", "--search-tokens", 30, "--limit", 40)
    record = cli(*words, "--json").json()
    assert [(point["eta"], point["lambda"]) for point in record["search"]["points"]][:8] == [
        (5e-5, 0.002),
        (5e-5, 0.004),
        (5e-4, 0.002),
        (5e-4, 0.004),
        *((eta, 0.004) for eta in (5e-6, 5e-7, 5e-8, 5e-9)),
    ]
    assert record["search"]["text"] == "the shortened valid text, 30 tokens"
    assert "eta" in record["search"]["edges"]
    text = cli(*words).out
    assert "are at the edge of the grid" in text
    assert text.index("perplexity of the shortened valid text") < text.index("test perplexity")


def test_search_for_a_full_cache_compares_windows_that_fit(cli: Cli, runs: Runs) -> None:
    words = ("evaluate", runs.tied, "--cache", "--search", "--cache-fill", "full")
    assert "use a smaller --cache-window, more --search-tokens, or --cache-fill partial" in cli(*words).err
    outcome = cli(*words, "--cache-window", 20, "--search-tokens", 42)
    assert outcome.out.startswith("perplexity of the shortened valid text, 42 tokens, all but the first 21 scored (*")


def test_limit_scores_the_beginning_of_the_text(cli: Cli, runs: Runs) -> None:
    outcome = cli("evaluate", runs.tied, "--limit", 50)
    assert re.search(r"limit: only the first 50 of \d+ tokens", outcome.out)
    assert "tokens: 50 scored once each, of 50 in the shortened test text" in outcome.out
    record = cli("evaluate", runs.tied, "--limit", 50, "--json").json()
    assert (record["tokens"], record["limit"]) == (50, 50)
    assert record["bits_per_byte"] == pytest.approx(
        cli("evaluate", runs.tied, "--json").json()["bits_per_byte"], rel=0.2
    )
    unlimited = cli("evaluate", runs.tied, "--limit", 10**6, "--json").json()
    assert "limit" not in unlimited


def test_progress_is_printed_to_stderr(cli: Cli, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """If stderr is not a terminal, plain lines are printed every few seconds; here, every line is printed."""
    monkeypatch.setattr("reefknot.lab.training.display.LineDisplay.update", lambda _, line: print(line))
    outcome = cli("evaluate", runs.tied, "--dynamic", "--limit", 1000, "--json")
    assert outcome.json()["tokens"] > 0
    assert "scoring and learning  " in outcome.err
    assert "left" in outcome.err


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> Path:
    """A copy that tests may change."""
    return Path(shutil.copytree(runs.tied, tmp_path / "run", symlinks=True))


def read_saved(run: Path, kind: str) -> Any:
    return json.loads((run / "evaluations" / f"{kind}.json").read_text(encoding="utf-8"))


def test_save_scores_valid_and_test(cli: Cli, run: Path) -> None:
    outcome = cli("evaluate", run, "--cache", "--search", "--cache-window", 20, "--save", "--json")
    assert outcome.err == f"saved to {run}/evaluations/cache.json\n"
    valid, test = outcome.json()
    assert (valid["split"], test["split"]) == ("valid", "test")
    stored = read_saved(run, "cache")
    assert (stored["format"], stored["kind"]) == (2, "cache")
    assert stored["search"] == test["search"]
    assert stored["settings"] == {"fill": "partial", **stored["search"]["best"]}
    for split, printed in (("valid", valid), ("test", test)):
        assert stored[split] == {key: printed[key] for key in printed if key not in ("run", "split", "search")}
        plain = cli("evaluate", run, "--split", split, "--json").json()
        assert stored[split]["mode"] == {"kind": "cache", **stored["settings"], "plain": plain["perplexity"]}
    best = min(point["nll"] for point in stored["search"]["points"])
    assert stored["valid"]["nll"] == pytest.approx(best, abs=1e-6)
    assert stored["command"] == f"reefknot evaluate {run} --cache --search --cache-window 20 --save --json"
    assert {"commit", "dirty", "source_sha256"} < set(stored)
    assert [path.name for path in (run / "evaluations").iterdir()] == ["cache.json"]


def test_saving_one_split_keeps_the_other_only_with_equal_settings(cli: Cli, run: Path) -> None:
    rates = ("--dynamic", "--dynamic-rate", 0.001, "--save")
    cli("evaluate", run, *rates, "--split", "valid")
    first = read_saved(run, "dynamic")
    assert "test" not in first
    assert first["settings"] == {"scale": "mean", "eta": 0.001, "lambda": 0.002, "epsilon": 2e-5, "segment": 5}
    outcome = cli("evaluate", run, *rates, "--split", "test")
    assert outcome.err.endswith("dynamic.json, together with the valid score that was there\n")
    combined = read_saved(run, "dynamic")
    assert combined["valid"] == first["valid"]
    assert combined["test"]["tokens"] > combined["valid"]["tokens"]
    outcome = cli("evaluate", run, *rates, "--split", "test", "--dynamic-segment", 10)
    assert "dynamic.json, replacing an evaluation that differs (settings.lambda: 0.002 -> 0.004; " in outcome.err
    assert "valid" not in read_saved(run, "dynamic")
    cli("evaluate", run, "--monte-carlo", 2, "--split", "test", "--save")
    assert read_saved(run, "mc")["settings"] == {"passes": 2, "window": 10, "seed": 0}
    assert "valid" not in read_saved(run, "dynamic")
    (run / "result.json").unlink()
    assert "train this run to its end first" in cli("evaluate", run, "--monte-carlo", 2, "--save").err


def test_scores_of_the_protocol_and_of_training_are_printed(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("training.epochs=1", "evaluation.streams=3", "evaluation.protocol=zaremba")
    trained = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *settings)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    perplexity = f"{result['test']['perplexity']:,.2f}"
    assert f"test perplexity {perplexity} in 3 streams, 0 % unknown words, counted as zaremba: " in trained.out
    for split in ("valid", "test"):
        record = cli("evaluate", out, "--split", split, "--json").json()
        assert record["protocol"]["name"] == "zaremba"
        assert record["protocol"][split] == pytest.approx(result["protocol"][split])
        assert record["recorded"] == {"perplexity": result[split]["perplexity"], "streams": 3}
    text = cli("evaluate", out).out
    assert f"counted as zaremba: test perplexity {result['protocol']['test']['perplexity']:,.2f}\n" in text
    assert f"training recorded {result['test']['perplexity']:,.2f}, in 3 streams, each of which begins" in text
    recomputed = cli("evaluate", out, "--streams", 3, "--protocol", "awd", "--json").json()
    assert recomputed["protocol"]["name"] == "awd"
    assert recomputed["perplexity"] == pytest.approx(result["test"]["perplexity"])
    assert "recorded" not in recomputed
    assert "protocol" not in cli("evaluate", out, "--protocol", "definition", "--json").json()
    assert "counted as" not in cli("evaluate", out, "--limit", 50).out


def test_definition_shows_that_plain_evaluation_is_better(cli: Cli, runs: Runs, plain: float) -> None:
    text = cli("evaluate", runs.tied, "--dynamic", "--dynamic-rate", 100).out
    assert max(map(len, text.splitlines())) < 500
    assert f"without it: perplexity {plain:,.2f}, which is better" in text


def test_windows_are_set_by_context_and_stride(cli: Cli, run: Path, plain: float) -> None:
    """A recurrent model can be scored in windows. The score of training is printed as well."""
    record = cli("evaluate", run, "--context", 20, "--stride", 5, "--json").json()
    assert (
        "context: windows of 25 tokens, of which the last 5 are scored, each computed independently"
        in record["definition"]
    )
    assert record["windows"] == "context-20-stride-5"
    assert record["perplexity"] == pytest.approx(plain, rel=0.05)
    assert record["recorded"] == {"perplexity": pytest.approx(plain), "streams": 1}
    assert "training recorded" in cli("evaluate", run, "--windows", "lines").out
    # If one of the options is left out, windows are as long as in training.
    assert cli("evaluate", run, "--context", 7, "--json").json()["windows"] == "context-7-stride-3"
    assert cli("evaluate", run, "--stride", 7, "--json").json()["windows"] == "context-3-stride-7"
    assert cli("evaluate", run, "--context", 30, "--json").json()["windows"] == "context-30-stride-1"
    one_window = cli("evaluate", run, "--windows", "complete-1000000", "--json").json()
    assert one_window["perplexity"] == pytest.approx(plain)
    cached = cli("evaluate", run, "--cache", "--context", 20, "--json").json()
    assert "windows of 21 tokens" in cached["definition"]
    assert "continuous cache: weight 0.1" in cached["definition"]
    outcome = cli("evaluate", run, "--context", 20, "--stride", 5, "--save")
    assert outcome.err == f"saved to {run}/evaluations/context-20-stride-5.json\n"
    stored = read_saved(run, "context-20-stride-5")
    assert stored["settings"] == {"windows": "context-20-stride-5"}
    assert stored["test"]["perplexity"] == record["perplexity"]
    assert stored["valid"]["tokens"] == 150


@pytest.fixture(scope="module")
def transformer(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose encoder carries no state and whose settings do not define windows."""
    out = tmp_path_factory.mktemp("transformer") / "run"
    settings = (
        encoder("transformer"),
        "training.epochs=1",
        "training.optimiser.learning_rate=0.1",
        "evaluation.train=true",
    )
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *settings)
    assert outcome.code == 0, outcome.err
    return out


def test_transformer_is_scored_in_windows(cli: Cli, transformer: Path) -> None:
    result = json.loads((transformer / "result.json").read_text(encoding="utf-8"))
    for split in ("train", "valid", "test"):
        assert "context: blocks of 10 tokens, each computed independently" in result[split]["definition"]
        record = cli("evaluate", transformer, "--split", split, "--json").json()
        assert record["perplexity"] == pytest.approx(result[split]["perplexity"])
        assert "recorded" not in record
    with_context = cli("evaluate", transformer, "--context", 10, "--json").json()
    assert with_context["windows"] == "context-10-stride-1"
    assert with_context["perplexity"] != pytest.approx(result["test"]["perplexity"], rel=1e-4)
    assert with_context["recorded"]["windows"] == "context-0-stride-10"
    assert "training recorded" in cli("evaluate", transformer, "--windows", "lines").out
    dropped = cli("evaluate", transformer, "--monte-carlo", 2, "--limit", 40, "--json").json()
    assert "masks drawn for every window" in dropped["definition"]
    assert cli("rank", transformer, "--contexts", 30, "--json").json()["contexts"] == 30
    assert "mean probabilities over" in cli("predict", transformer, "--split", "valid").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dynamic",), "Transformer carries none; use more context instead"),
        (("--streams", 2), "--streams: a Transformer carries no state from window to window"),
        (("--protocol", "awd"), 'Transformer carries none; use the protocol "definition"'),
    ],
)
def test_options_that_need_a_state_are_rejected_for_a_transformer(
    cli: Cli, transformer: Path, options: Any, message: str
) -> None:
    outcome = cli("evaluate", transformer, *options)
    assert outcome.code == 2
    assert message in outcome.err


MISTAKES = [
    ("--dynamic --cache", "--dynamic and --cache: a text is scored in one mode at a time; choose one"),
    ("--cache --monte-carlo 3", "--cache and --monte-carlo: a text is scored in one mode"),
    ("--dynamic-rate 1", "--dynamic-rate has no effect without --dynamic; add --dynamic or leave --dynamic-rate out"),
    ("--monte-carlo 3 --dynamic-decay 1", "--dynamic-decay has no effect without --dynamic"),
    ("--dynamic-epsilon 1", "--dynamic-epsilon has no effect without --dynamic"),
    ("--dynamic-scale sum", "--dynamic-scale has no effect without --dynamic"),
    ("--dynamic-segment 5", "--dynamic-segment has no effect without --dynamic"),
    ("--dynamic --cache-theta 1", "--cache-theta has no effect without --cache"),
    ("--cache-weight 0", "--cache-weight has no effect without --cache"),
    ("--cache-window 9", "--cache-window has no effect without --cache"),
    ("--cache-fill full", "--cache-fill has no effect without --cache"),
    ("--cache --monte-carlo-seed 0", "--monte-carlo-seed has no effect without --monte-carlo"),
    ("--beam 5", "--beam has no effect on .*seed0, which is a language model; leave --beam out"),
    ("--dynamic --streams 1", "--streams: --dynamic reads the text in one stream; leave --streams out"),
    ("--streams 5000", r"--streams 5,000: the test text has only \d+ tokens"),
    ("--limit 3 --streams 4", "--streams 4: the test text has only 3 tokens"),
    ("--search", "--search has no effect without --dynamic or --cache"),
    ("--monte-carlo 2 --search", "--search has no effect without --dynamic or --cache"),
    ("--dynamic --search-tokens 9", "--search-tokens has no effect without --search; add --search"),
    (
        "--dynamic --search --dynamic-rate 1 --dynamic-decay 1",
        "--search has nothing to tune, because --dynamic-rate, --dynamic-decay are all given",
    ),
    ("--dynamic --dynamic-rate -1", "--dynamic-rate: must be greater than 0 .it is -1.0."),
    ("--dynamic --dynamic-decay nan", "--dynamic-decay: must be a finite number"),
    ("--dynamic --dynamic-scale max", "--dynamic-scale: must be 'mean' or 'sum'"),
    ("--cache --cache-weight 1.5", "--cache-weight: must be less than 1 .it is 1.5."),
    ("--cache --cache-fill never", "--cache-fill: must be 'partial' or 'full'"),
    ("--monte-carlo 0", "--monte-carlo"),
    ("--save", "--save needs --dynamic, --cache, --monte-carlo, .* because training has saved the plain scores"),
    ("--context 5 --save --limit 9", "whole valid and test texts; leave --limit out"),
    ("--context 5 --windows lines", "--context and --windows both set the windows of the text; choose one"),
    ("--windows complete", "unknown windows 'complete': use context-C-stride-S, complete-L, context-C-complete-L or"),
    ("--context 0 --dynamic", "--context: --dynamic carries a state through the text"),
    ("--windows lines --streams 2", "--windows: --streams carries a state through the text"),
    ("--context -1", "--context"),
    ("--stride 0", "--stride"),
    ("--monte-carlo 2 --monte-carlo-seed 9223372036854775808", "seed = 9223372036854775808: must be at least 0 and"),
    ("--cache --save --limit 9", "--save stores scores of the whole valid and test texts; leave --limit out"),
    ("--cache --save --split train", "leave --split train out"),
    ("--protocol inan", "--protocol inan: must be one of definition, zaremba, awd"),
    ("--protocol awd --cache", "--protocol: .* leave --cache out"),
    ("--protocol awd --limit 9", "--protocol: .* leave --limit out"),
    ("--protocol awd --split train", "--protocol: .* leave --split train out"),
    ("--limit 0", "--limit"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[options for options, _ in MISTAKES])
def test_contradictory_options_are_rejected(cli: Cli, runs: Runs, options: str, message: str) -> None:
    outcome = cli("evaluate", runs.tied, *options.split())
    assert outcome.code == 2
    assert re.search(message, outcome.err), outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(("old", "new"), RENAMED_OPTIONS["evaluate"].items())
def test_old_option_name_prints_the_new_name(cli: Cli, runs: Runs, old: str, new: str) -> None:
    options = {name for parameter in load_verb("evaluate").params for name in parameter.opts}
    assert new in options
    assert old not in options
    for words in ((old, 1), (f"{old}=1",)):
        outcome = cli("evaluate", runs.tied, *words)
        assert (outcome.code, outcome.out) == (2, "")
        assert re.search(rf"{old}\b.* {new}\b", outcome.err)


def test_every_option_of_evaluate_is_used_by_a_task() -> None:
    """An option that no task declares would be rejected for every run."""
    used = {name for task in TASKS for name in load_task(task).evaluation_options}
    assert used == {field.name for field in fields(EvaluationRequest)} - EvaluationRequest.options_of_all_tasks
