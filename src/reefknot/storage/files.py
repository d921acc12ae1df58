"""Files that are complete or absent: written to a temporary file, flushed to disk, then renamed.

Every system call that changes the disk goes through `put`, `commit` and `sync`, so that tests can make each one fail.
Importing this module does not import torch, so that commands that only read start fast.
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
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def temporary(path: Path) -> Path:
    """Return the temporary name for `path`, in the same folder because a rename is atomic only in one file system."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in `folder` whose processes have ended."""
    for path in folder.glob("*.tmp-*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder. A failure is ignored, because nothing depends on it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # this process writes one file at a time, so an older temporary file is not in use
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` into a ResourceError."""
    try:
        yield
    except OSError as error:
        hint = "; free some space and run the same command again" if error.errno in _DISK_FULL else ""
        raise ResourceError(f"cannot write {path}: {error.strerror or error}{hint}") from error


def put(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it to disk. This is not atomic, so no other process may read the file yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(prepared: Path, path: Path) -> None:
    """Rename `prepared` to `path` and flush the new name to disk."""
    os.replace(prepared, path)  # noqa: PTH105 - the system call by its name
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`. If anything fails, the file is either unchanged or complete."""
    prepared = temporary(path)
    try:
        with writing(path):
            put(prepared, data)
            commit(prepared, path)
    except BaseException:
        remove(prepared)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` with `value` as JSON. NaN and infinity raise a ValueError, as JSON has neither."""
    write_bytes(path, encode_json(value))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the content of `path` with `tensors` in the safetensors format."""
    write_bytes(path, encode_tensors(tensors))


def encode_json(value: Any) -> bytes:
    """Return the bytes of a JSON file. NaN and infinity raise a ValueError."""
    return (json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2) + "\n").encode()


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file. Equal tensors give equal bytes.

    Two tensors may not share memory. Tied weights must be stored once, because the model knows which weights are tied.
    """
    from safetensors.torch import save

    _reject_overlap(tensors)
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})


def _reject_overlap(tensors: Mapping[str, Tensor]) -> None:
    # Tensors may be neighbours in one storage, as the weights of an LSTM are in cuDNN.
    spans_by_device: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            length = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            spans = spans_by_device.setdefault(str(tensor.device), [])
            spans.append((start, start + length * tensor.element_size(), name))
    for spans in spans_by_device.values():
        spans.sort()
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"'{name}' and '{other}' share memory; store the tensor under one name")


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`; raise a DataError if it cannot be read."""
    if not path.is_file():
        raise DataError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`; raise a DataError if the file is missing or truncated."""
    return decode_json(read_bytes(path), path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path`; raise a DataError if the file is missing or truncated."""
    return decode_tensors(read_bytes(path), path)


def decode_json(data: bytes, where: Path | str) -> Any:
    """Decode JSON; `where` names its origin in error messages."""
    try:
        return json.loads(data.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is truncated or not valid JSON: {error}") from error


def decode_object(data: bytes, where: Path | str) -> dict[str, Any]:
    """Decode JSON that must be an object."""
    value = decode_json(data, where)
    if not isinstance(value, dict):
        raise DataError(f"{where} does not hold a JSON object")
    return value


def decode_tensors(data: bytes, where: Path | str) -> dict[str, Tensor]:
    """Decode a safetensors file; `where` names its origin in error messages."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        # SafetensorError covers wrong offsets and sizes. The other errors come from number types that torch lacks.
        raise DataError(f"{where} is truncated or not a safetensors file: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
