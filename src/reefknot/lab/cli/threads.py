"""The threads of a process that computes on the CPU: how many there are, and how they wait for one another.

torch divides the work of an operation among the threads of OpenMP. A thread that has finished its share waits for the
others in a loop for several milliseconds before it sleeps. If other programs use the same cores, these loops take the
time that the slower threads need, and training becomes ten times slower or worse. `configure_threads` makes threads
sleep after a few microseconds. OpenMP reads its settings once, so it must be called before torch is imported.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

SPIN_COUNT = 1500
"""Turns of the waiting loop of libgomp, the OpenMP library of torch's packages for Linux: some 40 microseconds.

`script/campaign --only stress` measures the effect. With fewer turns, training on an idle machine is slower: 0.75 of
the speed without turns, 0.89 with 300, 0.96 with 1,000 and 1.00 with 3,000. More turns are slower on a busy machine.
"""
BLOCK_TIME = "1"
"""Milliseconds in the waiting loop of the OpenMP libraries of Intel and LLVM, which torch uses on other systems."""


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


def environment_for_jobs(num_jobs: int) -> dict[str, str]:
    """Return the environment variables of jobs that run at the same time: each gets its share of the CPUs."""
    share = max(1, available_cpus() // num_jobs)
    return {"OMP_NUM_THREADS": str(share), **os.environ}


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return min(_cpus(), _container_cpus() or _cpus())


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _container_cpus(control_groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the number of CPUs that a container may use at a time, rounded up, or None if there is no limit."""
    try:
        quota, period = (control_groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if not quota.isdecimal() or not period.isdecimal():  # without a limit, the quota is "max"
        return None
    return max(1, math.ceil(int(quota) / int(period)))
