"""`reefknot evaluate`: the ways to score beside the plain one, and options that do not go together."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.evaluation import cache, dynamic
from tiny import encoder

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture
def plain(cli: Cli, runs: Runs) -> float:
    return float(cli("evaluate", runs.tied, "--json").json()["perplexity"])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_dynamic(cli: Cli, runs: Runs, plain: float) -> None:
    before = files(runs.tied)
    found = cli("evaluate", runs.tied, "--dynamic", "--eta", 0.001, "--lambda", 0.01, "--segment", 4, "--json").json()
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["perplexity"] != pytest.approx(plain, rel=1e-5)
    assert "segments of 4 tokens are scored, then trained on" in found["definition"]
    assert "eta 0.001, lambda 0.01, epsilon 2e-05 on the scale 'mean'" in found["definition"]
    assert "search" not in found
    older = cli("evaluate", runs.tied, "--dynamic", "--scale", "sum", "--limit", 40)
    assert "eta 0.002, lambda 0.02, epsilon 0.001 on the scale 'sum'" in older.out
    assert files(runs.tied) == before


def test_cache(cli: Cli, runs: Runs, plain: float) -> None:
    options = ("--weight", 0.2, "--theta", 0.5, "--window", 30, "--fill", "full")
    outcome = cli("evaluate", runs.tied, "--cache", *options)
    assert outcome.out.startswith("test perplexity ")
    assert "weight 0.2, theta 0.5, over the last 30 positions, used only after more positions than that" in outcome.out
    assert f"without it: perplexity {plain:,.2f}" in outcome.out


def test_monte_carlo(cli: Cli, runs: Runs, plain: float) -> None:
    first, again, other = (
        cli("evaluate", runs.tied, "--mc", 3, "--limit", 50, "--seed", seed, "--json").json() for seed in (1, 1, 2)
    )
    assert first == again
    assert first["perplexity"] != other["perplexity"]
    assert len(first["passes"]) == 3
    # Masks hold for a window of training.
    assert "mean probability of 3 passes, masks drawn for every 10 tokens (seed 1)" in first["definition"]


def test_search_for_the_cache(cli: Cli, runs: Runs) -> None:
    words = ("evaluate", runs.tied, "--cache", "--search", "--window", 20)
    found = cli(*words, "--json").json()
    points = found["search"]["points"]
    assert {point["window"] for point in points} == {20}
    began = {(theta, weight) for theta in cache.THETAS for weight in cache.WEIGHTS}
    assert {(point["theta"], point["weight"]) for point in points[:30]} == began
    least = min(points, key=lambda point: point["nll"])
    best = found["search"]["best"]
    assert best == {name: least[name] for name in ("window", "theta", "weight")}
    assert f"weight {best['weight']:.4g}, theta {best['theta']:.4g}, over the last 20" in found["definition"]
    table, _, rest = cli(*words).out.partition("test perplexity")
    title, header, *rows = table.splitlines()
    assert re.fullmatch(r"perplexity of the valid text, \d+ tokens \(\* the best\)", title)
    assert header.split()[:3] == ["window", "theta", "weight"]
    assert "weight 0.05  weight 0.1  weight 0.15" in header
    assert sum(row.count("*") for row in rows) == 1
    assert f"{math.exp(least['nll']):,.2f}*" in table
    assert "continuous cache" in rest


def test_search_for_dynamic_rates(cli: Cli, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "ETA_FACTORS", (1.0, 10.0))
    monkeypatch.setattr(dynamic, "LAMBDA_FACTORS", (1.0, 2.0))
    words = ("evaluate", runs.tied, "--dynamic", "--search", "--search-tokens", 30, "--limit", 40)
    found = cli(*words, "--json").json()
    assert [(point["eta"], point["lambda"]) for point in found["search"]["points"]][:8] == [
        (5e-5, 0.002),
        (5e-5, 0.004),
        (5e-4, 0.002),
        (5e-4, 0.004),
        *((eta, 0.004) for eta in (5e-6, 5e-7, 5e-8, 5e-9)),
    ]
    assert found["search"]["text"] == "the shortened valid text, 30 tokens"
    assert "eta" in found["search"]["edges"]
    text = cli(*words).out
    assert "lie at the edge of the grid" in text
    assert text.index("perplexity of the shortened valid text") < text.index("test perplexity")


def test_search_for_a_full_cache(cli: Cli, runs: Runs) -> None:
    words = ("evaluate", runs.tied, "--cache", "--search", "--fill", "full")
    assert "use a smaller --window, more --search-tokens, or --fill partial" in cli(*words).err
    outcome = cli(*words, "--window", 20, "--search-tokens", 42)
    assert outcome.out.startswith("perplexity of the shortened valid text, 42 tokens, all but the first 21 scored (*")


def test_limit(cli: Cli, runs: Runs) -> None:
    outcome = cli("evaluate", runs.tied, "--limit", 50)
    assert re.search(r"limit: the first 50 of \d+ tokens only", outcome.out)
    assert "tokens: 50 scored once each, of 50 in the shortened test text" in outcome.out
    found = cli("evaluate", runs.tied, "--limit", 50, "--json").json()
    assert (found["tokens"], found["limit"]) == (50, 50)
    assert found["bits_per_byte"] == pytest.approx(
        cli("evaluate", runs.tied, "--json").json()["bits_per_byte"], rel=0.2
    )
    whole = cli("evaluate", runs.tied, "--limit", 10**6, "--json").json()
    assert "limit" not in whole


def test_progress_never_mixes_with_the_result(cli: Cli, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is no terminal, plain lines come every few seconds: here, all of them."""
    monkeypatch.setattr("reefknot.lab.training.display.Lines.update", lambda _, line: print(line))
    outcome = cli("evaluate", runs.tied, "--dynamic", "--limit", 1000, "--json")
    assert outcome.json()["tokens"] > 0
    assert "scoring and learning  " in outcome.err
    assert "left" in outcome.err


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> Path:
    """One that may be written to."""
    return Path(shutil.copytree(runs.tied, tmp_path / "run", symlinks=True))


