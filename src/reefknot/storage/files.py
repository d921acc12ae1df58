"""Files that are there whole or not at all: written beside their place, synced, then renamed.

Every system call that changes the disk goes through `put`, `commit` and `sync`, so that tests can
fail each one. Importing this file does not import torch: reading verbs start fast.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from reefknot.errors import DataError, ResourceError

if TYPE_CHECKING:
    from torch import Tensor

_TEMPORARY = re.compile(r".+\.tmp-(\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def temporary(path: Path) -> Path:
    """Where `path` is prepared: beside it, because a rename is atomic only within one file system."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was preparing in `folder`; another living process keeps its own."""
    for path in folder.glob("*.tmp-*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder. A failure is left for the next attempt: nothing depends on it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # this process prepares one thing at a time, so what it left behind is done with
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's complaints about writing `path` into one sentence."""
    try:
        yield
    except OSError as error:
        advice = "; free some space and run the same command again" if error.errno in _FULL else ""
        raise ResourceError(f"cannot write {path}: {error.strerror or error}{advice}") from error


def put(path: Path, data: bytes) -> None:
    """Write `data` to `path` and wait until the disk has it. Not atomic: for files nobody reads yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(prepared: Path, path: Path) -> None:
    """Rename `prepared` to `path` and wait until the disk knows the new name."""
    os.replace(prepared, path)  # noqa: PTH105 - named as the system call it is
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has what was written: the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; whatever goes wrong, the file is the old one or the new one."""
    prepared = temporary(path)
    try:
        with writing(path):
            put(prepared, data)
            commit(prepared, path)
    except BaseException:
        remove(prepared)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value`. NaN and infinities are a `ValueError`: JSON has no words for them."""
    write_bytes(path, encode_json(value))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace `path` by `tensors` in safetensors format."""
    write_bytes(path, encode_tensors(tensors))


def encode_json(value: Any) -> bytes:
    return (json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2) + "\n").encode()


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file; equal tensors give equal bytes.

    Two names may not hold the same memory: a tie is a fact about the model, not something to store twice.
    """
    from safetensors.torch import save

    _refuse_overlap(tensors)
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})


def _refuse_overlap(tensors: Mapping[str, Tensor]) -> None:
    # Neighbours in one storage are fine: cuDNN keeps the weights of an LSTM like that.
    held: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            spans = held.setdefault(str(tensor.device), [])
            spans.append((start, start + reach * tensor.element_size(), name))
    for spans in held.values():
        spans.sort()
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"'{name}' and '{other}' share memory; give one name per tensor")


def read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """The value in `path`, or a `DataError` when it is missing or torn."""
    return decode_json(read_bytes(path), path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in `path`, or a `DataError` when it is missing or torn."""
    return decode_tensors(read_bytes(path), path)


def decode_json(data: bytes, where: Path | str) -> Any:
    """`where` the data comes from is for the message."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is torn or no JSON: {error}") from error


def decode_object(data: bytes, where: Path | str) -> dict[str, Any]:
    """As `decode_json`, for the files that hold names and values."""
    value = decode_json(data, where)
    if not isinstance(value, dict):
        raise DataError(f"{where} holds no JSON object")
    return value


def decode_tensors(data: bytes, where: Path | str) -> dict[str, Tensor]:
    """`where` the data comes from is for the message."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        # The format checks offsets and sizes itself; what is left is a type of number torch does not have.
        raise DataError(f"{where} is torn or no safetensors file: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
