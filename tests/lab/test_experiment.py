"""What a finished run writes besides its scores, as the recipe requests it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_command

from made_results import result
from reefknot.lab.evaluation.perplexity import score
from reefknot.lab.evaluation.protocols import get_protocol, score_by_protocol
from reefknot.lab.evaluation.subspace import subspace_distance
from reefknot.lab.experiment import format_headline
from reefknot.lab.runs.result import RunResult
from reefknot.lab.tasks import open_run
from reefknot.lab.tasks.word_vectors import compute_end_vectors


def train(recipe: Path, out: Path, *settings: str) -> tuple[dict[str, Any], str]:
    outcome = run_command("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *settings)
    assert outcome.code == 0, outcome.err
    return json.loads((out / "result.json").read_text(encoding="utf-8")), outcome.out


def test_optional_scores_are_computed_only_on_request(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    result, output = train(tiny_recipe(), tmp_path / "run")
    assert not {"train", "protocol", "similarity", "subspace"} & set(result)
    headline = f"test perplexity {result['test']['perplexity']:,.2f}, 0 % unknown words"
    assert output.splitlines()[-1].endswith(headline)
    assert result["test"]["unknown_share"] == 0.0


@pytest.mark.parametrize(("name", "counted"), [("zaremba", [4 * 10, 59]), ("awd", [10 * 5, 59])])
def test_protocol_scores_are_added_without_changing_the_others(
    tiny_recipe: Callable[..., Path], tmp_path: Path, name: Any, counted: list[int]
) -> None:
    recipe = tiny_recipe()
    result, output = train(recipe, tmp_path / "run", f"evaluation.protocol={name}", "evaluation.train=true")
    plain, _ = train(recipe, tmp_path / "plain")
    for block in ("valid", "test", "best", "frequency"):
        assert result[block] == plain[block]
    trained = open_run(tmp_path / "run")
    assert repr(trained) == f"TrainedLanguageModel({str(tmp_path / 'run')!r})"
    splits = trained.dataset(None).splits
    countings = get_protocol(name, batch=4, steps=5)
    assert countings is not None
    assert result["protocol"] == score_by_protocol(name, trained.model, splits, countings).record()
    assert [result["protocol"][split]["tokens"] for split in ("valid", "test")] == counted
    assert result["protocol"]["test"]["perplexity"] != result["test"]["perplexity"]
    assert "test text: one stream of 60 tokens" in result["protocol"]["definition"]
    # The training text is scored without dropout, in as many streams as in training.
    text = score(trained.model, splits["train"], trained.vocabulary, streams=4)
    assert result["train"] == text.summary().record()
    assert math.exp(text.mean) == pytest.approx(result["train"]["perplexity"])
    assert "4 contiguous streams" in result["train"]["definition"]
    assert f"train {result['train']['perplexity']:,.2f}, counted as {name}: valid" in output


@pytest.mark.parametrize("row", ["tied", "untied"])
def test_subspace_distance_between_the_ends_is_stored(
    tiny_recipe: Callable[..., Path], tmp_path: Path, row: str
) -> None:
    run = tmp_path / "run"
    options = ("--row", row, "--out", run, "--device", "cpu", "evaluation.subspace=true")
    assert run_command("train", tiny_recipe(), *options).code == 0
    subspace = json.loads((run / "result.json").read_text(encoding="utf-8"))["subspace"]
    vectors = [tensor.detach().double().numpy() for tensor in compute_end_vectors(open_run(run).model).values()]
    assert subspace["distance"] == pytest.approx(subspace_distance(*vectors))
    assert (subspace["words"], subspace["dim"]) == vectors[0].shape
    assert (subspace["distance"] < 1e-6) == (row == "tied")


def test_subspace_needs_fewer_dimensions_than_words(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    settings = ("evaluation.subspace=true", "tables.words.dim=500")
    outcome = run_command("train", tiny_recipe(), "--row", "tied", "--out", tmp_path / "run", *settings)
    assert outcome.code != 0
    assert "words of dimension 500 span the whole space" in outcome.err
    assert not (tmp_path / "run").exists()


def test_too_short_text_for_a_protocol_is_rejected_before_training(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("evaluation.protocol=zaremba", "training.steps=20")
    outcome = run_command(
        "train", tiny_recipe(), "--row", "tied", "--out", tmp_path / "run", "--device", "cpu", *settings
    )
    assert outcome.code == 3
    assert "the valid text has 60 tokens, but 4 streams with a window of 20 need 84" in outcome.err
    assert not (tmp_path / "run").exists()


def result_with(**fields: Any) -> RunResult:
    """Return a result with only these scores."""
    made = {key: value for key, value in result("Small", 0).items() if key not in ("valid", "test")}
    return RunResult.model_validate(made | fields)


def test_headline_lists_the_available_scores() -> None:
    test = {"perplexity": 90.0, "word_perplexity": 1_200.5, "nll": 4.5, "tokens": 20, "words": 10, "streams": 1}
    assert format_headline(result_with(test=test | {"words": 20, "streams": 20})) == (
        "test perplexity 90.00 in 20 streams, unknown words not recorded"
    )
    text = {"split": "test", "unknown": 4}
    assert format_headline(result_with(test=test | {"words": 20, "text": text})) == (
        "test perplexity 90.00, 20.0 % unknown words"
    )
    test["text"] = text | {"unknown": 0}
    assert format_headline(result_with(test=test)) == (
        "test perplexity 90.00 per token, 1,200.50 per word, 0 % unknown words"
    )
    long_words = {"tokens": 70, "bytes": 300, "bits_per_byte": 1.5}  # no spaces between words
    assert format_headline(result_with(test=test | long_words)) == (
        "test perplexity 90.00 per token, 1.500 bits per byte, 0 % unknown words"
    )
    counted = {"name": "awd", "valid": {"perplexity": 61.2}, "test": {"perplexity": 58.8}}
    train = {"perplexity": 30.0, "nll": 3.4}
    assert format_headline(result_with(test=test | {"words": 20}, train=train, protocol=counted)) == (
        "test perplexity 90.00, 0 % unknown words, train 30.00, counted as awd: valid 61.20, test 58.80"
    )


def test_many_unknown_words_are_warned_of(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    result, output = train(tiny_recipe(), tmp_path / "run", "vocabulary.max_size=4")
    share = result["test"]["unknown_share"]
    assert share > 0.05
    warning = f"warning: {100 * share:.1f} % of the words of the test text are unknown and scored as <unk>"
    assert output.count(warning) == 1
    assert (
        result["test"]["bits_per_byte"]
        > result["test"]["nll"] / math.log(2) * result["test"]["tokens"] / (result["test"]["bytes"])
    )


def test_headline_states_the_number_of_pairs_of_a_correlation() -> None:
    men = {"name": "MEN", "rho": 1.0, "pairs": 3, "of": 3_000}
    simlex = {"name": "SimLex-999", "rho": -0.123, "pairs": 940, "of": 999}
    others = [{"name": "RG-65", "rho": 0.5, "pairs": 60, "of": 65}, men | {"name": "Verb-143", "rho": None}]
    assert format_headline(result_with(similarity={"tied": [simlex, men, *others]})) == (
        "rho of tied vectors: SimLex-999 -0.12 (940 of 999 pairs), MEN 1.00 (3 of 3,000 pairs)"
    )


def test_windows_apply_to_every_split_and_to_validation(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    windows = 'evaluation.windows={kind = "sliding", context = 6, stride = 2}'
    result, _ = train(tiny_recipe(), tmp_path / "run", windows, "evaluation.train=true")
    for split in ("train", "valid", "test"):
        assert "windows of 8 tokens, of which the last 2 are scored" in result[split]["definition"]
        assert result[split]["windows"] == "context-6-stride-2"
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    validated = [line["nll"] for line in lines if line["kind"] == "valid"]
    assert min(validated) == pytest.approx(result["valid"]["nll"], rel=1e-6)
    plain, _ = train(tiny_recipe(), tmp_path / "plain")
    assert plain["valid"]["nll"] != result["valid"]["nll"]
