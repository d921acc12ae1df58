"""Read the files of a fairseq model: the checkpoint (model.pt) and its dictionary (dict.txt).

    checkpoint = read_checkpoint(Path("model.pt"))        # the options and tensors of the model
    vocabulary = read_dictionary(Path("dict.txt"))        # one line per word: the word, a space, its count

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
"""The words with the ids 0 to 3 of every dictionary. dict.txt does not list them. fairseq spells <eos> as </s>."""
_MAX_COUNT_DIGITS = 18  # such a count fits into 64 bits

# Checkpoints of some versions contain meters, objects that measured the training. Loading them needs their classes, and
# fairseq is not installed. These empty classes have the same names.
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

    # Older versions store all options in "args", and newer versions store them in sections of "cfg".
    arguments = _to_dict(entries.get("args"))
    sections = entries.get("cfg")
    if isinstance(sections, dict):
        arguments |= _to_dict(sections.get("task"))
        arguments |= _to_dict(sections.get("model"))
    if not arguments:
        raise DataError(f"{path}: not a checkpoint of fairseq: it has neither 'args' nor a 'cfg' with a model")
    return FairseqCheckpoint(path, arguments, tensors)


def _load_safely(path: Path) -> Any:
    """Return the contents of a checkpoint, or raise a DataError if it is damaged or contains other classes."""
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


def _are_named_tensors(entry: Any) -> TypeGuard[dict[str, Tensor]]:
    if not isinstance(entry, dict):
        return False
    return all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in entry.items())


def _to_dict(options: Any) -> dict[str, Any]:
    """Return options by name. Depending on its version, fairseq stores a namespace, a mapping or nothing."""
    if isinstance(options, Namespace):
        return dict(vars(options))
    if isinstance(options, Mapping):
        return dict(options)
    return {}


def read_dictionary(path: Path) -> Vocabulary:
    """Read a dict.txt as a vocabulary with fairseq's ids, in which the special symbols come first.

    The file does not contain the special symbols, so their counts are 0.
    """
    try:
        text = files.read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a dictionary: byte {error.start} is not valid UTF-8") from None

    counts = dict.fromkeys(SPECIAL_SYMBOLS, 0)  # by word, in the order of the ids
    lines = text.removesuffix("\n").split("\n")
    for line_number, line in enumerate(lines, start=1):
        word, _, count = line.rpartition(" ")
        is_number = count.isascii() and count.isdecimal() and len(count) <= _MAX_COUNT_DIGITS
        if not word or not is_number:
            raise DataError(
                f"{path}, line {line_number}: not a dictionary: expected a word and its count, got {line[:60]!r}"
            )
        if word in counts:
            raise DataError(
                f"{path}, line {line_number}: the word {word[:60]!r} is repeated or a special symbol; remove the line"
            )
        counts[word] = int(count)
    words = tuple(counts)
    return Vocabulary(words, tuple(counts.values()), ordered=False)
