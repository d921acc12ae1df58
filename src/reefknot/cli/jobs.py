"""Several training runs, each in a process of its own: its memory is measured alone, and its death is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from types import FrameType

from reefknot.errors import ReefknotError, SettingsError, Stopped
from reefknot.training.signals import listen, restore


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

    def command(self) -> list[str]:
        """The command line, as a user would type it."""
        words = ["train", self.recipe, *self.overrides, f"training.seed={self.seed}", "--row", self.row]
        words += ["--out", str(self.out), "--device", self.device]
        words += ["--data", str(self.data)] if self.data else []
        return [*words, *(["--tensorboard"] if self.tensorboard else [])]


class JobFailed(ReefknotError):
    """A run ended with an error, which it has already told."""


def run_jobs(jobs: list[Job], at_once: int) -> None:
    """Run all jobs, `at_once` side by side. A job that fails does not stop the others; a stop request stops all."""
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
                print(line, end="", flush=True)
        code = process.wait()
        with starting:
            running.discard(process)
        return code

    previous = listen(forward)
    try:
        with ThreadPoolExecutor(at_once) as pool:
            codes = list(pool.map(run, jobs))
    finally:
        restore(previous)
    # A job that was asked to stop before it could listen died of the signal; it is as resumable as the others.
    if any(codes) and (stopping or Stopped.exit_code in codes):
        raise Stopped("stopped; the same command goes on where it stands")
    _report_failures(jobs, codes)


def _report_failures(jobs: list[Job], codes: list[int]) -> None:
    failed = [(job, code) for job, code in zip(jobs, codes, strict=True) if code]
    if failed:
        error = JobFailed("these runs failed: " + ", ".join(str(job.out) for job, _ in failed))
        error.exit_code = next((code for _, code in failed if code > 0), 1)
        raise error
