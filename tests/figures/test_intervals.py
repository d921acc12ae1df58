"""Intervals over seeds against scipy's, and what is said of a difference."""

from __future__ import annotations

import pytest
from scipy import stats

from reefknot.figures.intervals import apart, over_seeds, told, verdict

ONE, OTHER = [0.31, 0.28, 0.35, 0.30], [0.12, 0.18, 0.15]


def test_a_mean_lies_where_students_t_says() -> None:
    found = over_seeds(ONE)
    wanted = stats.ttest_1samp(ONE, 0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
    assert (found.mean, found.runs) == (pytest.approx(0.31), 4)


def test_two_sets_of_runs_differ_as_welch_says() -> None:
    found = apart(ONE, OTHER)
    wanted = stats.ttest_ind(ONE, OTHER, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
    assert found.mean == pytest.approx(0.16)


def test_one_run_has_no_interval_and_decides_nothing() -> None:
    for found in (over_seeds([0.3]), apart([0.3], OTHER)):
        assert (found.low, found.high) == (None, None)
        assert verdict(found.json(), "A beats B").endswith("one run each, so that nothing is decided.")


def test_equal_runs_have_an_interval_of_no_width() -> None:
    assert apart([0.5, 0.5], [0.25, 0.25]).json() == {"mean": 0.25, "low": 0.25, "high": 0.25, "runs": 2}


def test_what_is_said_follows_from_the_interval() -> None:
    assert verdict(apart(ONE, OTHER).json(), "A beats B").startswith("A beats B: seen, 0.160 [")
    assert verdict(apart(OTHER, ONE).json(), "A beats B").startswith("A beats B: the contrary is seen, −0.160 [−")
    assert verdict(over_seeds([0.1, -0.1, 0.05]).json(), "A beats B").startswith("A beats B: not decided, ")
    assert told({"mean": -0.5, "low": None, "high": None}) == "−0.50"
