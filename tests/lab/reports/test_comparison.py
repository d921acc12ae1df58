"""The section of `compare --html`: the differences of the comparison, with their intervals."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from reefknot.lab.reports.comparison import build_section, list_rows

PERPLEXITIES: dict[str, Any] = {
    "a": "runs/a",
    "b": "runs/b",
    "perplexity_a": 120.04,
    "perplexity_b": 108.0,
    "difference": -0.105,
    "interval": [-0.12, -0.09],
    "ratio": 0.9,
    "ratio_interval": [0.8869, 0.9139],
    "seen": True,
    "seeds": [3, 1],
    "verdict": "B is better <really>",
}
BLEU: dict[str, Any] = {
    "a": "runs/a",
    "b": "runs/b",
    "bleu_a": 35.0,
    "bleu_b": 35.5,
    "difference": 0.5,
    "interval": [-0.2, 1.2],
    "interval_with_seeds": [-0.4, 1.4],
    "seen": False,
    "seeds": [2, 2],
    "bleu_of_seeds": [[34.9, 35.1], [35.4, 35.6]],
    "verdict": "no difference seen",
}


def cells(html: str) -> list[list[str]]:
    root = ET.fromstring(f"<section>{html}</section>")
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (PERPLEXITIES, ["tied", "120.0", "108.0", "−10.00 %", "−11.31 % to −8.61 %", "3, 1"]),
        (BLEU, ["tied", "35.00", "35.50", "+0.50", "−0.40 to +1.40", "2, 2"]),
    ],
    ids=["perplexity", "BLEU"],
)
def test_table_shows_the_difference_with_its_interval(record: dict[str, Any], expected: list[str]) -> None:
    section = build_section([record], ["untied", "tied"], "test text: 9 tokens")
    titles, row = cells(section.html)
    assert titles[0] == "B"
    assert row == expected
    assert "Test text: 9 tokens. A is untied." in section.html
    assert "<really>" not in section.html


def test_every_system_has_an_interval_in_the_plot() -> None:
    section = build_section([PERPLEXITIES, PERPLEXITIES], ["untied", "tied", "a/very/long/folder/of/runs"], "text")
    labels = ["".join(node.itertext()) for node in ET.fromstring(f"<div>{section.html}</div>").iter("text")]
    assert "tied" in labels
    assert "…ery/long/folder/of/runs" in labels


def test_intervals_are_columns_of_the_csv() -> None:
    (row,) = list_rows([PERPLEXITIES | {"bands": {"target": []}}])
    assert (row["ratio_interval.low"], row["ratio_interval.high"]) == (0.8869, 0.9139)
    assert (row["seeds.a"], row["seeds.b"]) == (3, 1)
    (row,) = list_rows([BLEU])
    assert (row["interval_with_seeds.low"], row["interval_with_seeds.high"]) == (-0.4, 1.4)
    assert "bleu_of_seeds" not in row
