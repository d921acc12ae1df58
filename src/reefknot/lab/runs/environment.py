"""Record the environment of a run: the machine, the versions, the code and the command.

`capture_environment` returns what a run folder stores as environment.json. These records are published, so they contain
no user name, host name or path of a home folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

_PACKAGE = Path(__file__).resolve().parents[2]


def capture_environment() -> dict[str, Any]:
    """Return the environment of this process as plain JSON values."""
    commit, dirty = _git_revision()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": numpy.__version__,
        "reefknot": _package_version(),
        "commit": commit,
        "dirty": dirty,
        "source_sha256": source_sha256(),
        "command": _command_line(),
    }


def peak_memory_bytes(device: torch.device | str) -> int:
    """Return the peak memory of this process: allocated on a CUDA device, or resident on the host."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not ru_maxrss: on Linux a child process inherits it, so a small child of a large process would seem large.
        (peak,) = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(peak) * 1024
    except (OSError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _package_version() -> str | None:
    try:
        return importlib.metadata.version("reefknot")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Return the model name of the CPU if the system reports it, else the processor architecture."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _git_revision() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout this package runs from, and whether files differ from it.

    The variable REEFKNOT_COMMIT gives the commit on a machine that has the files without their history, or with an
    older history. `script/papers` verifies this commit.
    """
    given_commit = os.environ.get("REEFKNOT_COMMIT") or None
    # An installed copy may lie inside another project's checkout (in its virtual environment), so the checkout
    # counts only if it tracks this file.
    if _run_git("ls-files", "--error-unmatch", __file__) is not None:
        commit, status = _run_git("rev-parse", "HEAD"), _run_git("status", "--porcelain")
        if commit and (status == "" or not given_commit):
            return commit, None if status is None else bool(status)
    return given_commit, None


def _run_git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails or is not installed."""
    # Variables such as GIT_DIR, which git sets while it runs a hook, would point to another repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(_PACKAGE), *arguments]
    try:
        completed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()


def source_sha256(package: Path = _PACKAGE) -> str:
    """Return a hash of the path and content of every .py and .toml file of the package.

    The hash identifies the code even if git is not available.
    """
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".toml")]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in files):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _command_line() -> str:
    """Return the command line as a user would type it, with ~ for the home folder."""
    program = Path(sys.argv[0])
    name = "reefknot" if program.name == "__main__.py" and program.parent.name == "reefknot" else program.name
    command = shlex.join([name, *sys.argv[1:]]).encode(errors="replace").decode()
    home = str(Path.home())
    if home == "/":
        return command
    # The home folder must end here: /home/ann is not part of /home/anna.
    return re.sub(rf"{re.escape(home)}(?![^/'\s:,])", "~", command)
