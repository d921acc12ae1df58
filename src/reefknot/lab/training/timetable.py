"""When training tells, validates, saves and ends: it follows from the settings and from where training stands."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from reefknot.lab.text.batches import Batches
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress


@dataclass(frozen=True)
class Due:
    """What follows an update."""

    turn: bool
    """A new epoch."""
    end: bool
    """Nothing: it is the last one that the settings ask for."""
    line: bool
    """A line of metrics."""
    validation: bool
    checkpoint: bool


@dataclass(frozen=True)
class Sitting:
    """Where this process took training up."""

    began: float
    done: float
    """The share of training that was done by then."""
    tokens: int
    seconds: float
    """What training had come to by then, in earlier sittings."""

    def speed(self, progress: Progress) -> float:
        """Targets a second since then: an earlier sitting may have had another machine."""
        return (progress.tokens - self.tokens) / (progress.seconds - self.seconds)

    def left(self, done: float) -> float:
        """Seconds until all is done, if it goes on as since then, with validating and saving."""
        return (time.monotonic() - self.began) * (1 - done) / (done - self.done)


class Timetable:
    """Epochs or updates, whichever the settings count in. `batches` must be in the epoch that is asked about."""

    def __init__(self, settings: TrainingSettings, batches: Batches) -> None:
        self.settings = settings
        self.batches = batches
        # The one that is not set never ends training.
        self._epochs, self._updates = settings.epochs or math.inf, settings.updates or math.inf

    def finished(self, progress: Progress) -> bool:
        return bool(progress.stopped) or progress.step >= self._updates or progress.epoch > self._epochs

    def due(self, progress: Progress) -> Due:
        """What follows the update that was made last."""
        step, settings = progress.step, self.settings
        turn = progress.window == self.batches.windows
        end = step >= self._updates or (turn and progress.epoch >= self._epochs)
        validation = end or (turn if settings.validate_every is None else step % settings.validate_every == 0)
        return Due(
            turn=turn,
            end=end,
            line=turn or validation or step % settings.log_every == 0,
            validation=validation,
            checkpoint=validation or step % settings.save_every == 0,
        )

    def passes(self, progress: Progress) -> float:
        """Over the text, so far."""
        whole = progress.window == self.batches.windows
        return progress.epoch if whole else progress.epoch - 1 + progress.window / self.batches.windows

    def done(self, progress: Progress) -> float:
        """The share of training that is done."""
        return max(progress.step / self._updates, self.passes(progress) / self._epochs)

    def place(self, progress: Progress) -> str:
        """`epoch 3` or `update 4,000`."""
        return f"epoch {progress.epoch:,}" if self.settings.updates is None else f"update {progress.step:,}"

    def place_of_all(self, progress: Progress) -> str:
        """`epoch 3/40` or `update 4,000/286,000`."""
        return f"{self.place(progress)}/{self.settings.updates or self.settings.epochs:,}"
