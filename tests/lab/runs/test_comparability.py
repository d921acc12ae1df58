"""Which perplexities are comparable is decided from fields, not from the wording of definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_results import in_pieces, result, scored, write_run
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.rows import join_runs, largest_comparable_group
from reefknot.lab.runs import definition
from reefknot.lab.runs.comparability import (
    Aspect,
    explain_in_comparison,
    explain_in_table,
    find_difference,
    have_same_tokens,
)
from reefknot.lab.runs.loading import collect_runs
from reefknot.lab.runs.scores import TextScore


def make_score(**changes: Any) -> TextScore:
    """Return a score with changed fields; names with a leading underscore are fields of its text."""
    text_fields = {key.removeprefix("_"): value for key, value in changes.items() if key.startswith("_")}
    fields = scored(8.0) | {key: value for key, value in changes.items() if not key.startswith("_")}
    return TextScore.model_validate(fields | {"text": fields["text"] | text_fields})


DYNAMIC = {"kind": "dynamic", "scale": "mean", "eta": 1.0, "lambda": 1.0, "epsilon": 1.0, "segment": 5}


@pytest.mark.parametrize(
    ("changes", "aspect", "message"),
    [
        ({"bytes": 1000}, Aspect.TEXT, "the text has 1,000 bytes here, 449,945 in A"),
        ({"_sha256": "b"}, Aspect.TEXT, "the text differs from the text of A"),
        ({"_line_ends": False, "words": 78_669}, Aspect.LINE_ENDS, "line ends are scored in A, not here"),
        ({"words": 78_669}, Aspect.WORDS, "78,669 words and line ends scored here, 82,430 in A"),
        ({"_unknown": 0}, Aspect.UNKNOWN_WORDS, "no unknown words scored as <unk> here, 77 in A"),
        ({"_unknown": 1234}, Aspect.UNKNOWN_WORDS, "1,234 unknown words scored as <unk> here, 77 in A"),
        (
            {"_unknown_sha256": "d"},
            Aspect.UNKNOWN_WORDS,
            "77 unknown words scored as <unk> here, but not the same words as in A",
        ),
        ({"mode": DYNAMIC}, Aspect.MODE, "evaluation mode dynamic here, plain in A"),
        ({"streams": 2000}, Aspect.STREAMS, "context differs: here 2,000 contiguous streams; in A one stream"),
    ],
)
def test_difference_that_prevents_a_comparison_is_named(changes: dict[str, Any], aspect: Aspect, message: str) -> None:
    reason = find_difference(make_score(**changes), make_score(_sha256="a", _unknown_sha256="c"))
    assert reason is not None
    assert (reason.aspect, reason.prevents) == (aspect, True)
    assert explain_in_table(reason, "A") == message


@pytest.mark.parametrize(("other_hash", "same"), [("a", True), ("b", False), (None, False)])
def test_other_words_of_the_same_text_are_not_called_another_text(other_hash: str | None, same: bool) -> None:
    """A vocabulary that divides words at unknown characters makes more words of the same text."""
    difference = find_difference(make_score(_sha256="a", words=82_500), make_score(_sha256=other_hash), paired=True)
    assert difference is not None
    assert difference.prevents
    explanation = explain_in_comparison(difference, "wiki.txt")
    assert ("texts differ" in explanation) == (not same)
    if same:
        assert "the same wiki.txt text into 82,500 and 82,430 words and line ends" in explanation


def test_models_with_other_unknown_words_are_compared_by_bits_per_byte() -> None:
    score = make_score(_unknown=4, bits_per_byte=2.5, unpredicted_bytes=20)
    difference = find_difference(
        score, make_score(_unknown=308, bits_per_byte=3.25, unpredicted_bytes=999), paired=True
    )
    assert difference is not None
    explanation = explain_in_comparison(difference, "test")
    assert "one scores 4 unknown words as <unk>, the other 308" in explanation
    assert "or compare their bits per byte, 2.5000 and 3.2500, which charge 8 bits" in explanation
    # Bits per byte of old results do not charge for unknown words.
    difference = find_difference(score, make_score(_unknown=308, bits_per_byte=3.25), paired=True)
    assert difference is not None
    assert "bits per byte" not in explain_in_comparison(difference, "test")


def test_sub_word_models_compare_by_words() -> None:
    sub_words = TextScore.model_validate(scored(9.0, pieces=3))
    assert find_difference(sub_words, make_score()) is None
    assert sub_words.tokens_per_word == 3
    assert make_score().tokens_per_word == 1


def test_fields_missing_in_old_results_are_assumed_equal() -> None:
    bare = TextScore(perplexity=9.0, nll=2.2)
    assert find_difference(bare, make_score(_sha256="a", windows="lines")) is None
    assert not have_same_tokens(bare, bare)


def test_different_context_prevents_only_affected_comparisons() -> None:
    few, windows = make_score(streams=20), make_score(windows="context-480-stride-32")
    for here, aspect in ((few, Aspect.STREAMS), (windows, Aspect.WINDOWS)):
        in_tables, paired = find_difference(here, make_score()), find_difference(here, make_score(), paired=True)
        assert in_tables is not None
        assert paired is not None
        assert (in_tables.aspect, in_tables.prevents) == (aspect, False), "the effect on a long stream is small"
        assert paired.prevents == (aspect is Aspect.STREAMS), "losses of single tokens depend on it"
    assert explain_in_comparison(find_difference(few, make_score(), paired=True), "test") == (  # type: ignore[arg-type]
        "scored in 20 and in 1 streams; train both with the same evaluation.streams"
    )
    short = find_difference(make_score(windows="lines", tokens=999), make_score(tokens=999))
    assert short is not None
    assert short.prevents


def test_same_tokens_needs_equal_vocabularies() -> None:
    hashes = {"_sha256": "a", "_unknown_sha256": "b", "_vocabulary_sha256": "c"}
    assert have_same_tokens(make_score(**hashes), make_score(**hashes))
    assert not have_same_tokens(make_score(**hashes), make_score(**hashes | {"_vocabulary_sha256": "d"}))


def comparable_rows_and_notes(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the comparable rows, and the notes on the others."""
    rows = join_runs([], collect_runs([root]))
    return [row.name for row in largest_comparable_group(rows)], add_footnotes(rows)[1]


def test_wording_of_definitions_does_not_affect_comparability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(tmp_path, "Small + WT", 0, in_pieces("Small + WT", unknown=0))
    write_run(tmp_path, "Small + WT + PR", 0, result("Small + WT + PR", 0, test=scored(110.0)))
    before = comparable_rows_and_notes(tmp_path)
    assert before[0] == ["Small", "Small + WT + PR"]
    monkeypatch.setattr(definition, "describe_score", lambda score: "words that nobody knows: several")
    for path in tmp_path.rglob("result.json"):
        path.write_text(path.read_text().replace('"perplexity"', '"definition": "strange words: 3", "perplexity"'))
    assert comparable_rows_and_notes(tmp_path) == before
