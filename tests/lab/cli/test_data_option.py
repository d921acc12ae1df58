"""`--data DIR` is an error if nothing is read from the folder, and reaches only the runs that read from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.cli.options import check_data, check_training_data, data_folder_for
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.text.corpus import CorpusSettings

from .conftest import Outcome

DATA = Path("corpora")


def test_data_option_is_rejected_if_no_corpus_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    docs, ptb, mine, missing = (CorpusSettings(name=name) for name in ("python-docs", "ptb", "mine", "~nobody/x"))
    check_data(None, [docs], "demo")
    check_data(DATA, [docs, ptb], "a recipe")
    check_data(DATA, [docs, missing], "a recipe")
    with pytest.raises(SettingsError, match="--data has no effect: demo reads python-docs, mine, not a data folder"):
        check_data(DATA, [docs, mine, mine], "demo")


@pytest.mark.parametrize(
    ("overrides", "is_read"),
    [([], False), (["corpus.name=ptb"], True), (["evaluation.similarity=true"], True)],
    ids=["python-docs", "ptb", "similarity benchmarks"],
)
def test_training_reads_downloaded_corpora_and_similarity_benchmarks(overrides: list[str], is_read: bool) -> None:
    experiment = load_recipe("demo", overrides, "tied").experiments["tied"]
    assert data_folder_for(experiment, DATA) == (DATA if is_read else None)
    if is_read:
        check_training_data(DATA, [experiment], "demo")
    else:
        with pytest.raises(SettingsError, match="--data has no effect"):
            check_training_data(DATA, [experiment], "demo")


def test_table_passes_data_only_to_rows_that_read_it(
    cli: Callable[..., Outcome], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", lambda jobs, max_parallel: planned.extend(jobs))
    mixed = tmp_path / "mixed.toml"
    judged = '[[rows]]\nname = "judged"\nset.evaluation.similarity = true\n'
    mixed.write_text(recipe.read_text("utf-8") + judged, encoding="utf-8")
    outcome = cli("table", mixed, "--out", tmp_path / "runs", "--data", tmp_path)
    assert outcome.code == 0, outcome.err
    assert {job.row: job.data for job in planned} == {"tied": None, "untied": None, "judged": tmp_path}


def test_sweep_passes_data_only_to_combinations_that_read_it(
    cli: Callable[..., Outcome], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", lambda jobs, max_parallel: planned.extend(jobs))
    setting = "evaluation.similarity=true,false"
    outcome = cli("sweep", recipe, setting, "--row", "tied", "--out", tmp_path / "runs", "--data", tmp_path)
    assert outcome.code == 0, outcome.err
    assert [job.data for job in planned] == [tmp_path, None]