def saved(run: Path, kind: str) -> Any:
    return json.loads((run / "evaluations" / f"{kind}.json").read_text(encoding="utf-8"))


def test_save_scores_both_texts(cli: Cli, run: Path) -> None:
    outcome = cli("evaluate", run, "--cache", "--search", "--window", 20, "--save", "--json")
    assert outcome.err == f"saved to {run}/evaluations/cache.json\n"
    valid, test = outcome.json()
    assert (valid["split"], test["split"]) == ("valid", "test")
    record = saved(run, "cache")
    assert (record["format"], record["kind"]) == (2, "cache")
    assert record["search"] == test["search"]
    assert record["settings"] == {"fill": "partial", **record["search"]["best"]}
    for split, found in (("valid", valid), ("test", test)):
        assert record[split] == {key: found[key] for key in found if key not in ("run", "split", "search")}
        plain = cli("evaluate", run, "--split", split, "--json").json()
        assert record[split]["mode"] == {"kind": "cache", **record["settings"], "plain": plain["perplexity"]}
    best = min(point["nll"] for point in record["search"]["points"])
    assert record["valid"]["nll"] == pytest.approx(best, abs=1e-6)
    assert record["command"] == f"reefknot evaluate {run} --cache --search --window 20 --save --json"
    assert {"commit", "dirty", "source_sha256"} < set(record)
    assert [path.name for path in (run / "evaluations").iterdir()] == ["cache.json"]


def test_save_of_one_text_joins_or_replaces(cli: Cli, run: Path) -> None:
    rates = ("--dynamic", "--eta", 0.001, "--save")
    cli("evaluate", run, *rates, "--split", "valid")
    first = saved(run, "dynamic")
    assert "test" not in first
    assert first["settings"] == {"scale": "mean", "eta": 0.001, "lambda": 0.002, "epsilon": 2e-5, "segment": 5}
    outcome = cli("evaluate", run, *rates, "--split", "test")
    assert outcome.err.endswith("dynamic.json, beside the valid figure that was there\n")
    both = saved(run, "dynamic")
    assert both["valid"] == first["valid"]
    assert both["test"]["tokens"] > both["valid"]["tokens"]
    outcome = cli("evaluate", run, *rates, "--split", "test", "--segment", 10)
    assert "dynamic.json, in place of another evaluation (settings.lambda: 0.002 -> 0.004; " in outcome.err
    assert "valid" not in saved(run, "dynamic")
    cli("evaluate", run, "--mc", 2, "--split", "test", "--save")
    assert saved(run, "mc")["settings"] == {"passes": 2, "window": 10, "seed": 0}
    assert "valid" not in saved(run, "dynamic")
    (run / "result.json").unlink()
    assert "train this one to its end first" in cli("evaluate", run, "--mc", 2, "--save").err


