"""The files of a model that fairseq has trained: a checkpoint (model.pt) and its dictionary (dict.txt).

A checkpoint is a pickle, and a pickle can run anything. It is read by torch's loader for weights alone, which builds
tensors, plain values and what is named here, and nothing else.
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.inputs.symbols import END_OF_LINE, PADDING, START, UNKNOWN
from reefknot.storage import files as durable

SPECIAL = (START, PADDING, END_OF_LINE, UNKNOWN)
"""The first ids of every dictionary; none of them is in its file. fairseq spells <eos> as </s>."""

# Clocks and means of the training, for which checkpoints of some years hold objects: read as empty ones of ours.
_METERS = [
    type(name, (), {"__module__": module})
    for module in ("fairseq.meters", "fairseq.logging.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


@dataclass(frozen=True)
class FairseqCheckpoint:
    """What a checkpoint says of its model."""

    path: Path
    arguments: dict[str, Any]
    """The options of the model and of its task."""
    tensors: dict[str, Tensor]
    """The parameters and buffers, by fairseq's names."""

    def get(self, name: str) -> Tensor:
        """A tensor that must be there."""
        if name not in self.tensors:
            raise DataError(f"{self.path}: the tensor {name} is missing")
        return self.tensors[name]


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """A checkpoint of any fairseq that has adaptive inputs, read without running anything in it."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name the checkpoint, such as model.pt")
    match _load(path):
        case {"model": dict(tensors), **rest} if all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            pass
        case _:
            raise DataError(f"{path}: no checkpoint of fairseq: it has no 'model' with tensors by name")
    arguments = _options(rest.get("args"))
    match rest.get("cfg"):
        case dict(sections):
            arguments |= _options(sections.get("task")) | _options(sections.get("model"))
    if not arguments:
        raise DataError(f"{path}: no checkpoint of fairseq: it has neither 'args' nor a 'cfg' with a model")
    return FairseqCheckpoint(path, arguments, tensors)


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace, *_METERS]):
            warnings.simplefilter("ignore")  # of torch to itself, on how old files store numbers
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named:
            raise DataError(
                f"{path} asks for {named[1]}, which could do anything: only tensors, numbers and fairseq's arguments "
                "are read from a checkpoint. Save it again without, from a program that you trust it to"
            ) from None
        raise DataError(f"{path}: no checkpoint of torch, or a damaged one; unpack an archive first") from None


def _options(stored: Any) -> dict[str, Any]:
    """Options by name, in whichever way the years have stored them."""
    found = vars(stored) if isinstance(stored, Namespace) else stored
    return dict(found) if isinstance(found, Mapping) else {}


def read_dictionary(path: Path) -> Vocabulary:
    """The words of a dict.txt under fairseq's own ids, which the bands of its tables go by: the special ones first.

    How often those occurred the file does not say; they count as never seen.
    """
    try:
        text = durable.read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no dictionary: byte {error.start} is not valid UTF-8") from None
    counts = dict.fromkeys(SPECIAL, 0)
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        word, _, count = line.rpartition(" ")
        if not word or not (count.isascii() and count.isdecimal()):
            raise DataError(f"{path}, line {number}: no dictionary: a word and its count expected, {line[:60]!r} found")
        if word in counts:
            raise DataError(f"{path}, line {number}: the word {word[:60]!r} stands in it twice, or is one of ours")
        counts[word] = int(count)
    return Vocabulary(tuple(counts), tuple(counts.values()), ordered=False)
