"""`reefknot bench heads`: a table for people, a record for programs, mistakes in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Outcome

Cli = Callable[..., Outcome]
TINY = ("--shape", "16,8,50", "--competitor", "reefknot", "--competitor", "eager", "--competitor", "cce")
QUICK = (*TINY, "--seconds", "0", "--device", "cpu")


def test_a_table_and_a_record(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    outcome = cli("bench", "heads", *QUICK, "--end", "plain", "--end", "drill", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "TFLOP/s in large products" in outcome.out.splitlines()[0]
    assert "plain, N = 16, D = 8, V = 50: floor" in outcome.out
    assert "eager torch" in outcome.out
    assert "CCE, CCE, unfiltered: not installed" in outcome.out
    assert "  reefknot, chunked" in outcome.err
    record = json.loads(path.read_text())
    assert record["machine"]["matrix_tflops"] > 0
    assert record["environment"]["torch"] == record["machine"]["torch"]
    assert {row["end"] for row in record["rows"]} == {"plain", "drill"}
    assert all(row["over_floor"] > 0 for row in record["rows"] if row["ms"] is not None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tails",), "bench tails: must be heads"),
        (("heads", "--shape", "16,8"), "--shape 16,8: must be rows,width,classes, such as 700,200,10000"),
        (("heads", "--end", "planar"), "--end planar: must be plain or adaptive"),
        (("heads", "--competitor", "tiger"), "--competitor tiger: must be reefknot or eager"),
        (("heads", "--weights", "float8"), "--weights float8: must be float32 or bfloat16"),
        (("heads", "--weights", "bfloat16", "--device", "cpu"), "--weights bfloat16 needs a GPU"),
        (("heads", "--graph", "--device", "cpu"), "--graph needs a GPU"),
        (("heads", "--vocabulary", "--shape", "16,8,50"), "leave out --shape"),
        (("heads", "--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("heads", "--memory", "-1"), "--memory -1: must be a number of MiB above 0"),
    ],
)
def test_a_mistake_is_a_sentence(cli: Cli, words: tuple[str, ...], sentence: str) -> None:
    outcome = cli("bench", *words)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert "Traceback" not in outcome.err
