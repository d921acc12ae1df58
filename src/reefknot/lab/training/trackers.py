"""Optional export of metrics to experiment trackers, in addition to metrics.jsonl.

A tracker is an object that a trainer calls with every line of metrics:

    check_trackers(["tensorboard"])                             # raises an error if a package is missing
    tracker = open_tracker("tensorboard", run, print)
    tracker({"kind": "train", "step": 100, "nll": 5.2})         # writes the scalar train/nll
    tracker.close()

Nothing here is imported unless the user asks for a tracker, and no tracker asks the user anything:

    tensorboard    writes events to RUN/tensorboard
    wandb          writes to RUN/wandb, and uploads only if the user has an API key
    trackio        writes to Trackio's local database, unless the user has set a Space or a server
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from netrc import NetrcParseError, netrc
from typing import Any, Protocol
from urllib.parse import urlparse

from reefknot.errors import SettingsError
from reefknot.extras import missing_packages
from reefknot.lab.runs.folder import RunFolder
from reefknot.storage.progress import Notify

MetricsDict = dict[str, Any]
"""A line of metrics.jsonl as a JSON object."""

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
TRACKERS = tuple(_MODULES)
"""The names of the trackers."""
_PROJECT = "reefknot"
"""Name of the project in wandb and Trackio. The environment variables of both programs override it."""


class Tracker(Protocol):
    """Exports metrics to another program."""

    def __call__(self, line: MetricsDict) -> None:
        """Export every number of a metrics line."""

    def close(self) -> None:
        """Write everything that is still in memory."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise an error if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in _MODULES:
            raise SettingsError(f"--track {name}: must be one of {', '.join(TRACKERS)}")
        package = _import(name)
        if name == "wandb":
            _choose_wandb_mode(_has_wandb_key(package))


def open_tracker(name: str, run: RunFolder, notify: Notify) -> Tracker:
    """Return a tracker of a run.

    If the program of the tracker fails, a message is printed and training continues without the tracker.

    Args:
        name: One of `TRACKERS`.
        run: The run folder.
        notify: Called with messages for the user, such as where the metrics are.
    """
    openers: dict[str, Callable[[RunFolder, Notify], Tracker]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "trackio": _Trackio,
    }
    return _FailSafe(name, lambda: openers[name](run, notify), notify)


def _import(name: str) -> Any:
    """Import the package of a tracker; raise an error with the command that installs it if it is missing."""
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, _MODULES[name]):
            raise missing_packages([name], f"--track {name}") from error
        raise SettingsError(f"--track {name}: {name} is installed, but importing it fails: {error}") from error


class _FailSafe:
    """A tracker whose errors do not stop training."""

    def __init__(self, name: str, open_program: Callable[[], Tracker], notify: Notify) -> None:
        self._name = name
        self._notify = notify
        self._tracker: Tracker | None = None
        self._attempt(lambda: setattr(self, "_tracker", open_program()))

    def __call__(self, line: MetricsDict) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._attempt(lambda: tracker(line))

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._attempt(tracker.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run an action. If it fails, print the error and stop tracking."""
        try:
            action()
        except Exception as error:  # any error of another program
            self._tracker = None
            self._notify(f"{self._name} failed ({error}); training continues without it")


class _TensorBoard:
    """Writes every number of a metrics line as a scalar to RUN/tensorboard."""

    def __init__(self, run: RunFolder, notify: Notify) -> None:
        self._open_writer = _import("tensorboard").SummaryWriter
        self._folder = run.path / "tensorboard"
        self._writer: Any = None  # opened with the step of the first line

    def __call__(self, line: MetricsDict) -> None:
        if self._writer is None:
            # A killed session may have written points after its last checkpoint. Hide them: they are written again.
            self._writer = self._open_writer(str(self._folder), purge_step=line["step"])
        for tag, value in _scalars(line, line["kind"]):
            self._writer.add_scalar(tag, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _NewLines:
    """Recognises the lines of metrics that no earlier session of the run has written.

    A killed session may have written lines after its last checkpoint, and the next session writes them again.
    """

    def __init__(self, run: RunFolder) -> None:
        self._written = {(line.get("kind"), line.get("step")) for line in run.metrics.read()}

    def __contains__(self, line: MetricsDict) -> bool:
        return (line["kind"], line["step"]) not in self._written


class _Wandb:
    """Writes metrics to RUN/wandb, and uploads them if the user has an API key."""

    def __init__(self, run: RunFolder, notify: Notify) -> None:
        wandb = _import("wandb")
        mode = _choose_wandb_mode(_has_wandb_key(wandb))
        # A resumed run continues under the same id.
        run_id = hashlib.sha256(f"{run.config_hash} {run.path.resolve()}".encode()).hexdigest()[:16]
        self._new_lines = _NewLines(run)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", str(run.path)),
            id=os.environ.get("WANDB_RUN_ID", run_id),
            resume="allow" if mode == "online" else None,
            dir=str(run.path),
            config=run.config,
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        if mode == "offline":
            folder = run.path / "wandb"
            notify(f"wandb is offline and writes to {folder}; `wandb sync {folder}/offline-run-*` uploads it")
        elif mode == "online":
            notify(f"wandb: {self._run.url}")

    def __call__(self, line: MetricsDict) -> None:
        if line in self._new_lines:
            self._run.log(dict(_scalars(line, line["kind"])), step=line["step"])

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key(wandb: Any) -> bool:
    """Return whether wandb would find an API key: in the environment, or in the netrc file for its server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        hosts = netrc(os.environ.get("NETRC")).hosts
    except (OSError, NetrcParseError):
        return False
    return urlparse(wandb.Settings().base_url).hostname in hosts


def _choose_wandb_mode(has_key: bool) -> str:
    """Return the mode of wandb. Without an API key it is never online, because wandb would ask for the key."""
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    if mode not in ("online", "offline", "disabled"):
        raise SettingsError(f"WANDB_MODE={mode}: Reefknot supports online, offline and disabled")
    if mode == "online" and not has_key:
        raise SettingsError(
            "WANDB_MODE=online needs an API key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
        )
    return mode


class _Trackio:
    """Writes metrics to Trackio, which stores them on this machine unless the user has set a Space or a server."""

    def __init__(self, run: RunFolder, notify: Notify) -> None:
        trackio = _import("trackio")
        self._new_lines = _NewLines(run)
        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        with redirect_stdout(io.StringIO()):  # Trackio prints messages between the lines of the display
            self._run = trackio.init(
                project=project,
                name=str(run.path),
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        notify(f"trackio: `trackio show --project {project}` shows this run as {run.path}")

    def __call__(self, line: MetricsDict) -> None:
        if line in self._new_lines:
            self._run.log(dict(_scalars(line, line["kind"])), step=line["step"])

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


def _scalars(line: MetricsDict, prefix: str) -> list[tuple[str, float]]:
    """Return the numbers of a metrics line under tags such as `train/wall/seconds`."""
    scalars: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict):
            scalars += _scalars(value, f"{prefix}/{key}")
        elif key not in ("kind", "step") and isinstance(value, int | float):
            scalars.append((f"{prefix}/{key}", float(value)))
    return scalars
