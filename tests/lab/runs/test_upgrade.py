"""Old results, saved evaluations and metrics lines are upgraded when they are read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from made_results import result
from reefknot.errors import DataError
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.definition import format_unknown_share
from reefknot.lab.runs.result import RunResult, read_evaluation, read_metrics_line, read_result
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Cache, Dynamic, MonteCarlo, TextScore
from reefknot.lab.runs.upgrade import upgrade_changes

RECORDS = Path(__file__).parents[3] / "results"
LINES = (
    "perplexity = exp(total negative log-likelihood / tokens), natural logarithm, temperature 1",
    "tokens: 82,429 scored once each, of 82,430 in the test text",
    "context: {context}; the first token, which has nothing before it, is not scored",
    "unknown words: {unknown}; end of line: line ends are no tokens",
    "word perplexity: the same total over 41,215 words in 82,429 pieces, where a word's probability is the product "
    "over its pieces; bits per byte: over 449,945 bytes of UTF-8 text, unknown words included",
    "computed in bfloat16; {ending}",
)


def old_definition(
    context: str = "one stream from an empty state that is carried to its end",
    unknown: str = "none in this text",
    ending: str = "independent of how the text is cut into windows",
) -> str:
    """Return a definition as older versions wrote it."""
    return "\n".join(LINES).format(context=context, unknown=unknown, ending=ending)


def old_score(definition: str, **changes: Any) -> dict[str, Any]:
    figures = {"perplexity": 9.0, "nll": math.log(9.0), "tokens": 82_429, "words": 41_215, "bytes": 449_945}
    return figures | {"definition": definition} | changes


def read_old(folder: Path, **changes: Any) -> RunResult:
    """Write a result of format 1 with these changes and read it."""
    today = result("Small", 0)
    record = {key: value for key, value in today.items() if key not in ("task", "valid", "test")}
    (folder / "result.json").write_text(json.dumps(record | {"format": 1} | changes))
    return read_result(folder / "result.json")


REWORDED = {
    "nothing is dropped": "no token is left out",
    "<eos> stands before the first token and no token is left out": "<eos> precedes the first token, and every token "
    "is scored",
    "the first token, which has nothing before it, is not scored": "the first token is not scored, because it has no "
    "context",
    ", each computed afresh: a target's tokens after its whole source and those before them": ", each computed "
    "independently, target tokens given the source and the target tokens before them",
    "each computed afresh, the first ones with less before them": "each computed independently; the first windows "
    "have less context",
    "each computed afresh": "each computed independently",
    "a longer line is alone, cut into pieces": "a longer line is split into blocks of its own",
    "tokens of which": "tokens, of which",
    "the text is cut into windows": "the text is divided into windows",
    "line ends are no tokens": "line ends are not tokens",
    "pieces, where a word's probability is the product over its pieces": "sub-words; the probability of a word is the "
    "product over its sub-words",
    "is the product over its sub-words": "is the product of the probabilities of its sub-words",
    "one stream from an empty state that is carried to its end": "one stream; the state is empty at its start and is "
    "carried to its end",
    "streams, each from an empty state that is carried to its end": "streams; each starts with an empty state, which "
    "is carried to its end",
    "dynamic evaluation: every ": "dynamic evaluation: segments of ",
    "tokens are scored, then learned from, so this figure depends on the cut": "tokens are scored, then trained on, so "
    "the score depends on the segments",
    "only once there are more than so many": "only once the cache is full",
    "a pass alone: perplexity": "individual passes: perplexity",
    "so this figure depends on both": "so the score depends on both",
}
"""Phrases of committed records, and the words for the same facts today."""


def test_committed_records_keep_their_definitions() -> None:
    """The text of an old definition becomes fields, and the text made from the fields states the same facts."""
    count = 0
    for path in RECORDS.rglob("result.json"):
        raw, result_read = json.loads(path.read_text()), read_result(path)
        scores = [(raw[split], result_read.score(split)) for split in ("train", "valid", "test") if split in raw]
        for saved in path.parent.glob("evaluations/*.json"):
            old, evaluation = json.loads(saved.read_text()), read_evaluation(saved, result_read)
            scores += [(old[split], evaluation.score(split)) for split in ("valid", "test")]
        for old, score in scores:
            assert score is not None
            expected = old["definition"]
            for phrase, today in REWORDED.items():
                expected = expected.replace(phrase, today)
            # Old bits per byte do not charge for unknown words, so they are not shown next to a share of unknown words.
            if score.unknown_share:
                expected = re.sub("; bits per byte: .*, unknown words included", "", expected)
                share = format_unknown_share(score.unknown_share)
                expected = re.sub("( here)(, scored as)", rf"\1 ({share} of the words and line ends)\2", expected)
            else:
                expected = expected.replace(" text, unknown words included", " text")
            assert score.definition == expected, path
            count += 1
        assert read_result(path) == RunResult.model_validate(result_read.record() | {}, extra="ignore")
    assert count > 300


@pytest.mark.parametrize(
    ("context", "streams", "windows", "pairs"),
    [
        ("one stream from an empty state that is carried to its end", 1, None, None),
        ("2,000 contiguous streams, each from an empty state that is carried to its end", 2000, None, None),
        ("one stream; the state is empty at its start and is carried to its end", 1, None, None),
        ("2,000 contiguous streams; each starts with an empty state, which is carried to its end", 2000, None, None),
        (
            "windows of 3,072 tokens of which the last 512 are scored, each computed afresh",
            1,
            "context-2560-stride-512",
            None,
        ),
        ("blocks of 3,072 tokens, each computed afresh", 1, "context-0-stride-3072", None),
        ("blocks of whole lines of at most 512 tokens, each computed afresh", 1, "complete-512", None),
        ("single lines, each computed afresh", 1, "lines", None),
        ("1,014 pairs, each computed afresh: a target's tokens after its whole source", 1, None, 1014),
        ("a way that nobody knows", None, None, None),
    ],
)
def test_fields_are_parsed_from_an_old_definition(
    tmp_path: Path, context: str, streams: int | None, windows: str | None, pairs: int | None
) -> None:
    score = read_old(tmp_path, test=old_score(old_definition(context, "1,234 here, scored as the token <unk>"))).test
    assert score is not None
    assert (score.streams, score.windows, score.pairs, score.precision) == (streams, windows, pairs, "bfloat16")
    assert score.text is not None
    assert (score.text.split, score.text.tokens, score.text.unknown) == ("test", 82_430, 1234)
    assert (score.text.line_ends, score.text.tokenisation) == (False, "pieces")
    assert not score.text.complete


def test_fields_missing_in_an_old_definition_are_none(tmp_path: Path) -> None:
    score = read_old(tmp_path, test=old_score("a definition of somebody else")).test
    assert score is not None
    assert score.text is not None
    assert (score.streams, score.text.unknown, score.text.line_ends, score.text.tokenisation) == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({"test": old_score("")}, "language_model"),
        ({"test": old_score(""), "translation": {"test": {"bleu": 30.0}}}, "translation"),
        ({}, "skip_gram"),
    ],
)
def test_task_of_an_old_result_is_inferred_from_its_keys(tmp_path: Path, changes: dict[str, Any], task: str) -> None:
    assert read_old(tmp_path, **changes).task == task


def test_old_changed_settings_and_neighbours_are_upgraded(tmp_path: Path) -> None:
    changes = [
        "training.epochs: 60 -> 25",
        'training.precision: "a -> b" -> not set',
        'output.labels.kind: null -> {"kind": "drill"}',
        'encoder: {"kind": "awd... -> 3',
    ]
    upgraded = read_old(
        tmp_path, changed=changes, neighbors={"input": {}, "labels": {"cat": [["dog", 0.5]]}, "tied": False}
    )
    assert upgraded.changed == (
        Change(key="training.epochs", old=60, new=25),
        Change(key="training.precision", old="a -> b"),
        Change(key="output.classifier.kind", old=None, new={"kind": "drill"}),
        Change(key="encoder", old='{"kind": "awd...', new=3),
    )
    assert [str(change) for change in upgraded.changed][:2] == changes[:2]
    assert upgraded.neighbors.output == {"cat": (("dog", 0.5),)}
    assert upgrade_changes([{"key": "a", "old": 1, "new": 2}]) == [{"key": "a", "old": 1, "new": 2}]


def upgraded_evaluation(folder: Path, kind: str, settings: dict[str, Any], ending: str, **changes: Any) -> TextScore:
    """Write a saved evaluation of format 1 and return its test score as read today."""
    run = read_old(folder, test=old_score(old_definition()))
    old = {
        key: old_score(old_definition(ending=ending))[key] for key in ("perplexity", "nll", "tokens", "definition")
    } | changes
    (folder / "saved.json").write_text(json.dumps({"format": 1, "kind": kind, "settings": settings, "test": old}))
    score = read_evaluation(folder / "saved.json", run).test
    assert score is not None
    return score


def test_modes_of_old_evaluations_are_parsed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scale": "sum", "eta": 0.5, "lambda": 0.25, "epsilon": 0.125, "segment": 5}
    ending = "dynamic evaluation: ...; statistics of 1,859 gradients of the text; without it: perplexity 1,058.68"
    score = upgraded_evaluation(tmp_path, "dynamic", settings, ending)
    assert score.mode == Dynamic(kind="dynamic", **settings, gradients=1859, plain=1058.68)
    assert (score.words, score.bytes, score.word_perplexity) == (41_215, 449_945, pytest.approx(81.0, rel=1e-3))
    settings = {"weight": 0.1, "theta": 1.0, "window": 500, "fill": "full"}
    score = upgraded_evaluation(
        tmp_path, "cache", settings | {"windows": "lines"}, "...; without it: perplexity >1e304"
    )
    assert (score.mode, score.windows) == (Cache(kind="cache", **settings, plain=1e304), "lines")
    ending = "Monte-Carlo dropout: ...; a pass alone: perplexity 7.25 to 8.50; without dropout: perplexity 1.2e+07"
    score = upgraded_evaluation(tmp_path, "mc", {"passes": 3, "window": 35, "seed": 7}, ending)
    mode = MonteCarlo(kind="mc", passes=3, window=35, seed=7, drops=True, lowest=7.25, highest=8.5, plain=1.2e7)
    assert score.mode == mode
    score = upgraded_evaluation(tmp_path, "context-4-stride-2", {"windows": "context-4-stride-2"}, "", tokens=3)
    assert (score.mode, score.windows, score.words) == (None, "context-4-stride-2", None)


def test_translation_scores_of_old_evaluations_are_read(tmp_path: Path) -> None:
    figures = {"bleu": 30.5, "chrf": 50.0, "by_length": [{"from": 0, "to": 10, "pairs": 3, "bleu": 30.5}]}
    score = {"perplexity": 9.0, "nll": 2.2, "tokens": 5, "definition": ""}
    record = {"format": 1, "kind": "beam-2", "settings": {"beam": 2}, "test": score | figures}
    (tmp_path / "saved.json").write_text(json.dumps(record))
    evaluation = read_evaluation(tmp_path / "saved.json", None)
    assert [(score_read.metric, score_read.value) for score_read in evaluation.scores("test")][::2] == [
        (BLEU, 30.5),
        (PERPLEXITY, 9.0),
    ]
    translated = evaluation.translated("test")
    assert translated is not None
    assert (translated.by_length[0].low, translated.by_length[0].high) == (0, 10)


def test_old_skip_gram_loss_is_read_as_pairs() -> None:
    line = read_metrics_line(b'{"kind": "train", "step": 1, "epoch": 1, "loss": 2.5, "tokens": 9}', "here")
    assert (line.kind, line.nll, line.tokens) == ("pairs", 2.5, 9)


def test_newer_format_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"result\.json: unknown format 3"):
        read_old(tmp_path, format=3)
