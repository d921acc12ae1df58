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
    """Draw tables from the seed in the folder's name; the tied table is the output table plus noise."""

    def vectors(values: np.ndarray) -> WordVectors:
        return WordVectors(tuple(f"word{n}" for n in range(len(values))), values.astype(np.float32))

    def opened(path: Path, *, device: str = "cpu") -> dict[str, WordVectors]:
        rng = np.random.default_rng(int(path.name.removeprefix("seed")))
        input_table, output_table, noise = (rng.normal(size=(60, 8)) for _ in range(3))
        if "WT" in path.parent.name or path.parent.name == "tied":
            return {"tied": vectors(output_table + 0.2 * noise)}
        return {"input": vectors(input_table), "output": vectors(output_table)}

    monkeypatch.setattr(pairwise, "open_vectors", opened)


def test_tied_table_is_closer_to_the_output_table(write: Write) -> None:
    runs = [write("press2017/table3", row, seed, settings=UNITS) for row in ("Small", "WT") for seed in range(3)]
    measured = PairwiseSimilarity().measure(runs)
    (model,) = measured["models"]
    assert (model["model"], model["corpus"], model["seeds"]) == ("NNLM, 200 units", "ptb", [0, 1, 2])
    assert model["counted"] == "all 1,770 pairs of words"
    assert list(model["pairs"]) == ["input, output", "input, tied", "output, tied"]
    assert abs(model["pairs"]["input, tied"]["mean"]) < 0.2
    assert model["pairs"]["output, tied"]["mean"] > 0.8
    assert model["closer"]["low"] > 0.5
    lines = PairwiseSimilarity().format_lines(measured)
    assert lines[0].startswith("NNLM, 200 units, ptb: all 1,770 pairs of words")
    assert lines[3].startswith("  output, tied     0.9")
    assert lines[3].endswith("paper 0.65")
    assert "closer to the output table than to the input table: confirmed" in lines[4]
    assert "NNLM, 200 units, ptb" in PairwiseSimilarity().draw(measured).svg


def test_models_are_separate_and_may_have_no_tied_run(write: Write) -> None:
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
    assert any("undecided" in line for line in PairwiseSimilarity().format_lines(measured))
    PairwiseSimilarity().draw(measured)


def test_only_tied_runs_are_rejected(write: Write) -> None:
    with pytest.raises(DataError, match="no run has separate input and output tables"):
        PairwiseSimilarity().measure([write("press2017/table3", "WT", settings=UNITS)])


def test_runs_are_compared_by_seed_and_unpaired_ones_named(write: Write) -> None:
    """In these tables, a tied run resembles only the output table of its own seed."""
    seeds = {"Small": (0, 1, 2), "WT": (1, 2, 5)}
    runs = [
        write("press2017/table3", row, seed, settings=UNITS) for row, row_seeds in seeds.items() for seed in row_seeds
    ]
    measured = PairwiseSimilarity().measure(runs)
    (model,) = measured["models"]
    assert model["pairs"]["input, output"]["runs"] == 3
    assert model["pairs"]["output, tied"]["runs"] == model["closer"]["runs"] == 2
    assert model["pairs"]["output, tied"]["mean"] > 0.8
    assert model["alone"] == {"untied": [0], "tied": [5]}
    note = "not paired with the tied table, because there is no run with the same seed: untied 0, tied 5"
    assert any(note in line for line in PairwiseSimilarity().format_lines(measured))


def test_missing_correlation_does_not_shift_other_pairs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are computed within a pair of runs."""
    rhos = iter([0.1, 0.1, 0.1, None, 0.2, 0.3, 0.9, 0.7, 0.6])

    def next_correlation(first: WordVectors, second: WordVectors) -> PairwiseCorrelation:
        return PairwiseCorrelation(next(rhos), None, None, 1770, exact=True)

    monkeypatch.setattr(pairwise, "pairwise_correlation", next_correlation)
    runs = [write("press2017/table3", row, seed, settings=UNITS) for row in ("Small", "WT") for seed in range(3)]
    (model,) = PairwiseSimilarity().measure(runs)["models"]
    # 0.7 - 0.2 and 0.6 - 0.3.
    assert (model["closer"]["mean"], model["closer"]["runs"]) == (pytest.approx(0.4), 2)


def test_different_rows_of_one_size_are_not_averaged(write: Write) -> None:
    runs = [write("press2017/table6", row, seed, settings=UNITS) for seed, row in enumerate(("Small", "Small + PR"))]
    with pytest.raises(DataError, match=rf"{runs[0].folder} and .* are runs of different rows"):
        PairwiseSimilarity().measure(runs)
