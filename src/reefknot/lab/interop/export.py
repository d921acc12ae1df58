"""Export a run for other programs: `reefknot export RUN --format hf | onnx | pt2 -o FOLDER`.

Start with `export_run`. It writes everything into a temporary folder next to FOLDER, and renames it at the end, so that
an interrupted export leaves no incomplete folder. `huggingface.py` and `graphs.py` write the formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from reefknot.errors import SettingsError
from reefknot.extras import require_extra
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.storage.files import commit, remove, remove_leftovers, temporary_path, writing
from reefknot.storage.progress import Notify, silent

FORMATS = ("hf", "onnx", "pt2")
DEFAULT_K = 10
"""Number of best words that `topk` returns by default."""


@dataclass(frozen=True)
class ExportRequest:
    """A request to export a run. The fields are the options of `reefknot export`."""

    format: str
    output: Path
    kind: str | None = None
    k: int | None = None


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    request: ExportRequest
    parameters: int
    details: dict[str, Any]
    """More about the exported model, by name."""

    def record(self) -> dict[str, Any]:
        """Return the result for programs, as JSON values."""
        values = {"output": str(self.request.output), "format": self.request.format, "parameters": self.parameters}
        return values | self.details

    def text(self) -> str:
        """Return the result as readable text."""
        text = f"{self.request.output}: {self.request.format}, {self.parameters:,} parameters"
        for name, value in self.details.items():
            text += f", {name} {value:.1g} from torch" if name == "difference" else f", {name} {value}"
        return text


def check_request(request: ExportRequest) -> None:
    """Raise an error if an option is invalid, has no effect, or needs a package that is not installed."""
    from reefknot.nn.models.scorer import ScorerKind

    if request.format not in FORMATS:
        raise SettingsError(
            f"--format {request.format}: must be one of {', '.join(FORMATS)}; `reefknot vectors export` writes word "
            "vectors in other formats"
        )
    if request.format == "hf":
        for option, value in (("--kind", request.kind), ("--k", request.k)):
            if value is not None:
                raise SettingsError(f"{option} has no effect with --format hf; leave {option} out")
    if request.kind is not None and request.kind not in get_args(ScorerKind):
        raise SettingsError(f"--kind {request.kind}: must be one of {', '.join(get_args(ScorerKind))}")
    if request.k is not None and request.kind != "topk":
        raise SettingsError("--k has no effect without --kind topk; add --kind topk or leave --k out")
    if request.output.exists():
        raise SettingsError(f"{request.output} exists already; choose another folder, or remove it first")
    if request.format == "hf":
        from reefknot.lab.interop.huggingface import check_transformers

        check_transformers()
    if request.format == "onnx":
        require_extra("onnx", "--format onnx")


def export_run(trained: TrainedRun[Any, Any, Any], request: ExportRequest, notify: Notify = silent) -> Exported:
    """Write a run in the requested format. Call `check_request` first.

    Args:
        trained: The run of a language model or, for the format hf, of a translator.
        request: The format and its options.
        notify: Called with messages about progress and notes.
    """
    _check_task(trained, request)
    output = request.output
    temporary = temporary_path(output)
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output.parent, output.name)
        temporary.mkdir()
        try:
            details = _write(trained, request, temporary, notify)
            commit(temporary, output)
        except BaseException:
            remove(temporary)
            raise
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    return Exported(request, parameters, details)


def _write(trained: TrainedRun[Any, Any, Any], request: ExportRequest, folder: Path, notify: Notify) -> dict[str, Any]:
    """Write a run into a folder. Return more about the exported model, by name."""
    if request.format == "hf":
        from reefknot.lab.interop.huggingface import export_hf

        export_hf(trained, folder, notify)
        return {}
    from reefknot.lab.interop.graphs import export_graph

    return export_graph(trained, folder, request.format, request.kind, request.k or DEFAULT_K, notify)


def _check_task(trained: TrainedRun[Any, Any, Any], request: ExportRequest) -> None:
    """Raise an error if the format cannot hold the model."""
    path = trained.run.path
    if trained.run.task == "skip_gram":
        raise SettingsError(f"{path} has word vectors and no model of texts; use `reefknot vectors export`")
    if trained.run.task == "translation" and request.format != "hf":
        raise SettingsError(
            f"--format {request.format}: {path} is a translator, which also reads a source; use --format hf"
        )
    if trained.run.task != "translation" and trained.model.encoder.carries_state and request.kind not in (None, "step"):
        raise SettingsError(
            f"--kind {request.kind}: {path} is recurrent, so its graph has one token at a time; use --kind step"
        )
