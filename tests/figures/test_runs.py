"""Which runs a figure takes, what it says of missing ones, and that each figure has rows that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import DataError, SettingsError
from reefknot.figures import FIGURES, open_figure
from reefknot.figures.record import record_of
from reefknot.figures.runs import among, choose, rows_of
from reefknot.recipes import shipped

from .conftest import Write

LARGE = "inan2017/table1"


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_says_what_it_shows_and_has_recipes(name: str) -> None:
    figure = open_figure(name)
    assert figure.name == name
    assert set(figure.recipes) <= set(shipped())
    assert figure.stand_in is None or figure.stand_in in shipped()
    assert all(rows.names for rows in rows_of(figure))
    assert figure.title
    assert figure.shows.endswith(".")


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(SettingsError, match="no figure 'inan2017/22'; did you mean inan2017/2"):
        open_figure("inan2017/22")
    with pytest.raises(SettingsError, match="no figure 'zebra'; there are: inan2017/1, "):
        open_figure("zebra")


def test_of_named_runs_those_of_its_rows_count_in_their_order(write: Write, tmp_path: Path) -> None:
    for row in ("VD-LSTM+REAL large", "VD-LSTM large", "VD-LSTM medium"):
        write(LARGE, row)
    chosen = choose(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert [run.row for run in chosen.runs] == ["VD-LSTM large", "VD-LSTM+REAL large"]
    assert chosen.notes == []


def test_missing_rows_are_named_with_what_trains_them(write: Write, tmp_path: Path) -> None:
    write(LARGE, "VD-LSTM large")
    (note,) = choose(open_figure("inan2017/table4"), [tmp_path / "runs"]).notes
    assert note == (
        'no run of "VD-LSTM+REAL large"; this trains them: '
        "reefknot table inan2017/table4 --row 'VD-LSTM+REAL large' --data DIR"
    )


def test_records_have_no_weights_to_read(write: Write, tmp_path: Path) -> None:
    run = write(LARGE, "VD-LSTM large")
    (run.folder / "checkpoints").rmdir()
    with pytest.raises(DataError, match=r"inan2017/table4 reads weights, and .*seed0 has none"):
        choose(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert choose(open_figure("inan2017/2"), [tmp_path / "runs"]).runs


def test_a_run_that_is_not_finished_is_left_out_and_named(write: Write, tmp_path: Path) -> None:
    write(LARGE, "VD-LSTM large")
    open_run = write(LARGE, "VD-LSTM+REAL large")
    (open_run.folder / "result.json").unlink()
    chosen = choose(open_figure("inan2017/table4"), [tmp_path / "runs"])
    assert [run.row for run in chosen.runs] == ["VD-LSTM large"]
    assert chosen.notes[-1] == f"left out, not finished: {open_run.folder}"


def test_without_names_the_runs_lie_where_training_puts_them(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figure = open_figure("baevski2019/2")
    with pytest.raises(DataError, match=r"no runs of it under runs/.*reefknot table baevski2019/figure2 --data DIR"):
        choose(figure, [])
    write("baevski2019/enwiki", "SM-T")
    write("baevski2019/enwiki", "SM")
    stand_ins = choose(figure, [])
    assert [run.row for run in stand_ins.runs] == ["SM", "SM-T"]
    assert stand_ins.notes == ["not the rows of baevski2019/figure2: runs of baevski2019/enwiki stand in for them"]
    write("baevski2019/table3", "SM")
    assert [run.recipe for run in choose(figure, []).runs] == ["baevski2019/table3"]


def test_other_runs_stand_in_only_where_there_are_none_of_its_own(write: Write, tmp_path: Path) -> None:
    other = write("demo", "tied")
    figure = open_figure("pappas2019/3")
    assert [run.folder for run in choose(figure, [other.folder]).runs] == [other.folder]
    own = write("pappas2019/table4", "DRILL 4-layers")
    assert [run.folder for run in choose(figure, [tmp_path / "runs"]).runs] == [own.folder]
    assert among(figure, [other]) is None


def test_a_record_says_where_its_runs_came_from(write: Write) -> None:
    run = write(LARGE, "VD-LSTM large", 3)
    record = record_of(open_figure("inan2017/2"), {"curves": []}, [run], ["a note"])
    assert (record["figure"], record["notes"]) == ("inan2017/2", ["a note"])
    assert {"commit", "command", "cpu", "source_sha256"} <= record["environment"].keys()
    (origin,) = record["runs"]
    assert (origin["row"], origin["seed"], origin["commit"]) == ("VD-LSTM large", 3, "0123456789abcdef")
    assert (origin["corpus"], origin["device"]) == ("ptb (efefefefefef)", "NVIDIA H200")
