"""Train several runs, each in its own process.

A run is the training of one row (experiment) of a recipe, with one seed, in its own folder. `reefknot table`, `sweep`
and `train --seeds` describe every run as a `Job`, and `run_jobs` trains them:

    options = TrainOptions("demo", "tied")
    run_jobs([options.for_run(seed, Path(f"runs/seed{seed}")) for seed in range(3)], max_parallel=1)

Separate processes have two advantages: the peak memory of a run is measured without the memory of other runs, and a run
that is killed does not stop the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import NamedTuple

import typer

from reefknot.errors import ReefknotError, SettingsError, Stopped
from reefknot.lab.runs.threads import environment_for_jobs
from reefknot.lab.training.signals import install_handlers, restore_handlers


@dataclass(frozen=True)
class TrainOptions:
    """The options of `reefknot train` that several jobs share. `for_run` adds what only one run has."""

    recipe: str
    row: str
    """Name of the row: one experiment of the recipe."""
    overrides: tuple[str, ...] = ()
    """Settings to change, as `key=value`."""
    data: Path | None = None
    device: str = "auto"
    track: tuple[str, ...] = ()
    """Names of the trackers."""
    withhold_test: bool = False

    def for_run(self, seed: int, out: Path, start: Path | None = None, label: str = "") -> Job:
        """Return the job that trains one run with these options."""
        return Job(**vars(self), seed=seed, out=out, start=start, label=label)


@dataclass(frozen=True, kw_only=True)
class Job(TrainOptions):
    """One run, and the command that trains it."""

    seed: int
    out: Path
    """The run folder."""
    start: Path | None = None
    """The finished run that this run starts from."""
    label: str = ""
    """Text before the output of the run, if row and seed do not distinguish it from other runs."""

    def command(self) -> list[str]:
        """Return the arguments of `reefknot`, as a user would type them."""
        arguments = ["train", self.recipe, *self.overrides, f"training.seed={self.seed}", "--row", self.row]
        arguments += ["--out", str(self.out), "--device", self.device]
        if self.data:
            arguments += ["--data", str(self.data)]
        if self.start:
            arguments += ["--start", str(self.start)]
        for tracker in self.track:
            arguments += ["--track", tracker]
        if self.withhold_test:
            arguments += ["--withhold-test"]
        return arguments


class PlannedJob(NamedTuple):
    """A job of a table or a sweep. It runs only if it is not finished."""

    job: Job
    is_finished: bool
    """Whether an earlier command has already trained the run."""


class JobFailed(ReefknotError):
    """A run ended with an error. The run has already printed the message."""


def run_unfinished(planned_jobs: Sequence[PlannedJob], max_parallel: int, root: Path) -> None:
    """Train the runs that are not finished, and print how many runs there are.

    Args:
        planned_jobs: All jobs.
        max_parallel: Maximum number of runs that are trained at the same time.
        root: The folder that holds the runs, for the printed message.
    """
    unfinished = [planned.job for planned in planned_jobs if not planned.is_finished]
    num_finished = len(planned_jobs) - len(unfinished)
    typer.echo(f"{len(planned_jobs)} runs in {root}, {num_finished} of them done")
    run_jobs(unfinished, max_parallel)


def run_jobs(jobs: list[Job], max_parallel: int) -> None:
    """Run all jobs, at most `max_parallel` of them at the same time.

    A job runs after the run that it starts from. If a job fails, the jobs that start from its run are skipped, and all
    others are run. A stop signal stops all jobs.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SettingsError("torchrun can train only one run at a time; start several runs without torchrun")

    children = _ChildProcesses(max_parallel)
    previous_handlers = install_handlers(children.forward_signal)
    try:
        with ThreadPoolExecutor(max_parallel) as pool:
            exit_codes = _run_in_order(jobs, lambda job: pool.submit(children.run, job))
    finally:
        restore_handlers(previous_handlers)

    # A job that received the signal before it installed its handler was killed. It can be resumed like other jobs.
    if any(exit_codes) and (children.is_stopping or Stopped.exit_code in exit_codes):
        raise Stopped("stopped; run the same command to resume")
    _report_failures(jobs, exit_codes)


