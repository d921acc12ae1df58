"""Which perplexities may be compared: a decision on fields, whatever sentences say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_results import in_pieces, result, scored, write_run
from reefknot.lab.reports.results import collect
from reefknot.lab.reports.rows import comparable, join, mark
from reefknot.lab.runs import definition
from reefknot.lab.runs.comparability import Aspect, difference, in_comparison, in_table, same_tokens
from reefknot.lab.runs.scores import TextScore


def made(**changes: Any) -> TextScore:
    """A score with other fields; those of its text have a leading underscore."""
    own = {key.removeprefix("_"): value for key, value in changes.items() if key.startswith("_")}
    fields = scored(8.0) | {key: value for key, value in changes.items() if not key.startswith("_")}
    return TextScore.model_validate(fields | {"text": fields["text"] | own})


DYNAMIC = {"kind": "dynamic", "scale": "mean", "eta": 1.0, "lambda": 1.0, "epsilon": 1.0, "segment": 5}


@pytest.mark.parametrize(
    ("changes", "aspect", "says"),
    [
        ({"bytes": 1000}, Aspect.TEXT, "the text has 1,000 bytes here, 449,945 in A"),
        ({"_sha256": "b"}, Aspect.TEXT, "the text differs from that of A"),
        ({"_line_ends": False, "words": 78_669}, Aspect.LINE_ENDS, "line ends are scored in A, not here"),
        ({"words": 78_669}, Aspect.WORDS, "78,669 words and line ends scored here, 82,430 in A"),
        ({"_unknown": 0}, Aspect.UNKNOWN_WORDS, "no unknown words scored as <unk> here, 77 in A"),
        ({"_unknown": 1234}, Aspect.UNKNOWN_WORDS, "1,234 unknown words scored as <unk> here, 77 in A"),
        (
            {"_unknown_sha256": "d"},
            Aspect.UNKNOWN_WORDS,
            "77 unknown words scored as <unk> here, but other words than in A",
        ),
        ({"mode": DYNAMIC}, Aspect.MODE, "evaluation mode dynamic here, plain in A"),
        ({"streams": 2000}, Aspect.STREAMS, "scored in 2,000 contiguous streams here, in one stream in A"),
    ],
)
def test_what_prevents_a_comparison(changes: dict[str, Any], aspect: Aspect, says: str) -> None:
    found = difference(made(**changes), made(_sha256="a", _unknown_sha256="c"))
    assert found is not None
    assert (found.aspect, found.prevents) == (aspect, True)
    assert in_table(found, "A") == says


def test_pieces_compare_by_words() -> None:
    pieces = TextScore.model_validate(scored(9.0, pieces=3))
    assert difference(pieces, made()) is None
    assert pieces.tokens_per_word == 3
    assert made().tokens_per_word == 1


def test_what_an_old_result_does_not_say_is_taken_to_be_the_same() -> None:
    bare = TextScore(perplexity=9.0, nll=2.2)
    assert difference(bare, made(_sha256="a", windows="lines")) is None
    assert not same_tokens(bare, bare)


def test_other_context_prevents_a_comparison_where_it_matters() -> None:
    few, windows = made(streams=20), made(windows="context-480-stride-32")
    for here, aspect in ((few, Aspect.STREAMS), (windows, Aspect.WINDOWS)):
        in_tables, paired = difference(here, made()), difference(here, made(), paired=True)
        assert in_tables is not None
        assert paired is not None
        assert (in_tables.aspect, in_tables.prevents) == (aspect, False), "long streams hardly notice"
        assert paired.prevents == (aspect is Aspect.STREAMS), "losses of single tokens do"
    assert in_comparison(difference(few, made(), paired=True), "test") == (  # type: ignore[arg-type]
        "scored in 20 and in 1 streams; train both with the same evaluation.streams"
    )
    short = difference(made(windows="lines", tokens=999), made(tokens=999))
    assert short is not None
    assert short.prevents


def test_the_same_tokens() -> None:
    hashes = {"_sha256": "a", "_unknown_sha256": "b", "_vocabulary_sha256": "c"}
    assert same_tokens(made(**hashes), made(**hashes))
    assert not same_tokens(made(**hashes), made(**hashes | {"_vocabulary_sha256": "d"}))


def reports(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """The rows that can be compared, and the notes on the others."""
    rows = join([], collect([root]))
    return [row.name for row in comparable(rows)], mark(rows)[1]


def test_rewording_a_definition_changes_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(tmp_path, "Small + WT", 0, in_pieces("Small + WT", unknown=0))
    write_run(tmp_path, "Small + WT + PR", 0, result("Small + WT + PR", 0, test=scored(110.0)))
    before = reports(tmp_path)
    assert before[0] == ["Small", "Small + WT + PR"]
    monkeypatch.setattr(definition, "define", lambda score: "words that nobody knows: several")
    for path in tmp_path.rglob("result.json"):
        path.write_text(path.read_text().replace('"perplexity"', '"definition": "strange words: 3", "perplexity"'))
    assert reports(tmp_path) == before
