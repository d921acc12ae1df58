"""Figures 2 to 5 of Baevski & Auli: losses by band, of rows with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.papers.figures.frequency import ByPrevious, ByPreviousBillionWord, ByTarget

from .conftest import Write

ENDS = [(0, 9), (10, 99), (100, None)]


def bands(*losses: float, tokens: int = 100) -> list[dict[str, Any]]:
    return [
        {"low": low, "high": high, "tokens": tokens * (n + 1), "nll": loss, "types": 5}
        for n, ((low, high), loss) in enumerate(zip(ENDS, losses, strict=True))
    ]


def test_losses_by_band_are_means_over_seeds(write: Write) -> None:
    runs = [
        write("baevski2019/table3", row, seed, frequency={"target": bands(9 + seed, 7, 3), "previous": bands(1, 2, 4)})
        for row in ("SM", "ADP-T")
        for seed in (0, 1)
    ]
    measured = ByTarget().measure(runs)
    assert [band["share"] for band in measured["bands"]] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert [loss["mean"] for loss in measured["rows"][0]["nll"]] == [9.5, 7, 3]
    assert measured["rows"][0]["nll"][0]["low"] < 9.5
    previous = ByPrevious().measure(runs)
    assert [loss["mean"] for loss in previous["rows"][1]["nll"]] == [1, 2, 4]
    lines = ByTarget().format_lines(measured)
    assert lines[0] == "loss in nats by the training frequency of the word to predict, ptb"
    assert lines[1].split() == ["row", "0-9", "10-99", "100+"]
    assert [line.split()[0] for line in lines[2:]] == ["SM", "ADP-T"]
    svg = ByTarget().draw(measured).svg
    assert all(text in svg for text in ("ADP-T", "minus SM", "10-99"))


@pytest.mark.parametrize(
    ("figure", "word"), [(ByTarget, "the word to predict"), (ByPreviousBillionWord, "the word before")]
)
def test_picture_names_the_word_and_the_corpus(write: Write, figure: type[ByTarget], word: str) -> None:
    frequency = {"target": bands(9, 7, 3), "previous": bands(1, 2, 4)}
    run = write("baevski2019/enwiki", "SM", corpus="enwiki-sample", frequency=frequency)
    canvas = Canvas()
    figure().draw(figure().measure([run])).draw(canvas)
    (axes,) = canvas.axes
    assert axes.get_title() == "enwiki-sample"
    assert axes.get_xlabel() == f"training count of {word}, and share of tokens"


def test_finer_bands_are_merged_into_those_of_older_results(write: Write) -> None:
    finer = bands(9, 7, 3)
    finer[2:] = [
        {"low": 100, "high": 999, "tokens": 100, "nll": 6.0, "types": 3},
        {"low": 1_000, "high": None, "tokens": 200, "nll": 3.0, "types": 2},
    ]
    older, newer = (
        write("baevski2019/enwiki", row, frequency={"target": target, "previous": target})
        for row, target in (("SM", bands(9, 7, 3)), ("BPE", finer))
    )
    measured = ByTarget().measure([older, newer])
    assert measured["left_out"] == []
    assert [band["low"] for band in measured["bands"]] == [0, 10, 100]
    assert [loss["mean"] for loss in measured["rows"][1]["nll"]] == pytest.approx([9, 7, 4])
    assert len(ByTarget().measure([newer])["bands"]) == 4


def test_rows_with_other_tokens_are_left_out_and_named(write: Write) -> None:
    sub_words = {"vocabulary": {"bpe": {"merges": 100}}}
    frequency = {"target": bands(1, 1, 1, tokens=150)}
    runs = [write("baevski2019/table3", "BPE", settings=sub_words, corpus="another", frequency=frequency)]
    with pytest.raises(DataError, match="no losses by frequency"):
        ByTarget().measure(runs)
    runs.append(write("baevski2019/table3", "SM", frequency={"target": bands(9, 7, 3)}))
    measured = ByTarget().measure(runs)
    assert [row["row"] for row in measured["rows"]] == ["SM"]
    assert measured["left_out"] == ["BPE"]
    assert measured["corpus"] == "ptb"
    assert ByTarget().format_lines(measured)[-1] == "left out, because their tokens differ: BPE"
    assert "less that of" not in ByTarget().draw(measured).svg