class _ChildProcesses:
    """The processes of the jobs that are running. `run` is called in several threads at the same time."""

    def __init__(self, max_parallel: int) -> None:
        self.is_stopping = False
        """Whether a stop signal has arrived. No job starts after that."""
        self._share_output = max_parallel > 1
        """Whether several jobs print at the same time, so that every line needs the label of its job."""
        self._environment = environment_for_jobs(max_parallel)
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = RLock()  # prevents a job from starting after a signal arrives but before `is_stopping` is set

    def forward_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: send it to all running processes."""
        with self._lock:
            self.is_stopping = True
            for process in self._running:
                process.send_signal(signal_number)

    def run(self, job: Job) -> int:
        """Run a job in a new process, wait for its end and return its exit code."""
        with self._lock:
            if self.is_stopping:
                return Stopped.exit_code
            process = self._start(job)
            self._running.add(process)
        if process.stdout is not None:
            prefix = f"{job.label}  " if job.label else ""
            for output_line in process.stdout:
                print(f"{prefix}{output_line}", end="", flush=True)
        exit_code = process.wait()
        with self._lock:
            self._running.discard(process)
        return exit_code

    def _start(self, job: Job) -> subprocess.Popen[str]:
        """Start the process of a job. Print the label of the job if its lines will not have it."""
        if job.label and not self._share_output:
            print(job.label, flush=True)
        # With --json, everything but the result is printed on stderr, which is file descriptor 2.
        stdout = 2 if sys.stdout is sys.stderr else None
        # The child gets its own session, so that Ctrl-C reaches it once, through `forward_signal`, and not twice.
        return subprocess.Popen(
            [sys.executable, "-m", "reefknot", *job.command()],
            stdout=subprocess.PIPE if self._share_output else stdout,
            text=True,
            start_new_session=True,
            env=self._environment,
        )


def _run_in_order(jobs: Sequence[Job], submit: Callable[[Job], Future[int]]) -> list[int]:
    """Run every job after the run that it starts from, and return the exit codes of the jobs.

    A job that starts from a failed run is skipped and gets the exit code of that run.
    """
    exit_codes: dict[Path | None, int] = {}  # by run folder
    running: dict[Future[int], Job] = {}
    waiting = list(jobs)
    while waiting or running:
        # Start the jobs that do not wait for an unfinished run.
        unfinished_runs = {job.out for job in (*waiting, *running.values())}
        ready = [job for job in waiting if job.start not in unfinished_runs]
        waiting = [job for job in waiting if job not in ready]
        for job in ready:
            if exit_codes.get(job.start):
                exit_codes[job.out] = exit_codes[job.start]
            else:
                running[submit(job)] = job

        # Wait until at least one job has ended.
        completed, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in completed:
            job = running.pop(future)
            exit_codes[job.out] = future.result()
    return [exit_codes[job.out] for job in jobs]


def _report_failures(jobs: list[Job], exit_codes: list[int]) -> None:
    """Raise an error that names the failed runs, with the exit code of the first of them."""
    failure_codes = {job.out: code for job, code in zip(jobs, exit_codes, strict=True) if code}
    if not failure_codes:
        return
    skipped = [str(job.out) for job in jobs if job.start in failure_codes]
    failed = [str(out) for out in failure_codes if str(out) not in skipped]
    message = f"these runs failed: {', '.join(failed)}"
    if skipped:
        message += f"; these runs start from a failed run and were not run: {', '.join(skipped)}"
    error = JobFailed(message)
    # A negative code is the number of a signal that killed the process.
    error.exit_code = next((code for code in failure_codes.values() if code > 0), 1)
    raise error