def test_the_figure_of_the_paper_and_that_of_training(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("training.epochs=1", "evaluation.streams=3", "evaluation.protocol=zaremba")
    trained = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *settings)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert f"test perplexity {result['test']['perplexity']:,.2f} in 3 streams, counted as zaremba: " in trained.out
    for split in ("valid", "test"):
        found = cli("evaluate", out, "--split", split, "--json").json()
        assert found["protocol"]["name"] == "zaremba"
        assert found["protocol"][split] == pytest.approx(result["protocol"][split])
        assert found["recorded"] == {"perplexity": result[split]["perplexity"], "streams": 3}
    text = cli("evaluate", out).out
    assert f"counted as zaremba: test perplexity {result['protocol']['test']['perplexity']:,.2f}\n" in text
    assert f"training recorded {result['test']['perplexity']:,.2f}, in 3 streams, each of which begins" in text
    same = cli("evaluate", out, "--streams", 3, "--protocol", "awd", "--json").json()
    assert same["protocol"]["name"] == "awd"
    assert same["perplexity"] == pytest.approx(result["test"]["perplexity"])
    assert "recorded" not in same
    assert "protocol" not in cli("evaluate", out, "--protocol", "definition", "--json").json()
    assert "counted as" not in cli("evaluate", out, "--limit", 50).out


def test_rates_that_lead_astray_are_short_and_seen(cli: Cli, runs: Runs, plain: float) -> None:
    text = cli("evaluate", runs.tied, "--dynamic", "--eta", 100).out
    assert max(map(len, text.splitlines())) < 500
    assert f"without it: perplexity {plain:,.2f}, which is better" in text


def test_windows(cli: Cli, run: Path, plain: float) -> None:
    """A recurrent model in windows that are computed afresh, the figure of training beside it."""
    found = cli("evaluate", run, "--context", 20, "--stride", 5, "--json").json()
    assert (
        "context: windows of 25 tokens, of which the last 5 are scored, each computed independently"
        in found["definition"]
    )
    assert found["windows"] == "context-20-stride-5"
    assert found["perplexity"] == pytest.approx(plain, rel=0.05)
    assert found["recorded"] == {"perplexity": pytest.approx(plain), "streams": 1}
    assert "training recorded" in cli("evaluate", run, "--windows", "lines").out
    # What is not said makes windows as long as the run's, which are as long as the blocks of its training.
    assert cli("evaluate", run, "--context", 7, "--json").json()["windows"] == "context-7-stride-3"
    assert cli("evaluate", run, "--stride", 7, "--json").json()["windows"] == "context-3-stride-7"
    assert cli("evaluate", run, "--context", 30, "--json").json()["windows"] == "context-30-stride-1"
    whole = cli("evaluate", run, "--windows", "complete-1000000", "--json").json()
    assert whole["perplexity"] == pytest.approx(plain)
    cached = cli("evaluate", run, "--cache", "--context", 20, "--json").json()
    assert "windows of 21 tokens" in cached["definition"]
    assert "continuous cache: weight 0.1" in cached["definition"]
    outcome = cli("evaluate", run, "--context", 20, "--stride", 5, "--save")
    assert outcome.err == f"saved to {run}/evaluations/context-20-stride-5.json\n"
    record = saved(run, "context-20-stride-5")
    assert record["settings"] == {"windows": "context-20-stride-5"}
    assert record["test"]["perplexity"] == found["perplexity"]
    assert record["valid"]["tokens"] == 150


