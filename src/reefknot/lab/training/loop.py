"""The training loop of language models and translators: updates, metrics, validations and checkpoints.

    trainer = Trainer(model, batches, validate, settings, run)
    progress = trainer.train()

Start reading at `Trainer.train`. It resumes from the latest checkpoint, and then calls `_advance` once per update until
training ends. `_step` makes the update (`update.py`), and `Timetable` (`timetable.py`) decides whether to log, validate
or save afterwards.

A window is the part of the training text that one update reads. Everything that determines the next step is in
`TrainState`, which checkpoints save; everything else is rebuilt from the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from reefknot.errors import NonFiniteError, SettingsError, Stopped
from reefknot.kernels.choice import current_choice, resolve_impl
from reefknot.lab.config.parts import OPTIMISERS, SCHEDULES
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.runs.definition import describe_unknown_share, format_perplexity, perplexity
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.batches import Batches
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.display import Display, SilentDisplay, format_progress
from reefknot.lab.training.distributed import World
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.signals import StopRequest
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.throughput import Throughput
from reefknot.lab.training.timetable import DueActions, SessionClock, Timetable
from reefknot.lab.training.trackers import MetricsDict
from reefknot.lab.training.update import AUTOCAST_DTYPES, MAX_OVERFLOWS, Updater, carries_state
from reefknot.nn.encoders.contract import State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.files import write_json


class Trainer:
    """Trains a model in a run folder, and resumes from the latest checkpoint of the folder if there is one."""

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        validate: Callable[[], float],
        settings: TrainingSettings,
        run: RunFolder,
        *,
        world: World | None = None,
        display: Display | None = None,
        name: str = "",
        subwords: bool = False,
        unknown_share: float | None = None,
        trackers: Sequence[Callable[[MetricsDict], None]] = (),
    ) -> None:
        """Create a trainer.

        Args:
            model: The model to train. It is moved to the device of `world`.
            batches: This process's share of the training text, cut into windows.
            validate: Function that returns the mean loss per token on the validation text.
            settings: The training settings.
            run: The run folder.
            world: The processes that train together. By default, this process trains alone.
            display: Where progress is shown. By default, nowhere.
            name: Name of the run, which starts every line on the display.
            subwords: Whether tokens are sub-words. Perplexities are then displayed as perplexities per sub-word.
            unknown_share: Share of unknown words in the validation text, displayed next to its perplexity.
            trackers: Functions that are called with every line of metrics.
        """
        if settings.batching == "streams" and batches.batch_size % settings.accumulate:
            raise SettingsError(
                f"training.accumulate = {settings.accumulate} does not divide the {batches.batch_size} streams of a "
                "process; use a value that does, or another number of processes"
            )
        self.settings = settings
        self.world = world or World()
        self.run = run
        self.checkpoints = Checkpoints(run.path, settings.keep)
        self.display = display or SilentDisplay()
        self.name = name
        self._unit_suffix = " per sub-word" if subwords else ""
        self._unknown_suffix = "" if unknown_share is None else f", {describe_unknown_share(unknown_share)}"
        self.trackers = trackers
        self.batches = batches
        self.timetable = Timetable(settings, batches)
        self.validate = validate

        self.model = model.to(self.world.device)
        self.schedule = SCHEDULES.build(settings.schedule, {})
        parallel = self.world.wrap_model(self.model, settings.shard)
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel.trainable_parameters})
        # Read it from the settings, because on a GPU the optimiser rounds its rate to float32.
        self.initial_learning_rate = float(settings.optimiser.model_dump()["learning_rate"])
        averages = WeightAverages.create_at_start(parallel.parameters, settings.averaging)
        self.state = TrainState(
            parallel=parallel,
            optimiser=optimiser,
            hidden=self._initial_state(),
            progress=Progress(averaged_from=0 if averages is None else 1),
            averages=averages,
            scaler=parallel.build_scaler(settings.precision == "float16"),
        )

    def _initial_state(self) -> State:
        """Return the hidden state before the first window of an epoch; empty if the state is not carried over."""
        if not carries_state(self.model, self.settings):
            return {}
        return self.model.initial_state(self.batches.batch_size)

    # -- the run ---------------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the end, or until the stopping rule applies. After a signal, save and raise `Stopped`."""
        self._resume()
        progress = self.state.progress

        # Create everything that depends on the restored state.
        self.updater = Updater(self.model, self.state, self.world, self.settings)
        dtype = AUTOCAST_DTYPES[self.settings.precision]
        if self.world.is_first:
            # The output end is the classifier with its loss.
            kernels = resolve_impl(current_choice(), self.world.device, dtype)
            self.run.log(f"kernels of the output end: {kernels}")
            self._report_compilation()
        self.throughput = Throughput(self.model, self.world, dtype)
        self.batches.set_epoch(progress.epoch)
        self._clock = SessionClock(
            started_at=time.monotonic(),
            fraction_before=self.timetable.fraction_done(progress),
            tokens_before=progress.tokens,
            seconds_before=progress.seconds,
        )

        if self.settings.start is not None and progress.best_nll is None:
            self._score_initial_weights()
        self.model.train()
        with StopRequest() as stop:
            while not self.timetable.is_finished(progress):
                self._advance(stop)
        return progress

    def _report_compilation(self) -> None:
        """Log whether the blocks of the encoder are compiled. A setting without effect is also displayed."""
        compiled_blocks = self.updater.compiled_blocks
        if not compiled_blocks.message:
            return
        self.run.log(compiled_blocks.message)
        if self.settings.compile and compiled_blocks.seconds is None:
            self.display.print(f"training.compile has no effect: {compiled_blocks.message}")

    def _resume(self) -> None:
        """Restore the latest checkpoint, if there is one."""
        checkpoint = self.checkpoints.load_latest(self.display.print)
        if checkpoint is None:
            self._truncate_metrics()
            return
        self.run.check_checkpoint(checkpoint)
        self.state.restore(
            weights=checkpoint.weights,
            tensors=checkpoint.state_tensors,
            values=checkpoint.state_values,
            world=self.world,
            seed=self.settings.seed,
        )
        self._truncate_metrics()

        progress = self.state.progress
        best_exists = progress.best_nll is not None and self.checkpoints.step_path(progress.best_step).exists()
        if self.world.is_first and best_exists:
            # The last session may have been killed between saving this checkpoint and marking it as the best.
            self.checkpoints.mark_best(progress.best_step)

        if self.timetable.is_finished(progress):
            position = "the end of training"
        else:
            position = f"epoch {progress.epoch}"
        self.display.print(f"{self.name}  resumed at step {progress.step:,}, {position}")

    def _truncate_metrics(self) -> None:
        """Remove lines of metrics that were written after the checkpoint."""
        if self.world.is_first:
            self.run.metrics.truncate(self.state.progress.metrics_lines)

    def _advance(self, stop: StopRequest) -> None:
        """Make one update. Then log, validate, save and stop, each only if it is due."""
        progress = self.state.progress
        stop_requested, due = self._step(stop)
        if due.log:
            self._log_training()
        is_best = due.validation and self._validate(due)
        if due.epoch_ends:
            progress.epoch += 1
            progress.window = 0
            self.state.hidden = self._initial_state()
            self.batches.set_epoch(progress.epoch)
        if due.checkpoint or stop_requested:
            self._save(pause=not due.checkpoint)
        if is_best and self.world.is_first:
            self.checkpoints.mark_best(progress.step)
        # A signal may have arrived during the validation.
        if stop_requested or (due.validation and self._stop_requested(stop)):
            raise Stopped(f"stopped at step {progress.step:,} and saved; the same command resumes")

    def _score_initial_weights(self) -> None:
        """Validate and save the weights that training starts from, which another row (experiment) has trained.

        They count as the best so far, so that the run never ends with worse weights.
        """
        nll, _ = self._score(epoch=0)
        valid_perplexity = format_perplexity(perplexity(nll))
        self.display.print(
            f"{self.name}  starts at valid perplexity {valid_perplexity}{self._unit_suffix}{self._unknown_suffix}"
        )
        self._save()
        if self.world.is_first:
            self.checkpoints.mark_best(self.state.progress.step)

    def _score(self, epoch: float) -> tuple[float, bool]:
        """Validate, and write a line of metrics.

        Args:
            epoch: Number of passes over the training text so far.

        Returns:
            The mean validation loss, and whether it is the best so far.
        """
        progress = self.state.progress
        averages = self.state.averages
        self.display.update(f"{self.name}  validating")
        started_at = time.monotonic()
        with averages.swap_in() if averages else nullcontext():
            nll = self.state.parallel.run_validation(self.validate)
        line = {
            "kind": "valid",
            "step": progress.step,
            "epoch": epoch,
            "nll": nll,
            "perplexity": perplexity(nll),
            "wall": {"seconds": time.monotonic() - started_at},
        }
        self._write_metrics_line(line)

        is_best = progress.best_nll is None or nll < progress.best_nll
        if is_best:
            progress.best_nll = nll
            progress.best_step = progress.step
            progress.best_epoch = epoch
        return nll, is_best

    def _validate(self, due: DueActions) -> bool:
        """Validate, then apply the averaging and stopping rules. Return whether the loss is the best so far."""
        progress = self.state.progress
        nll, is_best = self._score(self.timetable.epochs_done(progress))

        position = self.timetable.format_position_of_total(progress)
        valid_perplexity = format_perplexity(perplexity(nll))
        best_suffix = "  (best)" if is_best else ""
        self.display.print(
            f"{self.name}  {position}  valid perplexity {valid_perplexity}{self._unit_suffix}{self._unknown_suffix}"
            f"{best_suffix}"
        )

        vocab_size = self.model.output.vocab_size
        if nll > math.log(vocab_size):
            units = "sub-words" if self._unit_suffix else "words"
            self.display.print(
                f"{self.name}  warning: worse than {vocab_size:,}, the perplexity of a uniform distribution over "
                f"all {units}; a smaller learning rate may help"
            )
        self._average_or_stop(nll, due)
        return is_best

    def _average_or_stop(self, nll: float, due: DueActions) -> None:
        """Start averaging, or stop training, if the rules say so after this validation loss."""
        progress = self.state.progress
        averaging = self.settings.averaging
        stopping = self.settings.stop
        earlier_losses = progress.validated
        progress.validated = [*earlier_losses, nll]
        if due.training_ends:
            return  # no updates follow that could be averaged or skipped

        if averaging is not None and self.state.averages is None:
            if averaging.should_start(earlier_losses, nll):
                self._start_averaging(due)
            return

        if stopping is None:
            return
        reason = stopping.reason_to_stop(earlier_losses, nll)
        if reason:
            progress.stopped = f"stopped after {self.timetable.format_position(progress)} by {reason}"
            self.display.print(f"{self.name}  {progress.stopped}")

    def _start_averaging(self, due: DueActions) -> None:
        """Average the weights from the next update on."""
        progress = self.state.progress
        self.state.averages = WeightAverages(self.state.parallel.parameters)
        self.updater.reset_capture()
        progress.averaged_from = progress.epoch
        if due.epoch_ends:
            progress.averaged_from += 1
        self.display.print(f"{self.name}  averaging starts after {self.timetable.format_position(progress)}")
        # The rules do not compare losses of averages with losses of individual iterates.
        progress.validated = []

    def _stop_requested(self, stop: StopRequest) -> bool:
        """Return whether any process has received a signal."""
        (num_signalled,) = self.world.sum([float(bool(stop))])
        return num_signalled > 0

    # -- one update ------------------------------------------------------------------------------------------------

    def _step(self, stop: StopRequest) -> tuple[bool, DueActions]:
        """Make one update.

        Returns:
            Whether any process has received a signal, and what is due after the update.
        """
        started_at = time.monotonic()
        progress = self.state.progress

        # Read the window and update.
        self._window = self.batches.window(progress.window)
        inputs_BT, targets_BT = self._window
        target_count = self.batches.count_targets(progress.window)
        schedule_factor = self.schedule.learning_rate_factor(progress.epoch, progress.step)
        window_factor = self.batches.learning_rate_factor(progress.window)
        self._learning_rate = self.initial_learning_rate * schedule_factor
        self.updater(inputs_BT, targets_BT, self._learning_rate * window_factor, target_count)

        # Count it.
        progress.step += 1
        progress.window += 1
        progress.tokens += target_count

        # Reading the results waits for the device, so on a GPU they are read only when they are needed.
        stop_requested = self._stop_requested(stop)
        due = self.timetable.due_actions(progress)
        results_needed = stop_requested or due.log or due.checkpoint
        if results_needed or self.updater.synchronous or self.world.size > 1:
            self._read_report()
        progress.seconds += time.monotonic() - started_at
        return stop_requested, due

    def _read_report(self) -> None:
        """Wait for the device and read the results of the updates since the last call.

        All processes read the same totals, so they make the same decisions.
        """
        progress = self.state.progress
        self.report = self.updater.stats.report()
        totals = self.world.sum(list(self.report.sums.values()))
        for name, total in zip(self.report.sums, totals, strict=True):
            progress.logged[name] = progress.logged.get(name, 0.0) + total
        progress.logged_tokens += self.report.tokens
        progress.skipped += self.report.skipped
        progress.skipped_in_a_row = self.report.skipped_in_a_row
        if self.report.failed_step:
            self._raise_failed_update()

    def _raise_failed_update(self) -> NoReturn:
        """Raise the error for an update whose loss or gradient is not finite."""
        progress = self.state.progress
        nll = self.report.nll
        norm = self.report.gradient_norm
        step = self.report.failed_step
        steps_since = progress.step - step
        problem = f"the loss is {nll} and the gradient norm is {norm} at step {step:,}"
        if self.settings.precision == "float16":
            problem += f", the last of {MAX_OVERFLOWS} in a row"
        details = {
            "step": step,
            "window": progress.window - 1 - steps_since,
            "loss": repr(nll),
            "gradient_norm": repr(norm),
        }
        self._stop_nonfinite(f"{problem}; the update was not made", details)

    def _stop_nonfinite(self, problem: str, details: dict[str, Any]) -> NoReturn:
        """Write the details that reproduce the problem to a file, and raise an error. The last checkpoint is finite."""
        path = self.run.path / "nonfinite.json"
        record = details | {"epoch": self.state.progress.epoch, "seed": self.settings.seed}
        if self.world.is_first:
            write_json(path, record)
        raise NonFiniteError(
            f"{problem}. {self.checkpoints.describe_kept()}, and {path} records the batch. "
            "Try a smaller training.optimiser.learning_rate or a training.clip, with another --out"
        )

    # -- metrics and checkpoints -----------------------------------------------------------------------------------

    def _save(self, pause: bool = False) -> None:
        """Save a checkpoint. `pause` marks a checkpoint that is saved only because of a stop request."""
        progress = self.state.progress
        progress.metrics_lines = self.run.metrics.lines
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak_memory_bytes(self.world.device))
        captured = self.state.capture(self.world)

        # A finite gradient can still lead to an infinite weight, for example through weight decay. All processes must
        # stop together, although only the first process has all weights.
        is_finite = all(bool(weight.isfinite().all()) for weight in captured.weights.values())
        (num_nonfinite,) = self.world.sum([float(not is_finite)])
        if num_nonfinite:
            step = progress.step
            self._stop_nonfinite(f"a weight is not finite after step {step:,}; it was not saved", {"step": step})

        if self.world.is_first:
            self.run.metrics.sync()
            self.checkpoints.save(
                step=progress.step,
                weights=captured.weights,
                state_tensors=captured.tensors,
                state_values=captured.values,
                fingerprint=self.run.config_hash,
                pause=pause,
            )
        self.world.barrier()

    def _log_training(self) -> None:
        """Write a line of metrics and update the display."""
        progress = self.state.progress
        if not progress.logged_tokens:
            return  # all updates since the last line were skipped; the next line includes them

        # Write the line of metrics. The other parts of the loss, apart from `nll`, are logged under `parts`.
        mean_parts = {name: part_sum / progress.logged_tokens for name, part_sum in progress.logged.items()}
        nll = mean_parts.pop("nll")
        inputs_BT, targets_BT = self._window
        speed = self.throughput.compute_speed(self._clock.speed(progress), inputs_BT, targets_BT)
        line: MetricsDict = {
            "kind": "train",
            "step": progress.step,
            "epoch": progress.epoch,
            "nll": nll,
            "tokens": progress.logged_tokens,
            "learning_rate": self._learning_rate,
            "gradient_norm": self.report.gradient_norm,
            "parts": mean_parts,
            "penalties": self.report.penalties,
            "wall": {"seconds": progress.seconds} | speed.record(),
        }
        if self.settings.precision == "float16":
            line["skipped"] = progress.skipped
        progress.logged = {}
        progress.logged_tokens = 0
        self._write_metrics_line(line)

        # Update the display.
        fraction_done = self.timetable.fraction_done(progress)
        seconds_left = self._clock.seconds_left(fraction_done)
        details = [
            self.timetable.format_position_of_total(progress),
            f"perplexity {perplexity(nll):,.1f}{self._unit_suffix}",
            *speed.describe(),
        ]
        self.display.update(format_progress(self.name, details, fraction_done, seconds_left))

    def _write_metrics_line(self, line: MetricsDict) -> None:
        """Write a line of metrics in the first process, and pass it to the trackers."""
        if not self.world.is_first:
            return
        self.run.metrics.append(line)
        for track in self.trackers:
            track(line)
