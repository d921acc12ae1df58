"""Every encoder trains and resumes bit for bit, with all kinds of dropout enabled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import Stopped
from reefknot.lab.config.parts import ENCODERS
from tiny import DROPOUT_SETTINGS, encoder

RANDOM = "training.random_steps={probability = 0.7, deviation = 2.0, least = 3}"
AVERAGED = 'training.averaging={start = "at_once"}'


def test_all_encoders_are_tested() -> None:
    """The encoders of translators are trained in `test_translation_runs.py`."""
    assert set(DROPOUT_SETTINGS) == {kind for kind in ENCODERS if not ENCODERS.load(kind).reads_source}


@pytest.mark.parametrize("kind", DROPOUT_SETTINGS)
def test_run_stopped_in_mid_epoch_resumes_bit_for_bit(
    tmp_path: Path,
    train: Any,
    outcome: Callable[[Path], dict[str, Any]],
    signal_in_step: Callable[[int], None],
    kind: str,
) -> None:
    changes = (encoder(kind), RANDOM, AVERAGED)
    train(tmp_path / "unbroken", *changes)
    signal_in_step(4)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", *changes)
    train(tmp_path / "stopped", *changes)
    unbroken, stopped = outcome(tmp_path / "unbroken"), outcome(tmp_path / "stopped")
    assert stopped["metrics"] == unbroken["metrics"]
    assert all(stopped["weights"][step] == digest for step, digest in unbroken["weights"].items())
