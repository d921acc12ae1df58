"""The training loop: windows of a text, updates, metrics, validations, checkpoints.

Everything that decides the next step lives in `TrainState`; the rest of this file can be rebuilt from the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from reefknot.errors import DataError, NonFiniteError, SettingsError, Stopped
from reefknot.kernels.choice import current, resolve
from reefknot.lab.config.parts import OPTIMISERS, SCHEDULES
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.units import perplexity, shown
from reefknot.lab.text.batches import Batches
from reefknot.lab.training.averaging import Averages
from reefknot.lab.training.display import Display, Silent, progress_line
from reefknot.lab.training.distributed import World
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.signals import StopRequest
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.stopping import nonmonotone
from reefknot.lab.training.throughput import Throughput
from reefknot.lab.training.timetable import Due, Sitting, Timetable
from reefknot.lab.training.update import OVERFLOWS, PRODUCTS, Update, carries, check_precision
from reefknot.nn.encoders.contract import State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.files import write_json

Metric = dict[str, Any]


class Trainer:
    """Trains one model in one run folder, from wherever the folder stands."""

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
        pieces: bool = False,
        trackers: Sequence[Callable[[Metric], None]] = (),
    ) -> None:
        """`batches` are this process's share; `validate` returns the mean loss per token on the validation text.

        `pieces`: tokens are pieces of words, and lines say that perplexities are.
        """
        if settings.batching == "streams" and batches.batch % settings.accumulate:
            raise SettingsError(
                f"training.accumulate = {settings.accumulate} does not divide the {batches.batch} streams of a process"
            )
        self.settings = settings
        self.world = world or World()
        self.run = run
        self.checkpoints = Checkpoints(run.path, settings.keep)
        self.display = display or Silent()
        self.name = name
        self._per = " per piece" if pieces else ""
        self.trackers = trackers
        self.batches = batches
        self.timetable = Timetable(settings, batches)
        self.validate = validate
        self.model = model.to(self.world.device)
        check_precision(self.model, settings)
        self.schedule = SCHEDULES.build(settings.schedule, {})
        parallel = self.world.parallel(self.model, settings.shard)
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel.trained})
        # Not the optimiser's own: on a GPU that is a float32.
        self.first_rate = float(settings.optimiser.model_dump()["learning_rate"])
        averages = Averages.at_once(parallel.parameters, settings.averaging)
        self.state = TrainState(
            parallel,
            optimiser,
            self._first_state(),
            Progress(averaged_from=0 if averages is None else 1),
            averages,
            parallel.scaler(settings.precision == "float16"),
        )

    def _first_state(self) -> State:
        """What the first window of an epoch begins with; nothing where windows do not go on from one another."""
        return self.model.initial_state(self.batches.batch) if carries(self.model, self.settings) else {}

    # -- the whole run ---------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the end, or until it is enough. Raises `Stopped` when asked to stop, after saving."""
        self._resume()
        self.update = Update(self.model, self.state, self.world, self.settings)
        dtype = PRODUCTS[self.settings.precision]
        if self.world.first:
            self.run.log(f"losses of the output end: {resolve(current(), self.world.device, dtype)}")
        self.throughput = Throughput(self.model, self.world, dtype)
        progress = self.state.progress
        self.batches.begin(progress.epoch)
        self._sitting = Sitting(time.monotonic(), self.timetable.done(progress), progress.tokens, progress.seconds)
        if self.settings.start is not None and progress.best_nll is None:
            self._score_start()
        self.model.train()
        with StopRequest() as stop:
            while not self.timetable.finished(progress):
                self._advance(stop)
        return progress

    def _resume(self) -> None:
        found = self.checkpoints.latest(self.display.say)
        if found is None:
            self._cut_metrics()
            return
        if found.fingerprint != self.run.config_hash:
            raise DataError(f"{found.path} is a checkpoint of a run with other settings than {self.run.path} has")
        self.state.restore(found.model, found.state, found.values, self.world, self.settings.seed)
        progress = self.state.progress
        self._cut_metrics()
        if self.world.first and progress.best_nll is not None and self.checkpoints.path_of(progress.best_step).exists():
            # Killed between a checkpoint's commit and the mark: the checkpoint knows what was best.
            self.checkpoints.mark_best(progress.best_step)
        place = "the end of training" if self.timetable.finished(progress) else f"epoch {progress.epoch}"
        self.display.say(f"{self.name}  resumed at step {progress.step:,}, {place}")

    def _cut_metrics(self) -> None:
        if self.world.first:
            self.run.metrics.cut(self.state.progress.metrics_lines)

    def _advance(self, stop: StopRequest) -> None:
        """One update and what follows it."""
        progress = self.state.progress
        asked, due = self._step(stop)
        if due.line:
            self._log_training()
        best = due.validation and self._validate(due)
        if due.turn:
            progress.epoch, progress.window = progress.epoch + 1, 0
            self.state.hidden = self._first_state()
            self.batches.begin(progress.epoch)
        if due.checkpoint or asked:
            self._save(pause=not due.checkpoint)
        if best and self.world.first:
            self.checkpoints.mark_best(progress.step)
        # A validation takes long enough to be asked in.
        if asked or (due.validation and self._asked(stop)):
            raise self._stopped()

    def _score_start(self) -> None:
        """Weights that come trained are the best so far: a second session can end no worse than it began."""
        nll, _ = self._score(epoch=0)
        self.display.say(f"{self.name}  begins at valid perplexity {shown(perplexity(nll))}{self._per}")
        self._save()
        if self.world.first:
            self.checkpoints.mark_best(self.state.progress.step)

    def _score(self, epoch: float) -> tuple[float, bool]:
        """The validation loss after so many epochs, and whether it is the best so far."""
        progress = self.state.progress
        self.display.update(f"{self.name}  validating")
        started = time.monotonic()
        with self.state.averages.swapped() if self.state.averages else nullcontext():
            nll = self.state.parallel.score(self.validate)
        line = {"kind": "valid", "step": progress.step, "epoch": epoch, "nll": nll, "perplexity": perplexity(nll)}
        self._write_metric(line | {"wall": {"seconds": time.monotonic() - started}})
        best = progress.best_nll is None or nll < progress.best_nll
        if best:
            progress.best_nll, progress.best_step, progress.best_epoch = nll, progress.step, epoch
        return nll, best

    def _validate(self, due: Due) -> bool:
        """Look at the validation text and act on it; returns whether this is the best so far."""
        progress = self.state.progress
        nll, best = self._score(self.timetable.passes(progress))
        self.display.say(
            f"{self.name}  {self.timetable.place_of_all(progress)}  "
            f"valid perplexity {shown(perplexity(nll))}{self._per}{'  (best)' if best else ''}"
        )
        if nll > math.log(classes := self.model.output.vocab_size):
            self.display.say(
                f"{self.name}  warning: worse than {classes:,}, which is the perplexity of taking all "
                f"{'pieces' if self._per else 'words'} for equally likely; a smaller learning rate may help"
            )
        self._average_or_stop(nll, due)
        return best

    def _average_or_stop(self, nll: float, due: Due) -> None:
        """Begin to average or stop, as this validation loss and the earlier ones say."""
        progress, averaging, stop = self.state.progress, self.settings.averaging, self.settings.stop
        earlier, progress.validated = progress.validated, [*progress.validated, nll]
        if due.end:
            return  # there is nothing left to average, or to leave out
        if averaging is not None and self.state.averages is None:
            if nonmonotone(earlier, nll, averaging.interval):
                self.state.averages = Averages(self.state.parallel.parameters)
                self.update.forget()
                progress.averaged_from = progress.epoch + due.turn
                self.display.say(f"{self.name}  averaging begins after {self.timetable.place(progress)}")
                # Losses of averages are another series: what an iterate had is nothing to measure them by.
                progress.validated = []
        elif stop is not None and (reason := stop.verdict(earlier, nll)):
            progress.stopped = f"stopped after {self.timetable.place(progress)} by {reason}"
            self.display.say(f"{self.name}  {progress.stopped}")

    def _asked(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop."""
        return self.world.sum([float(bool(stop))])[0] > 0

    def _stopped(self) -> Stopped:
        return Stopped(f"stopped at step {self.state.progress.step:,} and saved; the same command resumes")

    # -- one update ------------------------------------------------------------------------------------------------

    def _step(self, stop: StopRequest) -> tuple[bool, Due]:
        """One update; returns whether any process was asked to stop, and what follows."""
        started = time.monotonic()
        progress = self.state.progress
        x_BT, y_BT = self._window = self.batches.window(progress.window)
        count = self.batches.count(progress.window)
        self._rate = self.first_rate * self.schedule.factor(progress.epoch, progress.step)
        self.update(x_BT, y_BT, self._rate * self.batches.rate_factor(progress.window), count)
        progress.step += 1
        progress.window += 1
        progress.tokens += count
        asked, due = self._asked(stop), self.timetable.due(progress)
        if asked or due.line or due.checkpoint or self.update.at_once or self.world.size > 1:
            self._look()
        progress.seconds += time.monotonic() - started
        return asked, due

    def _look(self) -> None:
        """Wait for the device and see what the last updates came to. All processes see the same, and decide alike."""
        progress = self.state.progress
        self.report = self.update.tally.report()
        totals = self.world.sum([*self.report.sums.values()])
        for name, total in zip(self.report.sums, totals, strict=True):
            progress.logged[name] = progress.logged.get(name, 0.0) + total
        progress.logged_tokens += self.report.tokens
        progress.skipped += self.report.skipped
        progress.skipped_in_a_row = self.report.skipped_in_a_row
        if self.report.refused:
            self._tell_refusal()

    def _tell_refusal(self) -> NoReturn:
        progress, nll, norm = self.state.progress, self.report.nll, self.report.gradient_norm
        step = self.report.refused
        many = f", the last of {OVERFLOWS} in a row" if self.settings.precision == "float16" else ""
        self._stop_nonfinite(
            f"the loss is {nll} and the gradient's norm {norm} at step {step:,}{many}; the update was not made",
            {
                "step": step,
                "window": progress.window - 1 - (progress.step - step),
                "loss": repr(nll),
                "gradient_norm": repr(norm),
            },
        )

    def _stop_nonfinite(self, fault: str, facts: dict[str, Any]) -> NoReturn:
        """Write down what is needed to see it again, and leave. The last checkpoint is finite."""
        record = {"epoch": self.state.progress.epoch, "seed": self.settings.seed}
        if self.world.first:
            write_json(self.run.path / "nonfinite.json", facts | record)
        raise NonFiniteError(
            f"{fault}. The last checkpoint is kept and {self.run.path / 'nonfinite.json'} names the batch. "
            "Try a smaller training.optimiser.learning_rate or a training.clip, in another --out"
        )

    # -- what is written -------------------------------------------------------------------------------------------

    def _save(self, pause: bool = False) -> None:
        """Commit where training stands; a `pause` is no part of the timetable."""
        progress = self.state.progress
        progress.metrics_lines = self.run.metrics.lines
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak_memory_bytes(self.world.device))
        model, tensors, values = self.state.capture(self.world)
        finite = all(bool(weight.isfinite().all()) for weight in model.values())
        if self.world.sum([float(not finite)])[0]:  # others may have seen nothing wrong: the first has all weights
            # A finite gradient can still make an infinite weight, by weight decay for one.
            step = progress.step
            self._stop_nonfinite(
                f"step {step:,} has made a weight that is not a number; it was not saved", {"step": step}
            )
        if self.world.first:
            self.run.metrics.sync()
            fingerprint = self.run.config_hash
            self.checkpoints.save(progress.step, model, tensors, values, fingerprint=fingerprint, pause=pause)
        self.world.wait()

    def _log_training(self) -> None:
        progress = self.state.progress
        if not progress.logged_tokens:
            return  # no update was made since the last line; the next line tells how many were left out
        parts = {name: total / progress.logged_tokens for name, total in progress.logged.items()}
        nll = parts.pop("nll")
        speed = self.throughput.speed(self._sitting.speed(progress), *self._window)
        line: Metric = {"kind": "train", "step": progress.step, "epoch": progress.epoch, "nll": nll}
        line |= {
            "tokens": progress.logged_tokens,
            "learning_rate": self._rate,
            "gradient_norm": self.report.gradient_norm,
            "parts": parts,
            "penalties": self.report.penalties,
        }
        line["wall"] = {"seconds": progress.seconds} | speed.record()
        if self.settings.precision == "float16":
            line["skipped"] = progress.skipped
        progress.logged, progress.logged_tokens = {}, 0
        self._write_metric(line)
        done = self.timetable.done(progress)
        facts = [self.timetable.place_of_all(progress), f"perplexity {perplexity(nll):,.1f}{self._per}", *speed.told()]
        self.display.update(progress_line(self.name, facts, done, self._sitting.left(done)))

    def _write_metric(self, line: Metric) -> None:
        if not self.world.first:
            return
        self.run.metrics.append(line)
        for track in self.trackers:
            track(line)
