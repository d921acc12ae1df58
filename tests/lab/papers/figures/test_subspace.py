"""Figure 1 of Inan et al.: which runs give which point, from results or weights, and the verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_results import result
from reefknot.errors import DataError
from reefknot.lab.evaluation.subspace import between_ends
from reefknot.lab.papers.figures import subspace as module
from reefknot.lab.papers.figures.subspace import SubspaceDistance
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.loading import Result, flatten
from reefknot.lab.runs.result import RunResult
from reefknot.lab.text.streams import Streams
from reefknot.vectors.word_vectors import WordVectors


def make_run(
    folder: Path, *, beta: float | None, tau: float, seed: int = 0, distance: float | None = None, epochs: int = 150
) -> Result:
    run_folder = folder / f"{beta}-{tau}-{seed}-{epochs}"
    run_folder.mkdir()
    fields = {} if distance is None else {"subspace": {"distance": distance, "chance": 0.95, "words": 30, "dim": 3}}
    record = RunResult.model_validate(result("Small", seed) | fields)
    settings: dict[str, Any] = {"output": {"kind": "augmented", "tau": tau} | ({} if beta is None else {"beta": beta})}
    settings["training"] = {"epochs": epochs}
    return Result(run_folder, "inan2017/figure1", f"beta {beta}, tau {tau}, {epochs}", seed, record, (), settings, {})


@pytest.fixture
def runs(tmp_path: Path) -> list[Result]:
    return [
        make_run(tmp_path, beta=0.0, tau=10.0, distance=0.9),
        make_run(tmp_path, beta=0.0, tau=10.0, seed=1, distance=1.0),
        make_run(tmp_path, beta=1.0, tau=10.0, distance=0.1),
        make_run(tmp_path, beta=1.0, tau=2.0, distance=0.3),
    ]


def test_beta_varies_at_tau_ten_and_tau_at_beta_one(runs: list[Result]) -> None:
    measured = SubspaceDistance().measure(runs)

    assert [(point["at"], point["mean"], point["runs"]) for point in measured["beta"]] == [
        (0.0, pytest.approx(0.95), 2),
        (1.0, 0.1, 1),
    ]
    assert [(point["at"], point["mean"]) for point in measured["tau"]] == [(2.0, 0.3), (10.0, 0.1)]
    # Student's interval, 0.95 ± 0.64, would exceed 1.
    assert 0.0 < measured["beta"][0]["low"] < 0.9 < 0.99 < measured["beta"][0]["high"] < 1.0
    assert measured["chance"] == pytest.approx(0.95)
    assert json.loads(json.dumps(measured)) == measured


def test_lines_list_each_point_and_the_papers_description(runs: list[Result]) -> None:
    lines = SubspaceDistance().format_lines(SubspaceDistance().measure(runs))

    assert any(line.startswith("beta = 0 ") and line.endswith("near 1") for line in lines)
    assert any(line.startswith("beta = 1 ") and "0.100" in line and line.endswith("about 0.06") for line in lines)
    assert any(line.startswith("tau = 2 ") and line.endswith("already low") for line in lines)


def test_longer_training_is_listed_by_epochs_and_has_its_own_verdict(tmp_path: Path, runs: list[Result]) -> None:
    assert "epochs" not in SubspaceDistance().measure(runs)
    distances = {0: 0.06, 1: 0.065, 2: 0.062}
    long_runs = [
        make_run(tmp_path, beta=1.0, tau=10.0, seed=seed, distance=distance, epochs=600)
        for seed, distance in distances.items()
    ]
    measured = SubspaceDistance().measure([*runs, *long_runs])
    assert [point["mean"] for point in measured["beta"]] == [pytest.approx(0.95), 0.1]
    assert [(point["at"], point["mean"]) for point in measured["epochs"]] == [
        (150, 0.1),
        (600, pytest.approx(sum(distances.values()) / 3)),
    ]
    lines = SubspaceDistance().format_lines(measured)
    assert any(line.startswith("beta 1, epochs = 600 ") and "0.062" in line for line in lines)
    verdicts = [line for line in lines if line.startswith("Trained for")]
    assert len(verdicts) == 1
    assert verdicts[0].startswith(
        "Trained for 600 epochs, the distance at beta = 1 is about 0.06 (within 0.03): confirmed"
    )
    with pytest.raises(DataError, match="trained for 600 epochs, other runs for 150"):
        SubspaceDistance().measure([*runs, make_run(tmp_path, beta=0.0, tau=10.0, distance=0.9, epochs=600)])


def test_centred_distances_have_a_column_if_all_runs_of_a_point_have_them(runs: list[Result]) -> None:
    assert "centred" not in SubspaceDistance().format_lines(SubspaceDistance().measure(runs))[0]
    subspace = {"distance": 0.1, "chance": 0.95, "words": 30, "dim": 3, "centred_distance": 0.02}
    record = RunResult.model_validate(result("Small", 0) | {"subspace": subspace})
    lines = SubspaceDistance().format_lines(SubspaceDistance().measure([*runs[:2], replace(runs[2], record=record)]))
    assert "centred" in lines[0]
    (line,) = [line for line in lines if line.startswith("beta = 1 ")]
    assert line.split()[3:6] == ["0.100", "0.020", "1"]


def test_picture_marks_the_papers_descriptions(runs: list[Result]) -> None:
    svg = SubspaceDistance().draw(SubspaceDistance().measure(runs)).svg

    assert svg.startswith("<svg")
    for text in ("subspace distance", "paper: near 1", "paper: about 0.06", "paper: already low"):
        assert text in svg


def test_one_sweep_can_be_drawn_alone(runs: list[Result], tmp_path: Path) -> None:
    measured = SubspaceDistance().measure(runs[:2])

    assert measured["tau"] == []
    assert "temperature" not in SubspaceDistance().draw(measured).svg


def test_distance_is_computed_from_weights_if_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    words = tuple(f"w{number}" for number in range(30))
    tables = {end: WordVectors(words, random.normal(size=(30, 3)).astype(np.float32)) for end in ("input", "output")}
    monkeypatch.setattr(module, "open_vectors", lambda folder, device: tables)

    measured = SubspaceDistance().measure([make_run(tmp_path, beta=1.0, tau=10.0)])

    expected = between_ends(tables["input"].vectors_VD, tables["output"].vectors_VD).distance
    assert measured["beta"][0]["mean"] == expected


def test_unusable_runs_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_vectors", lambda folder, device: {"tied": None})

    with pytest.raises(DataError, match="both ends use the same table"):
        SubspaceDistance().measure([make_run(tmp_path, beta=1.0, tau=10.0)])
    with pytest.raises(DataError, match=r"output\.beta"):
        SubspaceDistance().measure([make_run(tmp_path, beta=None, tau=10.0)])
    with pytest.raises(DataError, match="none of these runs"):
        SubspaceDistance().measure([make_run(tmp_path, beta=0.5, tau=20.0, distance=0.5)])


def test_recipe_has_both_sweeps_and_no_regularisation() -> None:
    recipe = load_recipe(SubspaceDistance.recipe)
    settings = [flatten(experiment.model_dump()) for experiment in recipe.experiments.values()]
    points = {(row["output.beta"], row["output.tau"]) for row in settings}

    assert {beta for beta, tau in points if tau == 10.0} == {tenth / 10 for tenth in range(11)}
    assert {tau for beta, tau in points if beta == 1.0} == {1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0}
    assert len(points) == 20
    long_row = flatten(recipe.experiments["beta 1, 600 epochs"].model_dump())
    usual_row = flatten(recipe.experiments["beta 1"].model_dump())
    assert {key for key in usual_row if usual_row[key] != long_row[key]} == {
        "training.epochs",
        "training.schedule.period",
    }
    assert long_row["training.schedule.period"] == 4 * usual_row["training.schedule.period"]
    for experiment_settings in settings:
        rates = [value for key, value in experiment_settings.items() if "dropout" in key or "decay" in key]
        assert not any(rate for rate in rates if not isinstance(rate, str))  # `word_dropout_by` is a word
        assert (
            experiment_settings["input.table"]
            == experiment_settings["output.table"]
            != experiment_settings["output.classifier.table"]
        )
        assert experiment_settings["tables.words.unit_norm"]
        assert not experiment_settings["tables.classes.unit_norm"]
        assert not experiment_settings["output.classifier.bias"]


def test_learning_rate_reaches_zero_at_the_end() -> None:
    settings = flatten(next(iter(load_recipe(SubspaceDistance.recipe).experiments.values())).model_dump())
    batch, steps = settings["training.batch"], settings["training.steps"]
    windows = Streams(np.zeros(settings["corpus.tokens"], dtype=np.int32), batch, steps).num_windows

    assert settings["training.schedule.period"] == windows * settings["training.epochs"]


def test_runs_with_other_settings_are_rejected(runs: list[Result]) -> None:
    other = replace(runs[2], settings=runs[2].settings | {"encoder": {"hidden_dim": 9}})
    with pytest.raises(DataError, match=rf"{runs[0].folder} and {other.folder} differ in encoder\.hidden_dim, not"):
        SubspaceDistance().measure([*runs[:2], other])
    with pytest.raises(DataError, match="are runs of different rows"):
        SubspaceDistance().measure([runs[0], replace(runs[1], row="another")])


def verdicts(tmp_path: Path, distances: dict[tuple[float, float], tuple[float, ...]]) -> list[str]:
    runs = [
        make_run(tmp_path, beta=beta, tau=tau, seed=seed, distance=distance)
        for (beta, tau), values in distances.items()
        for seed, distance in enumerate(values)
    ]
    return SubspaceDistance().format_lines(SubspaceDistance().measure(runs))[-3:]


def test_paper_claims_are_decided_by_intervals(tmp_path: Path) -> None:
    seen = {(0.0, 10.0): (0.95, 0.951, 0.949), (1.0, 10.0): (0.06, 0.061, 0.059), (1.0, 2.0): (0.2, 0.21, 0.19)}
    chance, about, low = verdicts(tmp_path, seen)
    assert chance.startswith(
        "At beta = 0 the distance is near its chance level (within 0.03 of 0.950): confirmed, 0.95"
    )
    assert about.startswith("At beta = 1 the distance is about 0.06 (within 0.03): confirmed, 0.060 [")
    assert low.startswith(
        "At tau = 2 the distance is already low (below 0.475, which is 0.5 times chance): confirmed, 0.200 ["
    )


def test_opposite_results_and_too_few_seeds_are_stated(tmp_path: Path) -> None:
    values = {(0.0, 10.0): (0.4, 0.41, 0.39), (1.0, 10.0): (0.02, 0.1), (1.0, 2.0): (0.2,)}
    chance, about, low = verdicts(tmp_path, values)
    assert ": contradicted, 0.400 [" in chance
    assert ": undecided, 0.060 [" in about
    assert low.endswith("undecided, 0.200; a single run has no interval.")
