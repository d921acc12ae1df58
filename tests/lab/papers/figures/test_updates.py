"""Section 3 of Press & Wolf: update rules of language models and norms of skip-grams, averaged over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.evaluation.updates import measure_updates
from reefknot.lab.papers.figures import updates as module
from reefknot.lab.papers.figures.updates import UpdateRule, merge_runs
from reefknot.lab.runs.loading import Result
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable
from reefknot.vectors.word_vectors import WordVectors

WORDS = 30
COUNTS = [2000, 200, *[20] * 8, *[2] * 20]
TEXT = np.random.default_rng(0).integers(0, WORDS, 200, dtype=np.int32)


def make_model(seed: int, *, tied: bool, frozen: bool = False) -> LanguageModel:
    torch.manual_seed(seed)
    words = WordTable(WORDS, 4, frozen=frozen)
    return LanguageModel(Lookup(words), LSTM(4, 4), Softmax(Plain(words if tied else WordTable(WORDS, 4))))


def fake_run(folder: Path) -> SimpleNamespace:
    """Return the parts of an opened run that the figure uses."""
    row, seed = folder.name.split("-")
    texts = SimpleNamespace(splits={"train": SimpleNamespace(ids=TEXT)})
    return SimpleNamespace(
        model=make_model(int(seed), tied=row in ("tied", "frozen tied"), frozen=row.startswith("frozen")),
        experiment=SimpleNamespace(training=SimpleNamespace(batch=2, steps=5), corpus=SimpleNamespace(pairs=None)),
        vocabulary=SimpleNamespace(counts=COUNTS),
        dataset=lambda data: texts,
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    monkeypatch.setattr(module, "open_language_model", lambda folder, device: fake_run(folder))
    words = tuple(f"w{number}" for number in range(WORDS))

    def vectors(folder: Path, device: str) -> dict[str, WordVectors]:
        length = {"skip tied": 1.0, "skip": 3.0}[folder.name.split("-")[0]]
        rows = np.full((WORDS, 4), length / 2, dtype=np.float32)
        word_vectors = WordVectors(words, rows, np.asarray(COUNTS))
        return {"tied": word_vectors} if "tied" in folder.name else {"input": word_vectors, "output": word_vectors}

    monkeypatch.setattr(module, "open_vectors", vectors)
    kinds: dict[str, dict[str, Any]] = {"tied": {}, "untied": {}}
    kinds |= {name: {"skip_gram": {"tied": "tied" in name}} for name in ("skip tied", "skip")}
    return [
        Result(Path(f"{row}-{seed}"), "recipe", row, seed, None, (), settings, {})
        for row, settings in kinds.items()
        for seed in (0, 1)
    ]


def test_values_are_means_over_the_seeds_of_a_row(runs: list[Result]) -> None:
    measured = UpdateRule().measure(runs)

    assert [model["row"] for model in measured["models"]] == ["tied", "untied"]
    rules = [measure_updates(make_model(seed, tied=True), TEXT, COUNTS, streams=2, steps=5) for seed in (0, 1)]
    tied = measured["models"][0]
    for side in ("input", "output", "both"):
        expected = np.mean([rule["tables"]["tied"][side]["mean"] for rule in rules])
        assert tied["tables"]["tied"][side]["mean"]["mean"] == pytest.approx(expected)
    assert tied["types"] == WORDS
    assert tied["current"]["mean"]["runs"] == 2
    assert list(measured["models"][1]["tables"]) == ["input", "output"]
    assert json.loads(json.dumps(measured)) == measured


def test_norms_of_skip_grams_are_grouped_by_frequency(runs: list[Result]) -> None:
    norms = {row["row"]: row["tables"] for row in UpdateRule().measure(runs)["norms"]}

    assert [band["mean"]["mean"] for band in norms["skip tied"]["tied"]] == pytest.approx([1.0] * 4)
    assert [band["types"] for band in norms["skip"]["output"]] == [20, 8, 1, 1]
    assert norms["skip"]["input"][0]["mean"]["mean"] == pytest.approx(3.0)


def test_lines_state_shares_probabilities_and_norms(runs: list[Result]) -> None:
    text = "\n".join(UpdateRule().format_lines(UpdateRule().measure(runs)))

    assert "tied table: a step changes 100.0 % of the rows" in text
    assert "output table: a step changes 100.0 % of the rows; 0.0 % through the input" in text
    assert "p(i_t)" in text
    assert "skip tied: norms in the tied table by training count: 0–9: 1.00 [1.00, 1.00]" in text


def test_picture_has_a_panel_per_table_and_one_for_norms(runs: list[Result]) -> None:
    svg = UpdateRule().draw(UpdateRule().measure(runs)).svg

    for title in ("tied: tied table", "untied: input table", "untied: output table", "norms of skip-gram vectors"):
        assert title in svg


@pytest.mark.parametrize("selection", [slice(0, 2), slice(4, 6)])
def test_one_kind_of_model_is_enough(runs: list[Result], selection: slice) -> None:
    measured = UpdateRule().measure(runs[selection])

    assert UpdateRule().draw(measured).svg
    assert UpdateRule().format_lines(measured)


def test_missing_band_does_not_shift_other_bars() -> None:
    means = {low: {"mean": low / 10, "low": None, "high": None} for low in (0, 10, 100)}
    bands = [{"low": low, "high": 10 * low, "types": 1, "mean": mean} for low, mean in means.items()]

    panel = module._build_panel("norms", {"all": bands, "frequent": bands[1:]}, "norm")

    assert list(panel.estimates["frequent"]) == [None, means[10], means[100]]


def test_over_runs_averages_fractions_and_keeps_integers() -> None:
    joined = merge_runs(
        [{"n": 3, "x": 1.0, "of": [{"y": 2.0, "high": None}]}, {"n": 3, "x": 3.0, "of": [{"y": 2.0, "high": None}]}]
    )

    assert (joined["n"], joined["x"]["mean"], joined["of"][0]["y"]["mean"]) == (3, 2.0, 2.0)
    assert joined["of"][0]["high"] is None


def make_result(row: str) -> Result:
    return Result(Path(f"{row}-0"), "recipe", row, 0, None, (), {"kind": row}, {})


@pytest.mark.usefixtures("runs")
@pytest.mark.filterwarnings("error")
def test_frozen_table_is_named_and_not_drawn() -> None:
    measured = UpdateRule().measure([make_result("frozen"), make_result("untied")])
    drawing = UpdateRule().draw(measured)
    assert "frozen: input table" not in drawing.svg
    assert all(title in drawing.svg for title in ("frozen: output table", "untied: input table"))
    lines = UpdateRule().format_lines(measured)
    assert lines[1] == "  input table: frozen, so no step changes it; it is not in the picture"
    assert lines[2].startswith("  output table: a step changes 100.0 % of the rows")


@pytest.mark.usefixtures("runs")
def test_only_frozen_tables_are_rejected() -> None:
    with pytest.raises(DataError, match="all tables of these runs are frozen"):
        UpdateRule().measure([make_result("frozen tied")])


def test_changes_have_a_logarithmic_axis_and_norms_a_linear_one(runs: list[Result]) -> None:
    drawing = UpdateRule().draw(UpdateRule().measure(runs))
    canvas = Canvas()
    drawing.draw(canvas)

    # Tables: tied, input, output; then the norms.
    assert [axes.get_yscale() for axes in canvas.axes] == ["log"] * 3 + ["linear"]
    assert "logarithmic" in drawing.caption
    assert "mathdefault" not in drawing.svg
