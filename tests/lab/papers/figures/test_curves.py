"""Figure 2 of Inan et al.: curves over seeds, one panel per network size."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.errors import DataError
from reefknot.lab.papers.figures.curves import Progress
from reefknot.lab.runs.loading import Result

from .conftest import Write

RECIPE = "inan2017/table1"


def settings(units: int, *, tied: bool = False, augmented: bool = False) -> dict[str, Any]:
    classifier = {"kind": "plain", "table": "words" if tied else "classes"}
    return {
        "input": {"table": "words"},
        "encoder": {"hidden_dim": units},
        "output": {"kind": "augmented" if augmented else "softmax", "classifier": classifier},
    }


def test_curve_is_the_mean_over_seeds_after_each_epoch(write: Write) -> None:
    runs = [write(RECIPE, "VD large", seed, settings=settings(1500), curve=[700, 100 + seed, 90]) for seed in (0, 2)]
    (curve,) = Progress().measure(runs)["curves"]
    assert (curve["method"], curve["size"], curve["seeds"], curve["epochs"]) == ("VD", 1500, [0, 2], [1, 2])
    assert [point["mean"] for point in curve["perplexity"]] == [101, 90]
    assert curve["perplexity"][0]["low"] < 100
    assert curve["perplexity"][1]["low"] == curve["perplexity"][1]["high"] == 90


def test_methods_are_recognised_by_their_settings(write: Write) -> None:
    kinds = {"VD": (False, False), "VD+AL": (False, True), "VD+RE": (True, False), "VD+REAL": (True, True)}
    for method, (tied, augmented) in kinds.items():
        run = write(RECIPE, method, settings=settings(200, tied=tied, augmented=augmented), curve=[9, 8])
        assert Progress().measure([run])["curves"][0]["method"] == method


def test_picture_has_one_panel_per_size(write: Write) -> None:
    runs = [write(RECIPE, f"{n}", settings=settings(n), curve=[400, *range(120, 90, -1)]) for n in (1500, 200)]
    measured = Progress().measure(runs)
    drawing = Progress().draw(measured)
    assert [text in drawing.svg for text in ("200 units", "1500 units", "epoch", "VD")] == [True] * 4
    assert drawing.svg == Progress().draw(measured).svg
    assert drawing.png.startswith(b"\x89PNG")
    head, first, *_ = Progress().format_lines(measured)
    assert head.split() == ["row", "lowest", "epoch", "paper", "at", "a", "third", "epochs", "seeds"]
    assert first.split() == ["200", "91.0", "30", "110.0", "30", "1"]


def runs_of(write: Write, units: int, lowest: dict[str, float], corpus: str = "ptb") -> list[Result]:
    """Write three seeds of each method with slightly different scores, whose second epoch is the best."""
    kinds = {"VD": {}, "VD+AL": {"augmented": True}, "VD+RE": {"tied": True}}
    return [
        write(
            RECIPE,
            f"{method} {units} {corpus}",
            seed,
            settings=settings(units, **kinds[method]),
            curve=[900, 200, low + 0.1 * seed, 150],
            corpus=corpus,
        )
        for method, low in lowest.items()
        for seed in (0, 1, 2)
    ]


def test_verdicts_on_the_papers_claims(write: Write) -> None:
    runs = runs_of(write, 200, {"VD": 93, "VD+AL": 91, "VD+RE": 92})
    runs += runs_of(write, 1500, {"VD": 77, "VD+AL": 74, "VD+RE": 77})
    lines = Progress().format_lines(Progress().measure(runs))[7:]
    assert lines[0] == "The paper prints no perplexity for the first training of its small networks."
    assert [line.partition(", ptb): ")[2].partition(",")[0] for line in lines[1:]] == [
        "AL lowers the perplexity: confirmed",
        "RE lowers the perplexity: confirmed",
        "AL lowers it more than RE: confirmed",
        "AL lowers the perplexity: confirmed",
        "RE lowers the perplexity: undecided",
        "RE lowers it more than AL: contradicted",
    ]
    assert lines[1].startswith("Small network (200 units, ptb): AL lowers the perplexity: confirmed, 2.000 [1.773, ")
    assert all(line.endswith("] in validation perplexity.") for line in lines[1:])


def test_claim_without_runs_is_not_decided(write: Write) -> None:
    runs = runs_of(write, 200, {"VD+AL": 91, "VD+RE": 92})
    runs += runs_of(write, 200, {"VD": 93}, "wikitext-2")  # another corpus
    runs += [write(RECIPE, f"VD {n}", settings=settings(1500), curve=[900, 80]) for n in (1, 2)]
    measured = Progress().measure(runs)
    lines = Progress().format_lines(measured)[7:]
    assert lines[0].startswith("Small network (200 units, ptb): AL lowers it more than RE: confirmed, 1.000 [")
    assert lines[1:] == [
        "Small network (200 units, ptb): the other claims are undecided: they need exactly one row of VD "
        "(there are 0).",
        "Large network (1500 units, ptb): all claims are undecided: they need exactly one row of VD (there are 2), "
        "VD+AL (there are 0), VD+RE (there are 0).",
        "Not used, because the network or the corpus differs from the paper's: "
        "VD 200 wikitext-2 (VD, 200 units, wikitext-2).",
    ]


def test_rows_of_another_size_or_corpus_are_named(write: Write) -> None:
    """The table shows these rows, so "there are 0" alone would seem wrong."""
    runs = runs_of(write, 16, {"VD": 93, "VD+RE": 92}, "tiny") + runs_of(write, 300, {"VD+AL": 91})
    real = settings(16, tied=True, augmented=True)  # no claim is about this method
    runs.append(write(RECIPE, "REAL", settings=real, curve=[900, 80], corpus="tiny"))
    *_, small, large, last = Progress().format_lines(Progress().measure(runs))
    for line in (small, large):
        assert line.endswith("row of VD (there are 0), VD+AL (there are 0), VD+RE (there are 0).")
    assert last == (
        "Not used, because the network or the corpus differs from the paper's: "
        "VD 16 tiny (VD, 16 units, tiny); VD+RE 16 tiny (VD+RE, "
        "16 units, tiny); VD+AL 300 ptb (VD+AL, 300 units, ptb)."
    )
    counted = runs_of(write, 200, {"VD": 93, "VD+AL": 91, "VD+RE": 92})
    assert not any("Not used" in line for line in Progress().format_lines(Progress().measure(counted)))


def test_old_record_without_corpus_is_read(write: Write) -> None:
    measured = Progress().measure(runs_of(write, 200, {"VD": 93, "VD+AL": 91, "VD+RE": 92}))
    lines = Progress().format_lines(measured)
    for curve in measured["curves"]:
        del curve["corpus"]
    assert Progress().format_lines(measured) == lines


def test_runs_without_validation_by_epoch_are_rejected(write: Write) -> None:
    with pytest.raises(DataError, match="no validation perplexity by epoch"):
        Progress().measure([write(RECIPE, "VD", curve=[100])])
