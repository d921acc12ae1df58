"""Fixtures for the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_results import write_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs")
