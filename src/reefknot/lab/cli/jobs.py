"""Train several runs, every run in its own process.

So the memory of a run is measured without the memory of other runs, and a run that is killed does not end other runs.
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

import typer

from reefknot.errors import ReefknotError, SettingsError, Stopped
from reefknot.lab.training.signals import install_handlers, restore_handlers


@dataclass(frozen=True)
class Job:
    """One run that `reefknot train` trains."""

    recipe: str
    row: str
    seed: int
    out: Path
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    device: str = "auto"
    tensorboard: bool = False
    start: Path | None = None
    """The finished run that this run starts from."""
    withhold_test: bool = False
    label: str = ""
    """Text before the output of the run, if row and seed do not distinguish it from other runs."""

    def command(self) -> list[str]:
        """Return the command line, as a user would type it."""
        words = ["train", self.recipe, *self.overrides, f"training.seed={self.seed}", "--row", self.row]
        words += ["--out", str(self.out), "--device", self.device]
        words += ["--data", str(self.data)] if self.data else []
        words += ["--start", str(self.start)] if self.start else []
        words += ["--tensorboard"] if self.tensorboard else []
        return [*words, *(["--withhold-test"] if self.withhold_test else [])]


class JobFailed(ReefknotError):
    """A run ended with an error. The run has already printed the message."""


def run_missing(planned: Sequence[tuple[Job, bool]], at_once: int, root: Path) -> None:
    """Print the number of runs, and train the runs that are not done."""
    waiting = [job for job, done in planned if not done]
    typer.echo(f"{len(planned)} runs in {root}, {len(planned) - len(waiting)} of them done")
    run_jobs(waiting, at_once)


def run_jobs(jobs: list[Job], at_once: int) -> None:
    """Run all jobs, at most `at_once` of them at the same time.

    A job runs after the run that it starts from. If a job fails, the jobs that start from its run are skipped, and all
    others are run. A stop signal stops all jobs.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SettingsError("torchrun can train only one run at a time; start several runs without torchrun")
    running: set[subprocess.Popen[str]] = set()
    starting = RLock()  # prevents a job from starting after a signal arrives but before `stopping` is set
    stopping = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        with starting:
            stopping = True
            for process in running:
                process.send_signal(number)

    def run(job: Job) -> int:
        with starting:
            if stopping:
                return Stopped.exit_code
            if job.label and at_once == 1:
                print(job.label, flush=True)
            # The child gets its own session, so that Ctrl-C reaches it once, through `forward`, and not twice.
            process = subprocess.Popen(
                [sys.executable, "-m", "reefknot", *job.command()],
                stdout=None if at_once == 1 else subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            running.add(process)
        if process.stdout is not None:
            for line in process.stdout:
                print(f"{job.label}  {line}" if job.label else line, end="", flush=True)
        code = process.wait()
        with starting:
            running.discard(process)
        return code

    previous = install_handlers(forward)
    try:
        with ThreadPoolExecutor(at_once) as pool:
            codes = _run_in_order(jobs, lambda job: pool.submit(run, job))
    finally:
        restore_handlers(previous)
    # A job that received the signal before it installed its handler was killed. It can be resumed like other jobs.
    if any(codes) and (stopping or Stopped.exit_code in codes):
        raise Stopped("stopped; run the same command to resume")
    _report_failures(jobs, codes)


def _run_in_order(jobs: Sequence[Job], submit: Callable[[Job], Future[int]]) -> list[int]:
    """Return the exit codes of the jobs. A job that starts from a failed run is skipped and gets the same code."""
    codes: dict[Path | None, int] = {}
    running: dict[Future[int], Job] = {}
    waiting = list(jobs)
    while waiting or running:
        unfinished = {job.out for job in (*waiting, *running.values())}
        ready = [job for job in waiting if job.start not in unfinished]
        waiting = [job for job in waiting if job not in ready]
        for job in ready:
            if codes.get(job.start):
                codes[job.out] = codes[job.start]
            else:
                running[submit(job)] = job
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            codes[running.pop(future).out] = future.result()
    return [codes[job.out] for job in jobs]


def _report_failures(jobs: list[Job], codes: list[int]) -> None:
    """Raise an error that names the failed runs, with the exit code of the first of them."""
    failed = {job.out: code for job, code in zip(jobs, codes, strict=True) if code}
    if failed:
        skipped = [str(job.out) for job in jobs if job.start in failed]
        names = ", ".join(str(out) for out in failed if str(out) not in skipped)
        others = f"; these runs start from a failed run and were not run: {', '.join(skipped)}" if skipped else ""
        error = JobFailed(f"these runs failed: {names}{others}")
        error.exit_code = next((code for code in failed.values() if code > 0), 1)
        raise error
