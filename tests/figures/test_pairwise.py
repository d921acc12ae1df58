"""Table 4 of Press & Wolf: pairs of tables, seed by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.figures import pairwise
from reefknot.figures.pairwise import PairwiseSimilarity
from reefknot.vectors.word_vectors import WordVectors

from .conftest import Write

UNITS = {"encoder": {"hidden_dim": 200}}


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables drawn from the seed in the folder's name: the tied one is the output table with some noise."""

    def vectors(values: np.ndarray) -> WordVectors:
        return WordVectors(tuple(f"word{n}" for n in range(len(values))), values.astype(np.float32))

    def opened(path: Path, *, device: str = "cpu") -> dict[str, WordVectors]:
        draw = np.random.default_rng(int(path.name.removeprefix("seed")))
        one, other, noise = (draw.normal(size=(60, 8)) for _ in range(3))
        if "WT" in path.parent.name or path.parent.name == "tied":
            return {"tied": vectors(other + 0.2 * noise)}
        return {"input": vectors(one), "output": vectors(other)}

    monkeypatch.setattr(pairwise, "open_vectors", opened)


def test_the_tied_table_is_closer_to_the_output(write: Write) -> None:
    runs = [write("press2017/table3", row, seed, settings=UNITS) for row in ("Small", "WT") for seed in range(3)]
    measured = PairwiseSimilarity().measure(runs)
    (model,) = measured["models"]
    assert (model["model"], model["corpus"], model["seeds"]) == ("NNLM, 200 units", "ptb", [0, 1, 2])
    assert model["counted"] == "1,770 pairs of words, all there are"
    assert list(model["pairs"]) == ["input, output", "input, tied", "output, tied"]
    assert abs(model["pairs"]["input, tied"]["mean"]) < 0.2
    assert model["pairs"]["output, tied"]["mean"] > 0.8
    assert model["closer"]["low"] > 0.5
    lines = PairwiseSimilarity().lines(measured)
    assert lines[0].startswith("NNLM, 200 units, ptb: 1,770 pairs of words, all there are")
    assert lines[3].startswith("  output, tied     0.9")
    assert lines[3].endswith("paper 0.65")
    assert "closer to the output table than to the input one: seen" in lines[4]
    assert "NNLM, 200 units, ptb" in PairwiseSimilarity().draw(measured).svg


def test_models_are_told_apart_and_may_lack_a_tied_form(write: Write) -> None:
    runs = [
        write("press2017/table2", "untied", settings={"skip_gram": {"dim": 100}}, corpus="text8"),
        write("press2017/table2", "tied", settings={"skip_gram": {"dim": 100}}, corpus="text8"),
        write("press2017/table5", "Large", settings={"encoder": {"hidden_dim": 1500}}),
    ]
    measured = PairwiseSimilarity().measure(runs)
    skip_gram, large = measured["models"]
    assert skip_gram["model"] == "word2vec"
    assert list(large["pairs"]) == ["input, output"]
    assert large["closer"] is None
    assert any("nothing is decided" in line for line in PairwiseSimilarity().lines(measured))
    PairwiseSimilarity().draw(measured)


def test_tied_runs_alone_are_refused(write: Write) -> None:
    with pytest.raises(DataError, match="no run whose ends have tables of their own"):
        PairwiseSimilarity().measure([write("press2017/table3", "WT", settings=UNITS)])
