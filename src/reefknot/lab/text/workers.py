"""Run many independent jobs in several processes, and keep the finished ones if the program is killed.

A job is a call of a function with JSON arguments. Its result is written to a JSON file, and a job whose file exists is
not run again:

    jobs = [ShardJob("reefknot.lab.text.shards:count_words", {...}, folder / "0.json", size=1000), ...]
    results = run_shard_jobs(jobs, "train: words counted", notify)

The function's first argument is a callback that receives the number of bytes that were processed since the last call.

Workers are new Python processes (`python -m reefknot.lab.text.workers`), not forks, because the parent may hold threads
and GPUs, and not `multiprocessing`, because it would import the user's script again. They receive jobs as lines of JSON
on standard input, and end when it is closed, so that no worker outlives its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from reefknot import errors
from reefknot.errors import ReefknotError, ResourceError
from reefknot.storage import files as durable
from reefknot.storage.progress import Notify

OnBytes = Callable[[int], None]

SEQUENTIAL_BYTES = 4 << 20
"""Less work than this is done in this process, because starting workers takes longer."""
_PROGRESS_SECONDS = 3.0  # between two lines of progress
_MEGABYTE = 1_000_000
_num_workers: int | None = None


def set_num_workers(num_workers: int | None) -> None:
    """Set the number of processes that prepare a text. With None, it is the number of cores."""
    global _num_workers
    _num_workers = num_workers


def get_num_workers() -> int:
    """Return the number of processes that prepare a text."""
    return _num_workers or num_cores()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class ShardJob:
    """A call of a function whose result is stored in a file."""

    function: str
    """The function, as "module:name"."""
    arguments: dict[str, Any]
    """Keyword arguments that JSON can represent."""
    result_path: Path
    """The JSON file of the result. It exists if the job is finished."""
    size: int
    """Number of bytes to process, for the progress."""


def run_shard_jobs(jobs: Sequence[ShardJob], description: str, notify: Notify) -> Iterator[Any]:
    """Run the jobs that are not finished yet, and yield the results of all jobs in their order.

    Results are read one at a time, so that only one of them is in memory.

    Args:
        jobs: The jobs.
        description: What is done, for lines of progress.
        notify: Called with lines of progress: how much is done, how fast, and the time left.
    """
    unfinished_jobs = [job for job in jobs if not job.result_path.exists()]
    progress = _Progress(description, sum(job.size for job in unfinished_jobs), notify)
    num_workers = min(get_num_workers(), len(unfinished_jobs))
    if num_workers <= 1 or progress.total < SEQUENTIAL_BYTES:
        for job in unfinished_jobs:
            _run_job(job.function, job.arguments, job.result_path, progress.add)
    else:
        _run_in_workers(unfinished_jobs, num_workers, progress)
    progress.finish()
    return (durable.read_json(job.result_path) for job in jobs)


def _run_job(function: str, arguments: dict[str, Any], result_path: Path, on_bytes: OnBytes) -> None:
    module_name, _, name = function.partition(":")
    result = getattr(importlib.import_module(module_name), name)(on_bytes, **arguments)
    with durable.writing(result_path):
        durable.write_bytes(result_path, json.dumps(result, separators=(",", ":")).encode())


class _Progress:
    """Counts processed bytes, and reports them every few seconds."""

    def __init__(self, description: str, total: int, notify: Notify) -> None:
        self.total = total
        self._description = description
        self._notify = notify
        self._done = 0
        self._start = self._last_report = time.monotonic()
        self._has_reported = False

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last_report > _PROGRESS_SECONDS:
            self._last_report = now
            self._has_reported = True
            rate = self._done / (now - self._start)
            seconds_left = max(self.total - self._done, 0) / max(rate, 1)
            self._notify(
                f"{self._description}: {self._done / _MEGABYTE:,.1f} of {self.total / _MEGABYTE:,.1f} MB,"
                f" {rate / _MEGABYTE:,.1f} MB/s, {_format_seconds(seconds_left)} left"
            )

    def finish(self) -> None:
        """Report the end, if there was a line of progress before."""
        if self._has_reported:
            seconds = time.monotonic() - self._start
            self._notify(f"{self._description}: {self.total / _MEGABYTE:,.1f} MB in {_format_seconds(seconds)}")


def _format_seconds(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


# -- the parent ----------------------------------------------------------------------------------------------------


def _public_class(error: ReefknotError) -> str:
    """Return the name of the error's class in `reefknot.errors`, by which the parent process raises it again."""
    return next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)


