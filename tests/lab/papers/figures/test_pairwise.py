"""Table 4 of Press & Wolf: pairs of tables, seed by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.lab.evaluation.pairwise_similarity import PairwiseCorrelation
from reefknot.lab.papers.figures import pairwise
from reefknot.lab.papers.figures.pairwise import PairwiseSimilarity
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
    assert "closer to the output table than to the input table: confirmed" in lines[4]
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
    assert any("undecided" in line for line in PairwiseSimilarity().lines(measured))
    PairwiseSimilarity().draw(measured)


def test_tied_runs_alone_are_refused(write: Write) -> None:
    with pytest.raises(DataError, match="no run has separate input and output tables"):
        PairwiseSimilarity().measure([write("press2017/table3", "WT", settings=UNITS)])


def test_runs_are_compared_seed_by_seed_and_the_rest_is_named(write: Write) -> None:
    """With the tables above a tied run is like the output of its own seed alone."""
    seeds = {"Small": (0, 1, 2), "WT": (1, 2, 5)}
    runs = [write("press2017/table3", row, seed, settings=UNITS) for row, own in seeds.items() for seed in own]
    measured = PairwiseSimilarity().measure(runs)
    (model,) = measured["models"]
    assert model["pairs"]["input, output"]["runs"] == 3
    assert model["pairs"]["output, tied"]["runs"] == model["closer"]["runs"] == 2
    assert model["pairs"]["output, tied"]["mean"] > 0.8
    assert model["alone"] == {"untied": [0], "tied": [5]}
    told = "not paired with the tied table, because there is no run with the same seed: untied 0, tied 5"
    assert any(told in line for line in PairwiseSimilarity().lines(measured))


def test_what_is_closer_is_found_within_a_pair_of_runs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that is missing in one pair shifts none of the others."""
    rhos = iter([0.1, 0.1, 0.1, None, 0.2, 0.3, 0.9, 0.7, 0.6])

    def found(one: WordVectors, other: WordVectors) -> PairwiseCorrelation:
        return PairwiseCorrelation(next(rhos), None, None, 1770, exact=True)

    monkeypatch.setattr(pairwise, "pairwise_correlation", found)
    runs = [write("press2017/table3", row, seed, settings=UNITS) for row in ("Small", "WT") for seed in range(3)]
    (model,) = PairwiseSimilarity().measure(runs)["models"]
    # 0.7 - 0.2 and 0.6 - 0.3.
    assert (model["closer"]["mean"], model["closer"]["runs"]) == (pytest.approx(0.4), 2)


def test_rows_of_one_size_are_not_seeds_of_one(write: Write) -> None:
    runs = [write("press2017/table6", row, seed, settings=UNITS) for seed, row in enumerate(("Small", "Small + PR"))]
    with pytest.raises(DataError, match=rf"{runs[0].folder} and .* are runs of different rows"):
        PairwiseSimilarity().measure(runs)
