"""Decide when training logs, validates, saves and ends, from the settings and the progress so far.

The training loop calls `Timetable.due_actions` after every update:

    due = timetable.due_actions(progress)
    if due.validation:
        validate()

A window is the part of the text that one update reads, so an epoch ends after its last window. `SessionClock` estimates
the remaining time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from reefknot.lab.text.batches import Batches
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress


@dataclass(frozen=True)
class DueActions:
    """What the training loop does after an update."""

    epoch_ends: bool
    """Whether this was the last update of an epoch."""
    training_ends: bool
    """Whether this was the last update of the run."""
    log: bool
    """Whether a line of metrics is written."""
    validation: bool
    """Whether the model is validated."""
    checkpoint: bool
    """Whether a checkpoint is saved."""


class Timetable:
    """The timetable of a run, in epochs or updates.

    The methods get the progress of the run. `batches` must be set to the same epoch.
    """

    def __init__(self, settings: TrainingSettings, batches: Batches) -> None:
        self.settings = settings
        self.batches = batches
        # The limit that is not set never ends training.
        self._max_epochs = settings.epochs or math.inf
        self._max_updates = settings.updates or math.inf

    def is_finished(self, progress: Progress) -> bool:
        """Return whether training is complete or has been stopped early."""
        return bool(progress.stopped) or progress.step >= self._max_updates or progress.epoch > self._max_epochs

    def due_actions(self, progress: Progress) -> DueActions:
        """Return what is due after the latest update."""
        step = progress.step
        settings = self.settings
        epoch_ends = progress.window == self.batches.num_windows
        training_ends = step >= self._max_updates or (epoch_ends and progress.epoch >= self._max_epochs)
        if training_ends:
            validation = True
        elif settings.validate_every is None:
            validation = epoch_ends
        else:
            validation = step % settings.validate_every == 0
        log = epoch_ends or validation or step % settings.log_every == 0
        checkpoint = validation or step % settings.save_every == 0
        return DueActions(
            epoch_ends=epoch_ends,
            training_ends=training_ends,
            log=log,
            validation=validation,
            checkpoint=checkpoint,
        )

    def epochs_done(self, progress: Progress) -> float:
        """Return the number of passes over the text so far, including the finished part of the current pass."""
        # At the end of an epoch the number is an integer, as metrics show it.
        if progress.window == self.batches.num_windows:
            return progress.epoch
        return progress.epoch - 1 + progress.window / self.batches.num_windows

    def fraction_done(self, progress: Progress) -> float:
        """Return the fraction of training that is done."""
        fraction_of_updates = progress.step / self._max_updates
        fraction_of_epochs = self.epochs_done(progress) / self._max_epochs
        return max(fraction_of_updates, fraction_of_epochs)

    def format_position(self, progress: Progress) -> str:
        """Return the current position, such as `epoch 3` or `update 4,000`."""
        if self.settings.updates is None:
            return f"epoch {progress.epoch:,}"
        return f"update {progress.step:,}"

    def format_position_of_total(self, progress: Progress) -> str:
        """Return the current position and the total, such as `epoch 3/40` or `update 4,000/286,000`."""
        total = self.settings.updates or self.settings.epochs
        return f"{self.format_position(progress)}/{total:,}"


@dataclass(frozen=True)
class SessionClock:
    """Computes the speed and the remaining time of a session, the part of a run that this process trains."""

    started_at: float
    """Time of the monotonic clock at the start of the session."""
    fraction_before: float
    """Fraction of training that was done before the session."""
    tokens_before: int
    """Number of targets read before the session."""
    seconds_before: float
    """Time spent training before the session."""

    def speed(self, progress: Progress) -> float:
        """Return targets per second in this session. Earlier sessions may have used another GPU."""
        session_tokens = progress.tokens - self.tokens_before
        session_seconds = progress.seconds - self.seconds_before
        return session_tokens / session_seconds

    def seconds_left(self, fraction_done: float) -> float:
        """Return the remaining seconds at the pace of this session, including validations and checkpoints."""
        elapsed_seconds = time.monotonic() - self.started_at
        session_fraction = fraction_done - self.fraction_before
        return elapsed_seconds * (1 - fraction_done) / session_fraction
