"""Record the environment of a run: the machine, the versions, the code and the command.

`capture_environment` returns the content of environment.json in a run folder. These files are published, so they
contain no user name, host name or path of a home folder.
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
from typing import Any, NamedTuple

import numpy
import torch

_PACKAGE = Path(__file__).resolve().parents[2]  # the folder of the package reefknot


def capture_environment() -> dict[str, Any]:
    """Return the environment of this process as plain JSON values."""
    revision = _git_revision()
    if hasattr(os, "sched_getaffinity"):
        num_cpus: int | None = len(os.sched_getaffinity(0))  # only the CPUs that this process may use
    else:
        num_cpus = os.cpu_count()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpus": num_cpus,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": numpy.__version__,
        "reefknot": _package_version(),
        "commit": revision.commit,
        "dirty": revision.dirty,
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
        status = Path("/proc/self/status").read_text()
        (peak_kilobytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(peak_kilobytes) * 1024
    except (OSError, ValueError):
        bytes_per_unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def source_sha256(package: Path = _PACKAGE) -> str:
    """Return a hash of the path and content of every .py and .toml file of the package.

    The hash identifies the code even if git is not available.
    """
    paths_by_name: dict[str, Path] = {}
    for path in package.rglob("*"):
        if path.suffix in (".py", ".toml"):
            paths_by_name[path.relative_to(package).as_posix()] = path

    digest = hashlib.sha256()
    for name, path in sorted(paths_by_name.items()):
        content_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content_sha256}\n".encode())
    return digest.hexdigest()


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
    if match:
        return match[1].strip()
    return platform.processor() or platform.machine()


class _Revision(NamedTuple):
    """The version of the code. A field is None if it is not known."""

    commit: str | None
    dirty: bool | None
    """Whether files of the checkout differ from the commit."""


def _git_revision() -> _Revision:
    """Return the commit of the checkout that this package runs from.

    The variable REEFKNOT_COMMIT gives the commit on a machine that has the files without their history, or with an
    older history. `script/papers` verifies this commit.
    """
    commit_variable = os.environ.get("REEFKNOT_COMMIT") or None
    # An installed copy may lie inside another project's checkout (in its virtual environment), so the checkout
    # counts only if it tracks this file.
    if _run_git("ls-files", "--error-unmatch", __file__) is not None:
        commit = _run_git("rev-parse", "HEAD")
        changed_files = _run_git("status", "--porcelain")
        if commit and (changed_files == "" or not commit_variable):
            dirty = None if changed_files is None else bool(changed_files)
            return _Revision(commit, dirty)
    return _Revision(commit_variable, dirty=None)


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


def _command_line() -> str:
    """Return the command line as a user would type it, with ~ for the home folder."""
    program = Path(sys.argv[0])
    program_name = program.name
    if program_name == "__main__.py" and program.parent.name == "reefknot":
        program_name = "reefknot"  # python -m reefknot
    command = shlex.join([program_name, *sys.argv[1:]])
    command = command.encode(errors="replace").decode()  # arguments may contain bytes that are not UTF-8
    home = str(Path.home())
    if home == "/":
        return command
    # The home folder must end here: /home/ann is not part of /home/anna.
    return re.sub(rf"{re.escape(home)}(?![^/'\s:,])", "~", command)
