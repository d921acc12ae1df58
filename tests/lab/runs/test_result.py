"""The typed result: only known fields are written, all fields are read back, and reading needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from made_results import result, scored
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import Judgement, RunResult, Training, Translations, TranslationScores, read_result
from reefknot.lab.runs.scores import BLEU, CHRF, PERPLEXITY, RHO, TOKEN_PERPLEXITY, TextScore


def test_result_is_written_and_read_back(tmp_path: Path) -> None:
    made = RunResult.model_validate(result("Small", 0))
    with RunFolder.open_for_training(tmp_path, {"recipe": "demo"}) as run:
        run.write_result(made)
    assert read_result(tmp_path / "result.json") == made


def test_missing_fields_are_not_written() -> None:
    made = RunResult.model_validate(result("Small", 0) | {"train": None, "subspace": None})
    assert not {"train", "subspace", "translation", "similarity"} & made.record().keys()
    assert made.record()["test"]["definition"] == made.test.definition  # type: ignore[union-attr]


def test_unknown_field_cannot_be_written() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Training(steps=1, stepz=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunResult.model_validate(result("Small", 0) | {"test": scored(9.0) | {"perplexities": 1}})


def test_newer_result_with_more_fields_is_read(tmp_path: Path) -> None:
    newer = RunResult.model_validate(result("Small", 0)).record() | {"colour": "green"}
    newer["test"]["text"]["alphabet"] = "Latin"
    (tmp_path / "result.json").write_text(json.dumps(newer))
    assert read_result(tmp_path / "result.json").row == "Small"


def test_scores_name_their_metric_and_the_file_of_their_items() -> None:
    made = RunResult.model_validate(result("Small", 0, test=scored(10.0, pieces=2)))
    words, tokens = made.scores("test")
    assert (words.metric, words.value, tokens.metric, tokens.value) == (PERPLEXITY, 100.0, TOKEN_PERPLEXITY, 10.0)
    assert words.items is not None
    assert (words.items.file, words.items.key, words.items.item) == ("scores.safetensors", "test", "token")
    translated = Translations(test=TranslationScores(bleu=30.0, chrf=50.0))
    by_bleu, by_chrf, *_ = made.replace(translation=translated).scores("test")
    assert (by_bleu.metric, by_bleu.value, by_chrf.metric) == (BLEU, 30.0, CHRF)
    assert by_bleu.items is not None
    assert (by_bleu.items.file, by_bleu.items.item) == ("translations/test.txt", "sentence")
    assert made.scores("train") == ()
    judged = (Judgement(name="MEN", rho=0.5, pairs=10, of=3_000), Judgement(name="RG-65", of=65))
    (men,) = made.replace(similarity={"tied": judged}).similarity_scores("tied").values()
    assert (men.metric, men.value) == (RHO, 0.5)


def test_metric_sign_sorts_better_values_first() -> None:
    assert sorted([3.0, 1.0], key=lambda value: PERPLEXITY.sign * value) == [1.0, 3.0]
    assert sorted([3.0, 1.0], key=lambda value: BLEU.sign * value) == [3.0, 1.0]


def test_definition_states_only_known_fields() -> None:
    assert TextScore(perplexity=9.0, nll=2.2).definition.splitlines() == [
        "perplexity = exp(total negative log-likelihood / tokens), natural logarithm, temperature 1",
        "independent of how the text is divided into windows",
    ]


def test_results_and_reports_need_no_torch() -> None:
    modules = ("runs.result", "runs.comparability", "reports.page", "reports.sweep", "papers.page")
    names = ", ".join(f"reefknot.lab.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
