"""The notebooks of the documentation run without errors, and become pages with their plots."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pages import ROOT

nbclient = pytest.importorskip("nbclient", reason="the extra docs is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra docs is not installed")
pytest.importorskip("ipykernel", reason="the extra docs is not installed")

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def script_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "script"))
    monkeypatch.syspath_prepend(str(Path(sys.modules["reefknot"].__file__ or "").parents[1]))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_its_plots(path: Path, tmp_path: Path) -> None:
    from documentation.notebooks import convert, execute

    notebook = execute(path, tmp_path)
    page, plots = convert(notebook, path.stem)
    assert plots
    for name, content in plots.items():
        assert f"]({name})" in page
        assert content.startswith(b"\x89PNG")
    assert str(tmp_path) not in page


@pytest.mark.parametrize("source", ["1 / 0", "%%sh\nreefknot compare nothing"])
def test_cell_that_fails_is_an_error(source: str, tmp_path: Path) -> None:
    from documentation.notebooks import execute

    path = tmp_path / "failing.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(path, tmp_path)
