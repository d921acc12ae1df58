"""Decide when training logs, validates, saves and ends, from the settings and the progress so far."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from reefknot.lab.text.batches import Batches
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress


@dataclass(frozen=True)
class DueActions:
    """What is due after an update."""

    epoch_ends: bool
    end: bool
    """Whether this was the last update of the run."""
    log: bool
    """Whether a line of metrics is written."""
    validation: bool
    checkpoint: bool


@dataclass(frozen=True)
class SessionClock:
    """Computes the speed and the remaining time of a session, the part of a run that this process trains."""

    started: float
    """Time of the monotonic clock at the start of the session."""
    done: float
    """Fraction of training that was done before the session."""
    tokens: int
    """Number of targets read before the session."""
    seconds: float
    """Time spent training before the session."""

    def speed(self, progress: Progress) -> float:
        """Return targets per second in this session. Earlier sessions may have used another GPU."""
        return (progress.tokens - self.tokens) / (progress.seconds - self.seconds)

    def seconds_left(self, done: float) -> float:
        """Return the remaining seconds at the pace of this session, including validations and checkpoints."""
        return (time.monotonic() - self.started) * (1 - done) / (done - self.done)


class Timetable:
    """The timetable of a run, in epochs or updates. `batches` must be set to the epoch of `progress`."""

    def __init__(self, settings: TrainingSettings, batches: Batches) -> None:
        self.settings = settings
        self.batches = batches
        # The limit that is not set never ends training.
        self._epochs, self._updates = settings.epochs or math.inf, settings.updates or math.inf

    def finished(self, progress: Progress) -> bool:
        """Return whether training is complete or has been stopped early."""
        return bool(progress.stopped) or progress.step >= self._updates or progress.epoch > self._epochs

    def due(self, progress: Progress) -> DueActions:
        """Return what is due after the latest update."""
        step, settings = progress.step, self.settings
        epoch_ends = progress.window == self.batches.num_windows
        end = step >= self._updates or (epoch_ends and progress.epoch >= self._epochs)
        validation = end or (epoch_ends if settings.validate_every is None else step % settings.validate_every == 0)
        return DueActions(
            epoch_ends=epoch_ends,
            end=end,
            log=epoch_ends or validation or step % settings.log_every == 0,
            validation=validation,
            checkpoint=validation or step % settings.save_every == 0,
        )

    def epochs_done(self, progress: Progress) -> float:
        """Return the number of passes over the text so far, including the finished part of the current pass."""
        whole = progress.window == self.batches.num_windows
        return progress.epoch if whole else progress.epoch - 1 + progress.window / self.batches.num_windows

    def done(self, progress: Progress) -> float:
        """Return the fraction of training that is done."""
        return max(progress.step / self._updates, self.epochs_done(progress) / self._epochs)

    def position(self, progress: Progress) -> str:
        """Return the current position, such as `epoch 3` or `update 4,000`."""
        return f"epoch {progress.epoch:,}" if self.settings.updates is None else f"update {progress.step:,}"

    def position_of_total(self, progress: Progress) -> str:
        """Return the current position and the total, such as `epoch 3/40` or `update 4,000/286,000`."""
        return f"{self.position(progress)}/{self.settings.updates or self.settings.epochs:,}"
