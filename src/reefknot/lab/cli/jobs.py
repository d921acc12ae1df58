"""Several training runs, each in a process of its own: its memory is measured alone, and its death is its own."""

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
from reefknot.lab.training.signals import listen, restore


@dataclass(frozen=True)
class Job:
    """One `reefknot train` to come."""

    recipe: str
    row: str
    seed: int
    out: Path
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    device: str = "auto"
    tensorboard: bool = False
    start: Path | None = None
    """The run that this one begins with."""
    withhold_test: bool = False
    label: str = ""
    """What tells it from the others, where its row and its seed do not."""

    def command(self) -> list[str]:
        """The command line, as a user would type it."""
        words = ["train", self.recipe, *self.overrides, f"training.seed={self.seed}", "--row", self.row]
        words += ["--out", str(self.out), "--device", self.device]
        words += ["--data", str(self.data)] if self.data else []
        words += ["--start", str(self.start)] if self.start else []
        words += ["--tensorboard"] if self.tensorboard else []
        return [*words, *(["--withhold-test"] if self.withhold_test else [])]


class JobFailed(ReefknotError):
    """A run ended with an error, which it has already told."""


def run_missing(planned: Sequence[tuple[Job, bool]], at_once: int, root: Path) -> None:
    """Run the jobs that are not done yet, having said how many there are."""
    waiting = [job for job, done in planned if not done]
    typer.echo(f"{len(planned)} runs in {root}, {len(planned) - len(waiting)} of them done")
    run_jobs(waiting, at_once)


def run_jobs(jobs: list[Job], at_once: int) -> None:
    """Run all jobs, `at_once` side by side, each after the one that it starts with.

    A job that fails does not stop the others, but for those that start with it; a stop request stops all.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SettingsError("torchrun trains one run in several processes; start several runs without it")
    running: set[subprocess.Popen[str]] = set()
    starting = RLock()  # no job may start between the signal and the flag that it sets
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
            # A session of its own: a Ctrl-C reaches the children once, through us, not twice.
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

    previous = listen(forward)
    try:
        with ThreadPoolExecutor(at_once) as pool:
            codes = _run_in_order(jobs, lambda job: pool.submit(run, job))
    finally:
        restore(previous)
    # A job that was asked to stop before it could listen died of the signal; it is as resumable as the others.
    if any(codes) and (stopping or Stopped.exit_code in codes):
        raise Stopped("stopped; the same command goes on where it stands")
    _report_failures(jobs, codes)


def _run_in_order(jobs: Sequence[Job], submit: Callable[[Job], Future[int]]) -> list[int]:
    """The jobs' exit codes. A job whose start has failed is not run, and has its code."""
    codes: dict[Path | None, int] = {}
    running: dict[Future[int], Job] = {}
    waiting = list(jobs)
    while waiting or running:
        to_come = {job.out for job in (*waiting, *running.values())}
        ready = [job for job in waiting if job.start not in to_come]
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
    failed = {job.out: code for job, code in zip(jobs, codes, strict=True) if code}
    if failed:
        left_out = [str(job.out) for job in jobs if job.start in failed]
        names = ", ".join(str(out) for out in failed if str(out) not in left_out)
        more = f"; these start with one that failed, and were not run: {', '.join(left_out)}" if left_out else ""
        error = JobFailed(f"these runs failed: {names}{more}")
        error.exit_code = next((code for code in failed.values() if code > 0), 1)
        raise error
