"""The time that is left: training, and what comes with every epoch."""

from __future__ import annotations

import time

import pytest

from reefknot.training.loop import Sitting
from reefknot.training.state import Progress


def test_validating_and_saving_count_once_an_epoch_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1100.0)
    sitting = Sitting(began=1000.0, seconds=10.0, epoch=3)
    # 100 seconds went by, 30 of them in updates; two epochs have ended.
    assert sitting.besides(Progress(epoch=5, seconds=40.0)) == 35.0
    assert sitting.besides(Progress(epoch=3, seconds=40.0)) == 0.0
