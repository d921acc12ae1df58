"""Which runs a figure uses, notes on missing ones, and that the rows of every figure exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from made_results import change
from reefknot.errors import DataError, SettingsError
from reefknot.lab.papers.figures import FIGURES, open_figure
from reefknot.lab.papers.figures.record import build_record
from reefknot.lab.papers.figures.runs import figure_rows, find_figure_runs, select_runs
from reefknot.lab.recipes.file import list_shipped_recipes

from .conftest import Write

LARGE = "inan2017/table1"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_description_and_existing_recipes(name: str) -> None:
    figure = open_figure(name)
    assert figure.name == name
    assert set(figure.recipes) <= set(list_shipped_recipes())
    assert figure.fallback_recipe is None or figure.fallback_recipe in list_shipped_recipes()
    assert all(rows.names for rows in figure_rows(figure))
    assert figure.title
    assert figure.description.endswith(".")


def test_unknown_figure_is_rejected_with_suggestions() -> None:
    with pytest.raises(SettingsError, match="unknown figure 'inan2017/22'; did you mean inan2017/2"):
        open_figure("inan2017/22")
    with pytest.raises(SettingsError, match="unknown figure 'zebra'; choose one of inan2017/1, "):
        open_figure("zebra")


def test_runs_of_the_figures_rows_are_chosen_in_order(write: Write, tmp_path: Path) -> None:
    for row in ("VD-LSTM+REAL large", "VD-LSTM large", "VD-LSTM medium"):
        write(LARGE, row)
    chosen = select_runs(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert [run.row for run in chosen.runs] == ["VD-LSTM large", "VD-LSTM+REAL large"]
    assert chosen.notes == ["left out, not rows of the figure: inan2017/table1 (1 run)"]
    assert select_runs(open_figure("inan2017/table4"), [run.folder for run in chosen.runs]).notes == []


def test_missing_rows_are_named_with_their_command(write: Write, tmp_path: Path) -> None:
    write(LARGE, "VD-LSTM large")
    (note,) = select_runs(open_figure("inan2017/table4"), [tmp_path / "runs"]).notes
    assert note == (
        'no run of "VD-LSTM+REAL large"; this command trains them: '
        "reefknot table inan2017/table4 --row 'VD-LSTM+REAL large' --data DIR"
    )


def test_changed_settings_are_noted(write: Write, tmp_path: Path) -> None:
    fewer, figure = change("training.epochs", 100, 1), open_figure("inan2017/table4")
    runs = [write(LARGE, "VD-LSTM large", seed, changed=[fewer]) for seed in (0, 1)]
    (_, note) = select_runs(figure, [run.folder for run in runs]).notes
    changes = "training.epochs: 100 -> 1"
    assert note == f"VD-LSTM large: settings differ from the recipe ({changes})"
    real = write(LARGE, "VD-LSTM+REAL large", changed=[fewer, change("corpus.tokens", None, 9)])
    notes = select_runs(figure, [tmp_path / "runs"]).notes
    assert notes == [
        note,
        f"VD-LSTM+REAL large: settings differ from the recipe ({changes}; corpus.tokens: not set -> 9)",
    ]
    record = json.loads((real.folder / "result.json").read_text())
    (real.folder / "result.json").write_text(json.dumps(record | {"changed": [fewer]}))
    notes = select_runs(figure, [tmp_path / "runs"]).notes
    assert notes == [f"Every row: settings differ from the recipe ({changes})"]


def test_record_without_weights_is_rejected_if_weights_are_needed(write: Write, tmp_path: Path) -> None:
    run = write(LARGE, "VD-LSTM large")
    (run.folder / "checkpoints").rmdir()
    with pytest.raises(DataError, match=r"inan2017/table4 needs weights, but .*seed0 has none"):
        select_runs(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert select_runs(open_figure("inan2017/2"), [tmp_path / "runs"]).runs


def test_unfinished_run_is_left_out_and_named(write: Write, tmp_path: Path) -> None:
    write(LARGE, "VD-LSTM large")
    unfinished = write(LARGE, "VD-LSTM+REAL large")
    (unfinished.folder / "result.json").unlink()
    chosen = select_runs(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert [run.row for run in chosen.runs] == ["VD-LSTM large"]
    assert chosen.notes[-1] == f"left out, not finished: {unfinished.folder}"


def test_default_runs_are_those_in_the_runs_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figure = open_figure("baevski2019/2")
    with pytest.raises(DataError, match=r"no runs of its rows in runs/.*reefknot table baevski2019/figure2 --data DIR"):
        select_runs(figure, [])
    write("baevski2019/enwiki", "SM-T")
    write("baevski2019/enwiki", "SM")
    stand_ins = select_runs(figure, [])
    assert [run.row for run in stand_ins.runs] == ["SM", "SM-T"]
    assert stand_ins.notes == ["runs of baevski2019/enwiki are shown in place of the rows of baevski2019/figure2"]
    write("baevski2019/table3", "SM")
    assert [run.recipe for run in select_runs(figure, []).runs] == ["baevski2019/table3"]


def test_other_runs_are_used_only_if_the_figure_has_none(write: Write, tmp_path: Path) -> None:
    other = write("demo", "tied")
    figure = open_figure("pappas2019/3")
    assert [run.folder for run in select_runs(figure, [other.folder]).runs] == [other.folder]
    run_of_figure = write("pappas2019/table4", "DRILL 4-layers")
    assert [run.folder for run in select_runs(figure, [tmp_path / "runs"]).runs] == [run_of_figure.folder]
    assert find_figure_runs(figure, [other]) is None


def test_record_states_the_origin_of_its_runs(write: Write) -> None:
    run = write(LARGE, "VD-LSTM large", 3)
    record = build_record(open_figure("inan2017/2"), {"curves": []}, [run], ["a note"])
    assert (record["figure"], record["notes"]) == ("inan2017/2", ["a note"])
    assert {"commit", "command", "cpu", "source_sha256"} <= record["environment"].keys()
    (origin,) = record["runs"]
    assert (origin["row"], origin["seed"], origin["commit"]) == ("VD-LSTM large", 3, "0123456789abcdef")
    assert (origin["corpus"], origin["device"]) == ("ptb (efefefefefef)", "NVIDIA H200")


SKIP_GRAM = {"skip_gram": {"dim": 100}}


def test_unused_runs_are_counted_by_recipe(write: Write, tmp_path: Path) -> None:
    write("press2017/table3", "Small, PTB")
    for seed in (0, 1):
        write("demo", "tied", seed)
    write("press2017/table6", "Small")
    chosen = select_runs(open_figure("press2017/table3"), [tmp_path / "runs"])
    assert [run.recipe for run in chosen.runs] == ["press2017/table3"]
    assert chosen.notes[-1] == "left out, not rows of the figure: demo (2 runs), press2017/table6 (1 run)"


@pytest.mark.parametrize("name", ["press2017/section3", "press2017/table4"])
def test_one_of_several_recipes_can_be_substituted(
    write: Write, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("press2017/table3", "Small, PTB")
    write("press2017/enwiki-vectors", "untied", settings=SKIP_GRAM)
    substituted = "runs of press2017/enwiki-vectors are shown in place of the rows of press2017/table2"
    for named in ([], [tmp_path / "runs"]):
        chosen = select_runs(open_figure(name), named)
        assert [run.recipe for run in chosen.runs] == ["press2017/table3", "press2017/enwiki-vectors"]
        assert chosen.notes[0] == substituted
        assert not any("table2" in note for note in chosen.notes[1:])
    write("press2017/table2", "untied", settings=SKIP_GRAM)
    chosen = select_runs(open_figure(name), [tmp_path / "runs"])
    assert [run.recipe for run in chosen.runs] == ["press2017/table3", "press2017/table2"]
    assert chosen.notes[-1] == "left out, not rows of the figure: press2017/enwiki-vectors (1 run)"


def test_runs_of_another_task_are_rejected(write: Write) -> None:
    vectors = write("press2017/enwiki-vectors", "untied", settings=SKIP_GRAM).folder
    model = write("demo", "tied").folder
    translator = write("demo", "pairs", settings={"corpus": {"pairs": {"source": "en"}}}).folder
    for name, folder, message in (
        ("press2017/table3", vectors, f"it shows a language model, but {vectors} is a run of skip-gram; pass "),
        ("press2017/table2", model, f"it shows a run of skip-gram, but {model} is a language model; pass "),
        (
            "press2017/section3",
            translator,
            f"or a run of skip-gram, but {translator} is a translator; pass ",
        ),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            select_runs(open_figure(name), [folder])


@pytest.mark.parametrize("name", ["inan2017/1", "inan2017/table4"])
def test_skip_gram_among_language_models_is_left_out(write: Write, name: str) -> None:
    named = [write("demo", "tied").folder, write("words", "untied", settings=SKIP_GRAM).folder]
    chosen = select_runs(open_figure(name), named)
    assert [run.folder for run in chosen.runs] == named[:1]
    assert "left out, not a language model: words (1 run)" in chosen.notes
