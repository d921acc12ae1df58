"""Which perplexities may stand side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_results import in_pieces, scored, write_run
from reefknot.lab.reports.records import Score
from reefknot.lab.reports.results import load
from reefknot.lab.reports.scoring import obstacle, pieces, pieces_in_validation


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (scored(9.0), None),
        (scored(9.0, pieces=3), None),
        (scored(9.0, unknown=0), "no unknown words scored as <unk> here, 77 in A"),
        (scored(9.0, unknown=1234), "1,234 unknown words scored as <unk> here, 77 in A"),
        (scored(9.0, streams="20 contiguous streams, each"), None),
        (
            scored(9.0, streams="2,000 contiguous streams, each"),
            "scored in 2,000 contiguous streams here, in one stream in A",
        ),
        (scored(9.0) | {"bytes": 1000}, "a text of 1,000 bytes here, of 449,945 in A"),
        (scored(9.0) | {"words": 78_669}, "78,669 words and line ends scored here, 82,430 in A"),
        ({"perplexity": 9.0, "nll": 2.2}, None),
    ],
)
def test_why_two_perplexities_cannot_be_compared(here: dict[str, Any], says: str | None) -> None:
    assert obstacle(Score(**here), Score(**scored(8.0)), "A") == says


def test_pieces_of_words(tmp_path: Path) -> None:
    assert pieces(Score(**scored(9.0, pieces=3))) == 3
    assert pieces(Score(perplexity=9.0, nll=2.2)) == 1
    assert pieces_in_validation(load(write_run(tmp_path / "a", "Small", 0, in_pieces("Small", 0)))) == 2
    assert pieces_in_validation(load(write_run(tmp_path / "b", "Small"))) == 1
    unfinished = write_run(tmp_path / "c", "Small", vocabulary={"bpe": {"merges": 9}})
    assert pieces_in_validation(load(unfinished)) is None
