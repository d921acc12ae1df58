"""Results and metrics as flat tables: for pandas and as CSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from made_results import result, scored, write_evaluation, write_run
from reefknot.errors import DataError, SettingsError
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import load_run
from reefknot.lab.runs.tables import result_rows, to_csv, to_pandas

RECORD = Path(__file__).parents[3] / "results" / "press2017" / "table6" / "small-model" / "seed0"


def test_result_table_has_the_fields_of_result_json(tmp_path: Path) -> None:
    similarity = {"input": [{"name": "MEN", "rho": 0.5, "pairs": 12, "of": 3000}]}
    changed = [{"key": "training.epochs", "old": 13, "new": 2}]
    folder = write_run(tmp_path, "Small", 1, result("Small", 1, similarity=similarity, changed=changed))
    [row] = result_rows(load_run(folder))
    record = json.loads((folder / "result.json").read_text())
    assert row["run"] == str(folder)
    assert (row["recipe"], row["row"], row["seed"], row["mode"]) == ("press2017/table6", "Small", 1, "plain")
    assert row["finished"] is True
    assert row["test.perplexity"] == record["test"]["perplexity"]
    assert row["test.text.unknown"] == 77
    assert row["training.steps"] == 30_199
    assert row["settings.training.epochs"] == 13
    assert row["similarity.input.MEN"] == 0.5
    assert row["changed"] == "training.epochs: 13 -> 2"
    assert not [name for name, value in row.items() if isinstance(value, dict | list | tuple)]
    assert not [value for value in row.values() if isinstance(value, str) and "\n" in value]


def test_saved_evaluation_is_a_row_with_its_own_scores(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small", 0, result("Small", 0))
    write_evaluation(folder, "dynamic", test=91.25)
    plain, dynamic = result_rows(load_run(folder))
    assert (plain["mode"], dynamic["mode"]) == ("plain", "dynamic")
    assert dynamic["test.perplexity"] == 91.25
    assert dynamic["test.mode.eta"] == 5e-5
    assert dynamic["parameters.total"] == plain["parameters.total"]


def test_score_of_another_text_is_a_row_of_csv_and_pandas(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small", 0, result("Small", 0))
    (folder / "texts").mkdir()
    evaluation = {"format": 2, "kind": "plain", "other": scored(64.0)}
    (folder / "texts" / "news-txt-0123-plain.json").write_text(json.dumps(evaluation))
    plain, other = result_rows(load_run(folder))
    assert (plain["mode"], other["mode"]) == ("plain", "news-txt-0123-plain")
    assert other["other.perplexity"] == 64.0
    assert "test.perplexity" not in other
    pytest.importorskip("pandas")
    assert to_pandas(RunFolder.open(folder), "results")["other.perplexity"].tolist()[1] == 64.0


def test_unfinished_run_has_a_row_without_scores(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small", 0)
    [row] = result_rows(load_run(folder))
    assert row["finished"] is False
    assert "test.perplexity" not in row
    with pytest.raises(SettingsError, match="is not finished"):
        to_pandas(RunFolder.open(folder), "results")


def test_csv_has_a_column_for_every_field_of_any_row() -> None:
    rows: list[dict[str, Any]] = [{"run": "a", "settings.x": 1}, {"run": 'b "quoted", with a comma', "late": None}]
    lines = list(csv.reader(io.StringIO(to_csv(rows))))
    assert lines == [["run", "late", "settings.x"], ["a", "", "1"], ['b "quoted", with a comma', "", ""]]


def test_record_without_weights_opens_as_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    record = rk.open_run(RECORD)
    results = record.to_pandas()
    assert isinstance(results, pandas.DataFrame)
    expected = json.loads((RECORD / "result.json").read_text())["test"]["perplexity"]
    assert results["test.perplexity"].tolist() == [expected]

    metrics = record.to_pandas("metrics")
    lines = [json.loads(line) for line in (RECORD / "metrics.jsonl").read_text().splitlines()]
    assert metrics["nll"].tolist() == [line["nll"] for line in lines]
    assert metrics["learning_rate"][0] == lines[0]["learning_rate"]
    assert metrics["wall.memory_bytes"][0] == lines[0]["wall"]["memory_bytes"]
    assert set(record.to_pandas("frequency")["position"]) == {"target", "previous"}


def test_model_of_a_record_is_an_error_that_explains_it() -> None:
    record = rk.open_run(RECORD)
    assert str(RECORD) in repr(record)
    uses: list[Callable[[], object]] = [lambda: record.model, lambda: record.vocabulary, record.vectors]
    for use in uses:
        with pytest.raises(
            DataError, match="is the record of a run, without weights; use the folder it was trained in"
        ):
            use()
    with pytest.raises(DataError, match="without weights"):
        rk.open_run(RECORD, task="language_model")


def test_unknown_table_and_missing_pandas_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    record = rk.open_run(RECORD)
    with pytest.raises(SettingsError, match="there is no table 'scores'; the tables of a run are results, metrics"):
        record.to_pandas("scores")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingsError, match=r"pip install 'reefknot\[data\]'"):
        record.to_pandas()
