"""The threads of a process that computes on the CPU: how many there are, and how they wait for one another.

torch divides the work of an operation among the threads of OpenMP. A thread that has finished its share waits for the
others in a loop for several milliseconds before it sleeps. If other programs use the same CPUs, these loops take the
time that the slower threads need, and training becomes ten times slower or worse. Two functions prevent this:

    configure_threads      makes threads sleep after a few microseconds. OpenMP reads its settings once, so a command
                           calls this function before torch is imported.
    count_free_threads     returns a number of threads that leaves out the CPUs that other programs use. Even threads
                           that sleep wait for the slowest thread, which shares its CPU.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

SPIN_COUNT = 1500
"""Turns of the waiting loop of libgomp, the OpenMP library of torch's packages for Linux: some 40 microseconds.

`script/campaign --only stress` measures the effect. With fewer turns, training on an idle machine is slower: 0.75 of
the speed without turns, 0.89 with 300, 0.96 with 1,000 and 1.00 with 3,000. More turns are slower on a busy machine.
"""
BLOCK_TIME = "1"
"""Milliseconds in the waiting loop of the OpenMP libraries of Intel and LLVM, which torch uses on other systems."""
OBSERVATION_SECONDS = 0.3
"""How long `count_free_threads` observes the CPUs. Linux counts their time in steps of 0.01 seconds."""


def configure_threads() -> None:
    """Set how long threads wait before they sleep, and their number if a container limits the CPUs.

    Settings that the user has made are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
        os.environ.setdefault("KMP_BLOCKTIME", BLOCK_TIME)
    limit = _container_cpus()
    if limit is not None and limit < _cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(limit))


def count_free_threads(threads: int) -> int:
    """Return the number of threads for a new run: at most `threads`, and one less for each CPU that others use.

    The settings of the user are kept: the result is `threads` if OMP_NUM_THREADS is set.
    """
    if threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return threads
    busy_before, own_before, started_at = _busy_seconds(), time.process_time(), time.monotonic()
    time.sleep(OBSERVATION_SECONDS)
    busy_after, own_seconds = _busy_seconds(), time.process_time() - own_before
    if busy_before is None or busy_after is None:  # not Linux
        return threads
    busy_cpus = (busy_after - busy_before - own_seconds) / (time.monotonic() - started_at)
    return max(1, min(threads, _cpus() - round(busy_cpus)))


def environment_for_jobs(num_jobs: int) -> dict[str, str]:
    """Return the environment variables of jobs that run at the same time: each gets its share of the free CPUs."""
    if num_jobs == 1:
        return dict(os.environ)
    share = max(1, count_free_threads(available_cpus()) // num_jobs)
    return {"OMP_NUM_THREADS": str(share), **os.environ}


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return min(_cpus(), _container_cpus() or _cpus())


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _busy_seconds(counters: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds that all programs have used the CPUs of this process, or None if the system does not say.

    Programs with a lower priority (`nice`) do not count, because they give way.
    """
    try:
        rows = [line.split() for line in counters.read_text().splitlines()]
    except OSError:
        return None
    if not hasattr(os, "sched_getaffinity"):
        return None
    names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    ticks = 0
    for name, *numbers in rows:
        if name in names:
            # The columns: user, nice, system, idle, waiting for disks, interrupts and time that other machines took.
            user, nice, system, _idle, _waiting, *others = map(int, numbers[:8])
            ticks += user + system + sum(others)
            if os.nice(0) > 0:  # this process has a low priority, too
                ticks += nice
    return ticks / os.sysconf("SC_CLK_TCK")


def _container_cpus(control_groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the number of CPUs that a container may use at a time, rounded up, or None if there is no limit."""
    try:
        quota, period = (control_groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if not quota.isdecimal() or not period.isdecimal():  # without a limit, the quota is "max"
        return None
    return max(1, math.ceil(int(quota) / int(period)))