@pytest.fixture(scope="module")
def attentive(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose encoder carries no state, and whose settings say nothing of windows."""
    out = tmp_path_factory.mktemp("attentive") / "run"
    settings = (
        encoder("transformer"),
        "training.epochs=1",
        "training.optimiser.learning_rate=0.1",
        "evaluation.train=true",
    )
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *settings)
    assert outcome.code == 0, outcome.err
    return out


def test_an_encoder_without_a_state(cli: Cli, attentive: Path) -> None:
    result = json.loads((attentive / "result.json").read_text(encoding="utf-8"))
    for split in ("train", "valid", "test"):
        assert "context: blocks of 10 tokens, each computed independently" in result[split]["definition"]
        found = cli("evaluate", attentive, "--split", split, "--json").json()
        assert found["perplexity"] == pytest.approx(result[split]["perplexity"])
        assert "recorded" not in found
    more = cli("evaluate", attentive, "--context", 10, "--json").json()
    assert more["windows"] == "context-10-stride-1"
    assert more["perplexity"] != pytest.approx(result["test"]["perplexity"], rel=1e-4)
    assert more["recorded"]["windows"] == "context-0-stride-10"
    assert "training recorded" in cli("evaluate", attentive, "--windows", "lines").out
    dropped = cli("evaluate", attentive, "--mc", 2, "--limit", 40, "--json").json()
    assert "masks drawn for every window" in dropped["definition"]
    assert cli("rank", attentive, "--contexts", 30, "--json").json()["contexts"] == 30
    assert "mean probability over" in cli("predict", attentive, "--split", "valid").out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--dynamic",), "Transformer carries none: give it more context instead"),
        (("--streams", 2), "--streams: a Transformer carries no state from window to window"),
        (("--protocol", "awd"), 'Transformer carries none; count by the protocol "definition"'),
    ],
)
def test_what_needs_a_state_is_refused(cli: Cli, attentive: Path, options: Any, sentence: str) -> None:
    outcome = cli("evaluate", attentive, *options)
    assert outcome.code == 2
    assert sentence in outcome.err


MISTAKES = [
    ("--dynamic --cache", "--dynamic and --cache: a text is scored in one of these ways at a time; choose one"),
    ("--cache --mc 3", "--cache and --mc: a text is scored in one of"),
    ("--eta 1", "--eta goes with --dynamic; add that or leave --eta out"),
    ("--mc 3 --lambda 1", "--lambda goes with --dynamic"),
    ("--dynamic --theta 1", "--theta goes with --cache"),
    ("--cache --seed 1", "--seed goes with --mc"),
    ("--dynamic --streams 1", "--streams: --dynamic reads the text in one stream; leave --streams out"),
    ("--streams 5000", r"--streams 5,000: the test text has \d+ tokens; ask for so many at most"),
    ("--limit 3 --streams 4", "--streams 4: the test text has 3 tokens"),
    ("--search", "--search goes with --dynamic or --cache; add one of them"),
    ("--mc 2 --search", "--search goes with --dynamic or --cache"),
    ("--dynamic --search-tokens 9", "--search-tokens goes with --search; add that"),
    ("--dynamic --search --eta 1 --lambda 1", "--search has nothing to look for: --eta, --lambda are all given"),
    ("--dynamic --eta -1", "eta: must be greater than 0 .it is -1.0."),
    ("--dynamic --lambda nan", "lambda: must be a finite number"),
    ("--dynamic --scale max", "scale: must be 'mean' or 'sum'"),
    ("--cache --weight 1.5", "weight: must be less than 1 .it is 1.5."),
    ("--cache --fill never", "fill: must be 'partial' or 'full'"),
    ("--mc 0", "--mc"),
    ("--save", "--save goes with --dynamic, --cache, --mc, --context, .* training has saved the plain figures"),
    ("--context 5 --save --limit 9", "whole valid and test texts; leave --limit out"),
    ("--context 5 --windows lines", "--context and --windows: a text is cut in one way at a time; choose one"),
    ("--windows complete", "unknown windows 'complete': use context-C-stride-S, complete-L or lines"),
    ("--context 5 --stride 5 --dynamic", "--context: --dynamic reads a text through, with a state; leave one of both"),
    ("--windows lines --streams 2", "--windows: --streams reads a text through, with a state"),
    ("--context -1", "--context"),
    ("--stride 0", "--stride"),
    ("--mc 2 --seed 9223372036854775808", "seed = 9223372036854775808: must be at least 0 and less than"),
    ("--cache --save --limit 9", "--save keeps figures of the whole valid and test texts; leave --limit out"),
    ("--cache --save --split train", "leave --split train out"),
    ("--protocol inan", "--protocol inan: must be one of definition, zaremba, awd"),
    ("--protocol awd --cache", "--protocol: .* leave --cache out"),
    ("--protocol awd --split train", "--protocol: .* leave --split train out"),
    ("--limit 0", "--limit"),
]


@pytest.mark.parametrize(("options", "sentence"), MISTAKES, ids=[options for options, _ in MISTAKES])
def test_a_mistake_is_a_sentence(cli: Cli, runs: Runs, options: str, sentence: str) -> None:
    outcome = cli("evaluate", runs.tied, *options.split())
    assert outcome.code == 2
    assert re.search(sentence, outcome.err), outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
