"""The training loop: windows of parallel streams, updates, metrics, checkpoints.

Everything that decides the next step lives in `TrainState`; the rest of this file can be rebuilt from the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from reefknot.durable import write_json
from reefknot.encoders.contract import State, join_streams, select_streams
from reefknot.errors import DataError, NonFiniteError, SettingsError, Stopped
from reefknot.evaluation.units import perplexity
from reefknot.kernels.choice import current, resolve
from reefknot.models.language_model import LanguageModel
from reefknot.outputs.contract import Plan, send
from reefknot.parts import OPTIMISERS, SCHEDULES
from reefknot.runs.checkpoints import Checkpoints
from reefknot.runs.environment import peak_memory_bytes
from reefknot.runs.folder import RunFolder, config_hash
from reefknot.text.streams import Streams
from reefknot.training.display import Display, Silent, progress_line
from reefknot.training.distributed import Window, World, quiet
from reefknot.training.settings import TrainingSettings
from reefknot.training.signals import StopRequest
from reefknot.training.state import Progress, TrainState

Metric = dict[str, Any]
Piece = tuple[Tensor, Tensor, Plan, State]
"""Inputs, targets and plan of some of the streams, and the state that they carry."""


class Trainer:
    """Trains one model in one run folder, from wherever the folder stands."""

    def __init__(
        self,
        model: LanguageModel,
        streams: Streams,
        validate: Callable[[], float],
        settings: TrainingSettings,
        run: RunFolder,
        *,
        world: World | None = None,
        display: Display | None = None,
        name: str = "",
        trackers: Sequence[Callable[[Metric], None]] = (),
    ) -> None:
        """`streams` are this process's share; `validate` returns the mean loss per token on the validation text."""
        if streams.batch % settings.accumulate:
            raise SettingsError(
                f"training.accumulate = {settings.accumulate} does not divide the {streams.batch} streams of a process"
            )
        self.settings = settings
        self.world = world or World()
        self.run = run
        self.checkpoints = Checkpoints(run.path, settings.keep)
        self.display = display or Silent()
        self.name = name
        self.trackers = trackers
        self.streams = streams
        self.validate = validate
        self.model = model.to(self.world.device)
        self.schedule = SCHEDULES.build(settings.schedule, {})
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": list(model.parameters())})
        self.first_rate: float = optimiser.param_groups[0]["lr"]
        self.state = TrainState(model, optimiser, model.initial_state(streams.batch), Progress())
        self._window = self.world.parallel(Window(model))

    # -- the whole run ---------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the last epoch. Raises `Stopped` when asked to stop, after saving."""
        self._resume()
        dtype = torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32
        self.display.say(f"losses of the output end: {resolve(current(), self.world.device, dtype)}")
        with StopRequest() as stop:
            while self.state.progress.epoch <= self.settings.epochs:
                self._run_epoch(stop)
                self._end_epoch()
                if self._asked(stop):
                    raise self._stopped()
        return self.state.progress

    def _resume(self) -> None:
        found = self.checkpoints.latest(self.display.say)
        if found is None:
            self._cut_metrics()
            return
        if found.fingerprint != config_hash(self.run.config):
            raise DataError(f"{found.path} is a checkpoint of a run with other settings than {self.run.path} has")
        self.state.restore(found.model, found.state, found.values, self.world, self.settings.seed)
        progress = self.state.progress
        self._cut_metrics()
        if self.world.first and progress.best_step and self.checkpoints.path_of(progress.best_step).exists():
            # Killed between a checkpoint's commit and the mark: the checkpoint knows what was best.
            self.checkpoints.mark_best(progress.best_step)
        self.display.say(f"resumed at step {progress.step:,}, epoch {progress.epoch}")

    def _cut_metrics(self) -> None:
        if self.world.first:
            self.run.metrics.cut(self.state.progress.metrics_lines)

    def _run_epoch(self, stop: StopRequest) -> None:
        progress = self.state.progress
        rate = self.first_rate * self.schedule.factor(progress.epoch)
        for group in self.state.optimiser.param_groups:
            group["lr"] = rate
        if progress.window == 0:
            self.state.hidden = self.model.initial_state(self.streams.batch)
        self.model.train()
        while progress.window < self.streams.windows:
            gradient_norm, penalties, asked = self._step(stop)
            ends_epoch = progress.window == self.streams.windows
            if ends_epoch or progress.step % self.settings.log_every == 0:
                self._log_training(rate, gradient_norm, penalties)
            if asked and not ends_epoch:
                self._save()
                raise self._stopped()
            if progress.step % self.settings.save_every == 0 and not ends_epoch:
                self._save()

    def _end_epoch(self) -> None:
        progress = self.state.progress
        self.display.update(f"{self.name}  validating")
        started = time.monotonic()
        nll = self.world.from_first(self.validate() if self.world.first else math.nan)
        line = {
            "kind": "valid",
            "step": progress.step,
            "epoch": progress.epoch,
            "nll": nll,
            "perplexity": perplexity(nll),
        }
        self._write_metric(line | {"wall": {"seconds": time.monotonic() - started}})
        best = progress.best_nll is None or nll < progress.best_nll
        if best:
            progress.best_nll, progress.best_step, progress.best_epoch = nll, progress.step, progress.epoch
        self.display.say(
            f"{self.name}  epoch {progress.epoch}/{self.settings.epochs}  "
            f"valid perplexity {perplexity(nll):,.2f}{'  (best)' if best else ''}"
        )
        progress.epoch += 1
        progress.window = 0
        self._save()
        if best and self.world.first:
            self.checkpoints.mark_best(progress.step)

    def _asked(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop."""
        return self.world.sum([float(bool(stop))])[0] > 0

    def _stopped(self) -> Stopped:
        return Stopped(f"stopped at step {self.state.progress.step:,} and saved; the same command resumes")

    # -- one update ------------------------------------------------------------------------------------------------

    def _step(self, stop: StopRequest) -> tuple[float, dict[str, float], bool]:
        """One update; returns the gradient's norm, the penalties, and whether any process was asked to stop."""
        started = time.monotonic()
        progress = self.state.progress
        x_BT, y_BT = self.streams.window(progress.window)
        pieces = self._pieces(x_BT, y_BT)
        count = sum(plan.count for _, _, plan, _ in pieces)
        divisor = (self.streams.batch if self.settings.divisor == "batch" else count) * self.world.size
        self.state.optimiser.zero_grad(set_to_none=True)
        sums, penalties, hidden = self._backward(pieces, divisor)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf)
        together = [norm, *penalties.values(), *sums.values()]
        numbers: list[float] = torch.stack([each.detach().double() for each in together]).tolist()
        # The norm is that of the exchanged gradients, so all processes see the same one and decide alike.
        gradient_norm, penalised = numbers[0], dict(zip(penalties, numbers[1:], strict=False))
        *totals, asked = self.world.sum([*numbers[1 + len(penalties) :], float(bool(stop))])
        logged = dict(zip(sums, totals, strict=True))
        if not (math.isfinite(gradient_norm) and all(map(math.isfinite, totals))):
            self._refuse_update(logged["nll"], gradient_norm)
        self.state.optimiser.step()
        self.state.hidden = hidden
        progress.step += 1
        progress.window += 1
        progress.tokens += count * self.world.size
        progress.logged = {name: progress.logged.get(name, 0.0) + total for name, total in logged.items()}
        progress.logged_tokens += count * self.world.size
        progress.seconds += time.monotonic() - started
        return gradient_norm, penalised, asked > 0

    def _pieces(self, x_BT: Tensor, y_BT: Tensor) -> list[Piece]:
        """The streams in `accumulate` groups, with what the host can say about each before it is copied."""
        size = self.streams.batch // self.settings.accumulate
        device = self.world.device
        pieces = []
        for start in range(0, self.streams.batch, size):
            part = slice(start, start + size)
            plan = self.model.output.prepare(y_BT[part]).to(device)
            x, y = send(x_BT[part], device), send(y_BT[part], device)
            pieces.append((x, y, plan, select_streams(self.state.hidden, part)))
        return pieces

    def _backward(self, pieces: list[Piece], divisor: int) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """The gradients of the pieces; the parts of their losses added up, the penalties, the state that follows."""
        sums: dict[str, Tensor] = {}
        states = []
        penalties: dict[str, Tensor] = {}
        with self.model.output.sharing() as join:
            for number, (x, y, plan, hidden) in enumerate(pieces):
                last = number == len(pieces) - 1
                if last:
                    join()
                # Processes exchange gradients once per update, with the last piece.
                with nullcontext() if last else quiet(self._window):
                    with self._autocast():
                        loss_sum, parts, state, penalties = self._window(x, y, hidden, plan)
                    # Processes average their gradients, so each share of the sum is weighted by their number;
                    # penalties are the same in every process and enter once.
                    objective = loss_sum * (self.world.size / divisor)
                    if last and penalties:
                        objective = objective + torch.stack(list(penalties.values())).sum() / divisor
                    objective.backward()
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
                states.append(state)
        return sums, penalties, join_streams(states)

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _refuse_update(self, nll: float, norm: float) -> NoReturn:
        step = self.state.progress.step + 1
        self._stop_nonfinite(
            f"the loss is {nll} and the gradient's norm {norm} at step {step:,}; the update was not made",
            {"step": step, "window": self.state.progress.window, "loss": repr(nll), "gradient_norm": repr(norm)},
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

    def _save(self) -> None:
        progress = self.state.progress
        progress.metrics_lines = self.run.metrics.lines
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak_memory_bytes(self.world.device))
        model, tensors, values = self.state.capture(self.world)
        if not all(bool(weight.isfinite().all()) for weight in model.values()):
            # A finite gradient can still make an infinite weight, by weight decay for one.
            step = progress.step
            self._stop_nonfinite(
                f"step {step:,} has made a weight that is not a number; it was not saved", {"step": step}
            )
        if self.world.first:
            self.run.metrics.sync()
            self.checkpoints.save(progress.step, model, tensors, values, fingerprint=config_hash(self.run.config))
        self.world.wait()

    def _log_training(self, rate: float, gradient_norm: float, penalties: dict[str, float]) -> None:
        progress = self.state.progress
        parts = {name: total / progress.logged_tokens for name, total in progress.logged.items()}
        nll = parts.pop("nll")
        speed = progress.tokens / progress.seconds
        line: Metric = {"kind": "train", "step": progress.step, "epoch": progress.epoch, "nll": nll}
        line |= {
            "tokens": progress.logged_tokens,
            "learning_rate": rate,
            "gradient_norm": gradient_norm,
            "parts": parts,
            "penalties": penalties,
        }
        line["wall"] = {"seconds": progress.seconds, "tokens_per_second": speed}
        progress.logged, progress.logged_tokens = {}, 0
        self._write_metric(line)
        steps = self.settings.epochs * self.streams.windows
        left = (steps - progress.step) * progress.seconds / progress.step
        facts = {"epoch": f"{progress.epoch}/{self.settings.epochs}", "perplexity": f"{perplexity(nll):,.1f}"}
        facts["tokens/s"] = f"{speed:,.0f}"
        self.display.update(progress_line(self.name, facts, progress.step / steps, left))

    def _write_metric(self, line: Metric) -> None:
        if not self.world.first:
            return
        self.run.metrics.append(line)
        for track in self.trackers:
            track(line)
