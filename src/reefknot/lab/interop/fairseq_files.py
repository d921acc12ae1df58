"""Read the files of a fairseq model: the checkpoint (model.pt) and its dictionary (dict.txt).

`read_checkpoint` returns the options and tensors of a model, and `read_dictionary` returns its vocabulary.

A checkpoint is a pickle, and unpickling can run arbitrary code. So this module reads it with
`torch.load(weights_only=True)`, which only creates tensors, plain values and the classes that the module allows.
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_LINE, PADDING, START, UNKNOWN
from reefknot.storage import files

SPECIAL_SYMBOLS = (START, PADDING, END_OF_LINE, UNKNOWN)
"""The symbols with the first ids of every dictionary. Its file does not list them. fairseq spells <eos> as </s>."""

# Checkpoints of some versions contain objects that measured the training. These empty classes stand for their classes.
_METER_CLASSES = [
    type(name, (), {"__module__": module})
    for module in ("fairseq.meters", "fairseq.logging.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


@dataclass(frozen=True)
class FairseqCheckpoint:
    """The options and tensors of a checkpoint."""

    path: Path
    arguments: dict[str, Any]
    """Options of the model and of its task, by name."""
    tensors: dict[str, Tensor]
    """Parameters and buffers, by fairseq's names."""

    def get(self, name: str) -> Tensor:
        """Return the tensor with this name, or raise a DataError if it is missing."""
        if name not in self.tensors:
            raise DataError(f"{self.path}: the tensor {name} is missing")
        return self.tensors[name]


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """Read a checkpoint of any fairseq version that has adaptive inputs, without running code from the file."""
    if not path.is_file():
        raise DataError(f"{path}: file not found; pass the checkpoint, such as model.pt")
    entries = _load_safely(path)
    tensors = entries.get("model") if isinstance(entries, dict) else None
    if not _are_named_tensors(tensors):
        raise DataError(f"{path}: not a checkpoint of fairseq: it has no 'model' with named tensors")
    arguments = _to_dict(entries.get("args"))
    sections = entries.get("cfg")  # newer versions
    if isinstance(sections, dict):
        arguments |= _to_dict(sections.get("task")) | _to_dict(sections.get("model"))
    if not arguments:
        raise DataError(f"{path}: not a checkpoint of fairseq: it has neither 'args' nor a 'cfg' with a model")
    return FairseqCheckpoint(path, arguments, tensors)


def _are_named_tensors(stored: Any) -> TypeGuard[dict[str, Tensor]]:
    return isinstance(stored, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in stored.items()
    )


def _load_safely(path: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace, *_METER_CLASSES]):
            warnings.simplefilter("ignore")  # torch warns about the storage of old files; users cannot change it
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        rejected_class = re.search(r"GLOBAL ([\w.]+)", str(error))
        if rejected_class:
            raise DataError(
                f"{path} contains {rejected_class[1]}, which could run arbitrary code: only tensors, plain values and "
                "fairseq's options are read from a checkpoint. If you trust the file, save it again without that object"
            ) from None
        raise DataError(f"{path}: not a checkpoint of torch, or damaged; unpack an archive first") from None


def _to_dict(stored: Any) -> dict[str, Any]:
    """Return options by name. Depending on its version, fairseq stores a namespace or a mapping."""
    options = vars(stored) if isinstance(stored, Namespace) else stored
    return dict(options) if isinstance(options, Mapping) else {}


def read_dictionary(path: Path) -> Vocabulary:
    """Read a dict.txt as a vocabulary with fairseq's ids, in which the special symbols come first.

    The file does not contain the special symbols, so their counts are 0.
    """
    try:
        text = files.read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a dictionary: byte {error.start} is not valid UTF-8") from None
    counts = dict.fromkeys(SPECIAL_SYMBOLS, 0)
    for line_number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        word, _, count = line.rpartition(" ")
        if not word or not (count.isascii() and count.isdecimal()):
            raise DataError(
                f"{path}, line {line_number}: not a dictionary: expected a word and its count, got {line[:60]!r}"
            )
        if word in counts:
            raise DataError(
                f"{path}, line {line_number}: the word {word[:60]!r} is repeated or a special symbol; remove the line"
            )
        counts[word] = int(count)
    return Vocabulary(tuple(counts), tuple(counts.values()), ordered=False)
