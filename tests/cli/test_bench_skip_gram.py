"""`reefknot bench skip-gram`: a table for people, a record for programs, mistakes in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Outcome

Cli = Callable[..., Outcome]


def test_a_table_and_a_record(cli: Cli, made_text: Callable[[int], Path], tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    path = tmp_path / "record.json"
    text = made_text(600)
    outcome = cli("bench", "skip-gram", text, "--workers", "1", "--epochs", "2", "--device", "cpu", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "workers: 1" in outcome.out
    assert all(title in outcome.out for title in ("competitor", "words/s", "x gensim", "reefknot, torch"))
    record = json.loads(path.read_text())
    assert record["bench"] == "skip-gram"
    assert record["settings"]["epochs"] == 2
    assert {"device", "torch", "numba", "gensim"} <= set(record["machine"])
    assert [row["competitor"] for row in record["rows"]][-1] == "gensim"
    assert all(row["over_gensim"] > 0 for row in record["rows"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("skip-gram", "--workers", "1;2"), "--workers 1;2: must be numbers of threads"),
        (("skip-gram", "--workers", "0"), "--workers 0: must be numbers of threads"),
        (("skip-gram", "--graph"), "bench skip-gram takes no --graph; leave it out"),
        (("skip-gram", "ptb", "dim=3"), "bench skip-gram takes no settings; leave out dim=3"),
        (("skip-gram", "multi30k"), "multi30k is parallel text"),
        (("heads", "--workers", "2"), "bench heads takes no --workers; leave it out"),
    ],
)
def test_a_mistake_is_a_sentence(cli: Cli, words: tuple[str, ...], sentence: str) -> None:
    outcome = cli("bench", *words, "--device", "cpu")
    assert outcome.code == 2
    assert sentence in outcome.err
    assert "Traceback" not in outcome.err
