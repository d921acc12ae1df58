"""Training skip-gram: passes over a text, metrics, checkpoints, resuming.

A step is a stretch of the text, as long as the words between two lines of metrics. All random numbers belong to places
in the text (`kernels/skip_gram_draws`), so where training stands is its cursor and its tables: with one worker on the
CPU a resumed run is equal to the bit. There is no validation; the last weights are the ones to use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from reefknot.errors import DataError, NonFiniteError, SettingsError, Stopped
from reefknot.kernels.skip_gram import Rates, resolve, train_stretch
from reefknot.kernels.skip_gram_draws import Draws, kept_words, pairs_of
from reefknot.lab.config.settings import Count, NonNegative, Positive, Settings
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.display import Display, Silent, progress_line
from reefknot.lab.training.signals import StopRequest
from reefknot.lab.training.state import Progress, load_weights, weights
from reefknot.lab.training.timetable import Sitting
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.storage.files import write_json

SAMPLE = 2_000
"""Words at the beginning of the text whose pairs the loss is told of, always with the same negatives."""
Metric = dict[str, Any]


class SkipGramTraining(Settings):
    """How long, how fast, on how many threads."""

    epochs: Annotated[Count, Field(description="passes over the training text")] = 5
    learning_rate: Annotated[Positive, Field(description="at the beginning; it falls linearly")] = 0.025
    lowest_rate: Annotated[NonNegative, Field(description="where the rate stops falling")] = 2.5e-6
    workers: Annotated[
        Count, Field(le=1024, description="threads on a CPU; with more than one no two runs are equal")
    ] = 1
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="of every random number")] = 0
    log_every: Annotated[Count, Field(description="words between two lines of metrics")] = 500_000
    save_every: Annotated[Count, Field(description="words between two checkpoints; every epoch ends with one")] = (
        100_000_000
    )
    keep: Annotated[int, Field(ge=1, le=1000, description="checkpoints kept")] = 2

    @model_validator(mode="after")
    def _check_rates(self) -> SkipGramTraining:
        if self.lowest_rate > self.learning_rate:
            raise ValueError(f"lowest_rate = {self.lowest_rate} is above learning_rate = {self.learning_rate}")
        return self

    def rates(self, places: int, epoch: int) -> Rates:
        """Over the places of a text, in one of the epochs."""
        return Rates(self.learning_rate, self.lowest_rate, places * self.epochs, places * (epoch - 1))


class SkipGramTrainer:
    """Trains one model in one run folder, from wherever the folder stands."""

    def __init__(
        self,
        model: SkipGram,
        ids: NDArray[np.int32],
        draws: Draws,
        training: SkipGramTraining,
        run: RunFolder,
        *,
        display: Display | None = None,
        device: torch.device | str = "cpu",
        name: str = "",
        trackers: Sequence[Callable[[Metric], None]] = (),
    ) -> None:
        """`ids` are the training text, `draws` those over it."""
        _check(model, ids, draws)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.ids = ids
        self.training = training
        self.run = run
        self.checkpoints = Checkpoints(run.path, training.keep)
        self.display = display or Silent()
        self.name = name
        self.trackers = trackers
        self.progress = Progress()
        self.draws = draws.to(self.device)

    # -- the whole run ---------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the end. Raises `Stopped` when asked to stop, after saving."""
        self._resume()
        self.run.log(f"skip-gram: {resolve(self.model.input.weight)}")
        progress = self.progress
        self._sitting = Sitting(time.monotonic(), self._done, progress.tokens, progress.seconds)
        with StopRequest() as stop:
            while progress.epoch <= self.training.epochs:
                self._advance(stop)
        return progress

    def _resume(self) -> None:
        found = self.checkpoints.latest(self.display.say)
        if found is not None:
            if found.fingerprint != self.run.config_hash:
                raise DataError(f"{found.path} is a checkpoint of a run with other settings than {self.run.path} has")
            if set(found.values["progress"]) != {each.name for each in fields(Progress)}:
                raise DataError(f"{found.path} was written by another version of Reefknot and cannot be resumed")
            load_weights(self.model, found.model)
            self.progress = Progress(**found.values["progress"])
            if self.checkpoints.path_of(self.progress.step).exists():
                # Killed between a checkpoint's commit and the mark.
                self.checkpoints.mark_best(self.progress.step)
            self.display.say(f"{self.name}  resumed at epoch {self.progress.epoch}, word {self.progress.window:,}")
        self.run.metrics.cut(self.progress.metrics_lines)

    def _advance(self, stop: StopRequest) -> None:
        """One stretch and what follows it."""
        progress, training = self.progress, self.training
        saved = progress.tokens // training.save_every
        self._train_stretch()
        self._log()
        turn = progress.window == len(self.ids)
        if turn:
            progress.epoch, progress.window = progress.epoch + 1, 0
        due = turn or progress.tokens // training.save_every > saved
        asked = bool(stop)
        if due or asked:
            self._save(pause=not due)
        if asked:
            raise Stopped(f"stopped at step {progress.step:,} and saved; the same command resumes")

    def _train_stretch(self) -> None:
        progress, training = self.progress, self.training
        started = time.monotonic()
        start = progress.window
        stop = min((start // training.log_every + 1) * training.log_every, len(self.ids))
        tables = self.model.input.weight, self.model.output.weight
        rates = self._rates
        train_stretch(*tables, self.ids, start, stop, self.draws, progress.epoch, rates, workers=training.workers)
        progress.step += 1
        progress.window = stop
        progress.tokens += stop - start
        # A sum meets every number once, and waits for the device.
        if not all(bool(table.detach().sum().isfinite()) for table in tables):
            self._stop_nonfinite(start)
        progress.seconds += time.monotonic() - started

    def _stop_nonfinite(self, start: int) -> None:
        """Write down where it was, and leave. The last checkpoint is finite."""
        progress = self.progress
        record = {"step": progress.step, "window": start, "epoch": progress.epoch, "seed": self.training.seed}
        path = self.run.path / "nonfinite.json"
        write_json(path, record)
        raise NonFiniteError(
            f"step {progress.step:,} has made a weight that is not a number; it was not saved. The last checkpoint is "
            f"kept and {path} names the stretch. Try a smaller training.learning_rate, in another --out"
        )

    @property
    def _rates(self) -> Rates:
        """Of the epoch that training is in."""
        return self.training.rates(len(self.ids), self.progress.epoch)

    @property
    def _done(self) -> float:
        """The share of training that is done."""
        return self.progress.tokens / (len(self.ids) * self.training.epochs)

    # -- what is written -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss of a pair at the beginning of the text; the pairs and negatives are the same every time."""
        key = self.draws.key(epoch=0)
        pairs = pairs_of(self.draws, key, kept_words(self.draws, key, self.ids, 0, min(SAMPLE, len(self.ids))))
        return float(self.model.loss(*pairs[:3])) / max(1, len(pairs.centres))

    def _log(self) -> None:
        progress, training = self.progress, self.training
        loss, rate = self.loss(), self._rates.at(progress.window)
        speed = self._sitting.speed(progress)
        line: Metric = {"kind": "train", "step": progress.step, "epoch": progress.epoch, "loss": loss}
        line |= {"tokens": progress.tokens, "learning_rate": rate}
        line["wall"] = {"seconds": progress.seconds, "tokens_per_second": speed}
        self.run.metrics.append(line)
        for track in self.trackers:
            track(line)
        facts = [f"epoch {progress.epoch:,}/{training.epochs:,}", f"loss {loss:.3f}", f"{speed:,.0f} tokens/s"]
        self.display.update(progress_line(self.name, facts, self._done, self._sitting.left(self._done)))

    def _save(self, pause: bool) -> None:
        """Commit where training stands; a `pause` is no part of the timetable."""
        progress = self.progress
        progress.metrics_lines = self.run.metrics.lines
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak_memory_bytes(self.device))
        self.run.metrics.sync()
        fingerprint = self.run.config_hash
        values = {"progress": asdict(progress)}
        self.checkpoints.save(progress.step, weights(self.model), {}, values, fingerprint=fingerprint, pause=pause)
        if not pause:
            self.checkpoints.mark_best(progress.step)


def _check(model: SkipGram, ids: NDArray[np.int32], draws: Draws) -> None:
    words = model.input.vocab_size
    if len(draws.keep) != words:
        raise SettingsError(f"skip-gram: draws over {len(draws.keep):,} words for a model of {words:,}")
    if not len(ids):
        raise DataError("skip-gram: the training text is empty; use a longer one")
    if ids.min() < 0 or ids.max() >= words:
        raise DataError(f"skip-gram: the text has ids outside the vocabulary, 0 to {words - 1:,}; encode it anew")
