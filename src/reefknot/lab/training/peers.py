"""Notice that another process of the same training has ended, instead of waiting for it for hours.

The processes that torchrun starts wait for one another in every update. `PeerWatch` runs in a thread of each process:

    with PeerWatch(rank, size):
        train()

Every few seconds, it changes a value in the store that connects the processes. If another process stops changing its
value, or has reported an error, this process prints a message and exits with code 75. A killed process also makes the
next collective operation fail. `convert_error` turns this error into a message.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from reefknot.errors import ReefknotError, Stopped

INTERVAL_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""A process that has not changed its value for this long has ended, or its machine cannot be reached."""
GRACE_SECONDS = 5.0
"""Time in which this process can end by itself after another process has reported an error."""
_STORE_TIMEOUT = timedelta(seconds=15)
_CONNECTION_ERRORS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL")
"""Texts in the errors that gloo and NCCL raise if another process has ended."""


class PeerWatch:
    """Watches the other processes while a `with` block runs.

    Args:
        rank: The rank of this process.
        size: The number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._stopping = threading.Event()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
        self._store = dist.PrefixStore(f"reefknot-{attempt}", store)  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeerWatch:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this process ends."""
        reason = str(error) if isinstance(error, ReefknotError) else type(error).__name__
        with suppress(RuntimeError):  # the process that holds the store may have ended
            self._store.set(f"failed-{self.rank}", reason)

    def convert_error(self, error: RuntimeError) -> Stopped | None:
        """Return the message for an error of a collective operation, or None if the error has another cause."""
        if not isinstance(error, dist.DistError) and not any(text in str(error) for text in _CONNECTION_ERRORS):
            return None
        reason = None
        with suppress(RuntimeError):
            reason = self._find_failure()
        return Stopped(_describe_end(reason or "another process of this training has ended"))

    def _watch(self) -> None:
        """Change the value of this process, and compare the values of the others, until the block ends."""
        last_values = dict.fromkeys(range(self.size), b"")
        last_changes = dict.fromkeys(range(self.size), time.monotonic())
        while not self._stopping.wait(INTERVAL_SECONDS):
            reason = None
            with suppress(RuntimeError):  # if the store cannot be reached, no value changes
                self._store.set(f"alive-{self.rank}", str(time.monotonic()))
                reason = self._find_failure()
                for rank in range(self.size):
                    value = self._read(f"alive-{rank}")
                    if value != last_values[rank]:
                        last_values[rank] = value
                        last_changes[rank] = time.monotonic()
            for rank, last_change in last_changes.items():
                if time.monotonic() - last_change > SILENCE_SECONDS:
                    reason = reason or f"process {rank} has ended or cannot be reached"
            # If all processes end at the same time, this process has ended before the grace period is over.
            if reason and not self._stopping.wait(GRACE_SECONDS):
                print(f"reefknot: {_describe_end(reason)}", file=sys.stderr, flush=True)
                os._exit(Stopped.exit_code)  # the main thread may be waiting inside a library

    def _find_failure(self) -> str | None:
        """Return the error that another process has reported."""
        for rank in range(self.size):
            message = self._read(f"failed-{rank}").decode()
            if message and rank != self.rank:
                return f"process {rank} has ended: {message}"
        return None

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""


def _describe_end(reason: str) -> str:
    return f"{reason}. This process ends, too; run the same command again to continue from the last checkpoint"
