"""The training loop of skip-gram models (word2vec): epochs over a text, metrics, checkpoints and resuming.

    trainer = SkipGramTrainer(model, ids, sampler, training, run)
    progress = trainer.train()

Start reading at `SkipGramTrainer.train`. `SkipGramTraining` is the `[training]` section of a recipe. A step trains on a
stretch of the text (a range of words), which ends where the next line of metrics is due. There is no validation, so the
last weights are the best weights.

All random numbers, such as the size of the skip-gram window around a word, are functions of the position in the text
(`kernels/skip_gram_draws.py`). So the state of training consists of the position and the two tables (the word vectors
of the input and of the output). With one worker on a CPU, a resumed run is bit-identical.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from reefknot.errors import DataError, NonFiniteError, SettingsError, Stopped
from reefknot.kernels.skip_gram import RateSchedule, resolve_impl, train_range
from reefknot.kernels.skip_gram_draws import PairSampler, build_pairs, find_kept_words
from reefknot.lab.config.settings import Count, NonNegative, Positive, Settings
from reefknot.lab.runs.checkpoints import Checkpoint, Checkpoints
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.display import Display, SilentDisplay, format_progress
from reefknot.lab.training.signals import StopRequest
from reefknot.lab.training.state import Progress, load_weights, named_weights
from reefknot.lab.training.timetable import SessionClock
from reefknot.lab.training.trackers import MetricsDict
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.storage.files import write_json

LOSS_SAMPLE = 2_000
"""Number of words at the beginning of the text whose loss is logged. Their negative samples are always the same."""


class SkipGramTraining(Settings):
    """Length, learning rate and parallelism of skip-gram training."""

    epochs: Annotated[Count, Field(description="Number of passes over the training text.")] = 5
    learning_rate: Annotated[Positive, Field(description="Initial learning rate. It decreases linearly.")] = 0.025
    lowest_rate: Annotated[NonNegative, Field(description="Minimum learning rate.")] = 2.5e-6
    workers: Annotated[
        Count, Field(le=1024, description="Number of threads on a CPU. With more than one, runs are not reproducible.")
    ] = 1
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="Seed of all random numbers.")] = 0
    log_every: Annotated[Count, Field(description="Number of words between two lines of metrics.")] = 500_000
    save_every: Annotated[
        Count, Field(description="Number of words between two checkpoints. Every epoch also ends with a checkpoint.")
    ] = 100_000_000
    keep: Annotated[int, Field(ge=1, le=1000, description="Number of recent checkpoints to keep.")] = 2

    @model_validator(mode="after")
    def _check_rates(self) -> SkipGramTraining:
        if self.lowest_rate > self.learning_rate:
            raise ValueError(
                f"lowest_rate = {self.lowest_rate} is above learning_rate = {self.learning_rate}; lower lowest_rate or "
                "raise learning_rate"
            )
        return self

    def rates(self, num_words: int, epoch: int) -> RateSchedule:
        """Return the learning rates in an epoch, counted from 1, over a text of `num_words` words."""
        total_words = num_words * self.epochs
        words_before = num_words * (epoch - 1)
        return RateSchedule(self.learning_rate, self.lowest_rate, total_words, words_before)


class SkipGramTrainer:
    """Trains a model in a run folder, and resumes from the latest checkpoint of the folder if there is one."""

    def __init__(
        self,
        model: SkipGram,
        ids: NDArray[np.int32],
        sampler: PairSampler,
        training: SkipGramTraining,
        run: RunFolder,
        *,
        display: Display | None = None,
        device: torch.device | str = "cpu",
        name: str = "",
        trackers: Sequence[Callable[[MetricsDict], None]] = (),
    ) -> None:
        """Create a trainer.

        Args:
            model: The model to train. It is moved to `device`.
            ids: The training text, as word ids.
            sampler: Draws the random numbers of training: subsampling, skip-gram windows and negative samples.
            training: The training settings.
            run: The run folder.
            display: Where progress is shown. By default, nowhere.
            device: Device to train on.
            name: Name of the run, which starts every line on the display.
            trackers: Functions that are called with every line of metrics.
        """
        _check_inputs(model, ids, sampler)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.ids = ids
        self.training = training
        self.run = run
        self.checkpoints = Checkpoints(run.path, training.keep)
        self.display = display or SilentDisplay()
        self.name = name
        self.trackers = trackers
        self.progress = Progress()
        self.sampler = sampler.to(self.device)

    # -- the run ---------------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the end. After a signal, save and raise `Stopped`."""
        self._resume()
        self.run.log(f"skip-gram: {resolve_impl(self.model.input.weight)}")
        progress = self.progress
        self._clock = SessionClock(
            started_at=time.monotonic(),
            fraction_before=self._fraction_done,
            tokens_before=progress.tokens,
            seconds_before=progress.seconds,
        )
        with StopRequest() as stop:
            while progress.epoch <= self.training.epochs:
                self._advance(stop)
        return progress

    def _resume(self) -> None:
        """Restore the latest checkpoint, if there is one, and remove lines of metrics that were written after it."""
        checkpoint = self.checkpoints.load_latest(self.display.print)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.run.metrics.truncate(self.progress.metrics_lines)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore the weights and the progress from a checkpoint of the same run."""
        self.run.check_checkpoint(checkpoint)
        progress = Progress.from_values(checkpoint.state_values["progress"], str(checkpoint.path))
        load_weights(self.model, checkpoint.weights)
        self.progress = progress
        if self.checkpoints.step_path(self.progress.step).exists():
            # The last session may have been killed between saving this checkpoint and marking it as the best.
            self.checkpoints.mark_best(self.progress.step)
        self.display.print(f"{self.name}  resumed at epoch {self.progress.epoch}, word {self.progress.window:,}")

    def _advance(self, stop: StopRequest) -> None:
        """Train up to the next line of metrics, and log.

        Save if a checkpoint is due, and save and stop if a stop was requested.
        """
        progress = self.progress
        save_every = self.training.save_every
        num_due_before = progress.tokens // save_every  # number of checkpoints that were due before this stretch
        self._train_stretch()
        self._log()

        epoch_ends = progress.window == len(self.ids)
        if epoch_ends:
            progress.epoch += 1
            progress.window = 0

        checkpoint_due = epoch_ends or progress.tokens // save_every > num_due_before
        stop_requested = bool(stop)
        if checkpoint_due or stop_requested:
            self._save(pause=not checkpoint_due)
        if stop_requested:
            raise Stopped(f"stopped at step {progress.step:,} and saved; the same command resumes")

    def _train_stretch(self) -> None:
        """Train on the words up to the next line of metrics, or to the end of the text."""
        progress = self.progress
        log_every = self.training.log_every
        started_at = time.monotonic()

        # `window` is the position of the next word in the text.
        first_word = progress.window
        next_log = (first_word // log_every + 1) * log_every
        end_word = min(next_log, len(self.ids))
        input_weight = self.model.input.weight
        output_weight = self.model.output.weight
        train_range(
            input_weight,
            output_weight,
            ids=self.ids,
            start=first_word,
            stop=end_word,
            sampler=self.sampler,
            epoch=progress.epoch,
            rates=self._rates,
            workers=self.training.workers,
        )
        progress.step += 1
        progress.window = end_word
        progress.tokens += end_word - first_word

        # The sum is finite only if all weights are. Reading it waits for the device.
        for weight in (input_weight, output_weight):
            if not weight.detach().sum().isfinite():
                self._stop_nonfinite(first_word)
        progress.seconds += time.monotonic() - started_at

    def _stop_nonfinite(self, first_word: int) -> NoReturn:
        """Write the position of a stretch to a file and raise an error. The last checkpoint is finite."""
        progress = self.progress
        record = {"step": progress.step, "window": first_word, "epoch": progress.epoch, "seed": self.training.seed}
        path = self.run.path / "nonfinite.json"
        write_json(path, record)
        raise NonFiniteError(
            f"a weight is NaN or infinite after step {progress.step:,}, so this step was not saved. "
            f"{self.checkpoints.describe_kept()}, and {path} records the position in the text. Try a smaller "
            "training.learning_rate, with another --out folder"
        )

    @property
    def _rates(self) -> RateSchedule:
        """Learning rates in the current epoch."""
        return self.training.rates(len(self.ids), self.progress.epoch)

    @property
    def _fraction_done(self) -> float:
        """Fraction of training that is done."""
        return self.progress.tokens / (len(self.ids) * self.training.epochs)

    # -- metrics and checkpoints -----------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss per pair at the beginning of the text, always for the same pairs and negatives."""
        key = self.sampler.key(epoch=0)
        end_word = min(LOSS_SAMPLE, len(self.ids))
        words = find_kept_words(self.sampler, key, self.ids, 0, end_word)
        pairs = build_pairs(self.sampler, key, words)
        summed_loss = float(self.model.loss(*pairs[:3]))
        return summed_loss / max(1, len(pairs.centres))

    def _log(self) -> None:
        """Write a line of metrics and update the display."""
        progress = self.progress
        loss = self.loss()
        tokens_per_second = self._clock.speed(progress)
        line: MetricsDict = {
            "kind": "train",
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "tokens": progress.tokens,
            "learning_rate": self._rates.rate_at(progress.window),
            "wall": {"seconds": progress.seconds, "tokens_per_second": tokens_per_second},
        }
        self.run.metrics.append(line)
        for track in self.trackers:
            track(line)

        details = [
            f"epoch {progress.epoch:,}/{self.training.epochs:,}",
            f"loss {loss:.3f}",
            f"{tokens_per_second:,.0f} tokens/s",
        ]
        seconds_left = self._clock.seconds_left(self._fraction_done)
        self.display.update(format_progress(self.name, details, self._fraction_done, seconds_left))

    def _save(self, pause: bool) -> None:
        """Save a checkpoint. `pause` marks a checkpoint that is saved only because of a stop request."""
        progress = self.progress
        progress.metrics_lines = self.run.metrics.lines
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak_memory_bytes(self.device))
        self.run.metrics.sync()
        self.checkpoints.save(
            step=progress.step,
            weights=named_weights(self.model),
            state_tensors={},
            state_values={"progress": asdict(progress)},
            fingerprint=self.run.config_hash,
            pause=pause,
        )
        if not pause:
            self.checkpoints.mark_best(progress.step)


def _check_inputs(model: SkipGram, ids: NDArray[np.int32], sampler: PairSampler) -> None:
    """Raise an error if the text or the sampler does not fit the vocabulary of the model."""
    vocab_size = model.input.vocab_size
    sampler_size = len(sampler.keep)
    if sampler_size != vocab_size:
        raise SettingsError(
            f"skip-gram: the draws are for a vocabulary of {sampler_size:,} words, but the model has {vocab_size:,}"
        )
    if not len(ids):
        raise DataError("skip-gram: the training text is empty; use a longer text")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(f"skip-gram: the text has ids outside the vocabulary, 0 to {vocab_size - 1:,}; encode it again")