def _run_in_workers(jobs: Sequence[ShardJob], num_workers: int, progress: _Progress) -> None:
    """Run jobs in worker processes. If one job fails, all workers are ended and its error is raised."""
    job_queue: queue.SimpleQueue[ShardJob | None] = queue.SimpleQueue()
    for job in jobs:
        job_queue.put(job)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_start_worker()) for _ in range(num_workers)]
        for worker in workers:
            job_queue.put(None)  # ends one worker
            threading.Thread(target=_serve, args=(worker, job_queue, messages), daemon=True).start()
        num_running = num_workers
        while num_running:
            message = messages.get()
            if "bytes" in message:
                progress.add(message["bytes"])
            elif "error" in message:
                raise getattr(errors, message["error"])(message["text"])
            elif "end" in message:
                num_running -= 1


@contextlib.contextmanager
def _start_worker() -> Iterator[subprocess.Popen[str]]:
    source_folder = str(Path(__file__).parents[3])  # the folder that holds the package
    search_path = os.pathsep.join(filter(None, [source_folder, os.environ.get("PYTHONPATH")]))
    worker = subprocess.Popen(
        [sys.executable, "-m", "reefknot.lab.text.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": search_path, "TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def _serve(
    worker: subprocess.Popen[str],
    job_queue: queue.SimpleQueue[ShardJob | None],
    messages: queue.SimpleQueue[dict[str, Any]],
) -> None:
    """Give jobs to a worker until there are none left, and pass its messages on."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    while (job := job_queue.get()) is not None:
        request = {"function": job.function, "arguments": job.arguments, "result": str(job.result_path)}
        with contextlib.suppress(OSError):
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        for line in worker.stdout:
            message = json.loads(line)
            messages.put(message)
            if "done" in message:
                break
        else:
            text = f"a process that prepares the text ended with code {worker.wait()}; "
            text += "if memory ran out, use fewer --workers; run the same command again to continue"
            messages.put({"error": ResourceError.__name__, "text": text})
            return
    messages.put({"end": True})


@contextlib.contextmanager
def work_folder(cache: Path, entry: Path, notify: Notify) -> Iterator[Path]:
    """Yield the folder that keeps the finished jobs of a cache entry until the entry is complete.

    If the entry is missing, the folder is locked, so that two processes do not prepare the same text at the same time.
    An error leaves the folder, and the next attempt continues there.
    """
    folder = cache / "work" / entry.name
    if entry.exists():
        yield folder
        return
    with durable.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = (cache / "work" / f"{entry.name}.lock").open("a")
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify("another process is preparing the same text; waiting for it")
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield folder
        durable.remove(folder)


# -- a worker ------------------------------------------------------------------------------------------------------


def _work(requests: IO[str], answers: IO[str]) -> None:
    """Run the jobs that arrive as lines of JSON, and write progress, errors and the ends of jobs as lines of JSON."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in requests:
        request = json.loads(line)
        try:
            _run_job(
                request["function"],
                request["arguments"],
                Path(request["result"]),
                lambda num_bytes: answer({"bytes": num_bytes}),
            )
        except ReefknotError as error:
            answer({"error": _public_class(error), "text": str(error)})
        except MemoryError:
            answer({"error": ResourceError.__name__, "text": "out of memory; use fewer --workers"})
        answer({"done": True})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    with contextlib.suppress(BrokenPipeError):
        _work(sys.stdin, sys.stdout)
