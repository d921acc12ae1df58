"""Read and write files safely: after a crash, a file is either complete or unchanged.

Other modules import this module as `durable`:

    durable.write_json(path, {"epochs": 3})     # writes a temporary file, flushes it to disk and renames it
    durable.read_json(path)                     # raises a DataError if the file is missing or damaged

The functions for bytes, text and tensors work the same way. Every system call that changes the disk goes through
`write_and_sync`, `commit` and `sync`, so that tests can make each call fail. Importing this module does not import
torch, so that commands that only read start fast.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from reefknot.errors import DataError, ResourceError

if TYPE_CHECKING:
    from torch import Tensor

_TEMPORARY_NAME = re.compile(r".+\.tmp-(?P<process_id>\d+)")
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`. If anything fails, the file is either unchanged or complete."""
    temporary = temporary_path(path)
    try:
        with writing(path):
            write_and_sync(temporary, data)
            commit(temporary, path)
    except BaseException:
        remove(temporary)
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
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2)
    return f"{text}\n".encode()


def encode_sealed(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON object that ends with a SHA-256 of itself, so that any change can be detected."""
    checksum = hashlib.sha256(encode_json(body)).hexdigest()
    return encode_json({**body, "sha256": checksum})


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file. Equal tensors give equal bytes.

    Two tensors may not share memory. Tied weights must be stored once, because the model knows which weights are tied.
    """
    from safetensors.torch import save

    _check_shared_memory(tensors)
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(cpu_tensors, {"format": "pt"})


def _check_shared_memory(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if two tensors overlap in memory.

    Addresses are compared, because tensors in one storage need not overlap: cuDNN stores the weights of an LSTM next to
    each other.
    """
    ranges_by_device: dict[str, list[_AddressRange]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        last_index = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        end = start + (last_index + 1) * tensor.element_size()
        ranges_by_device.setdefault(str(tensor.device), []).append(_AddressRange(start, end, name))

    for ranges in ranges_by_device.values():
        ranges.sort()
        for lower_range, upper_range in pairwise(ranges):
            if upper_range.start < lower_range.end:
                raise ValueError(
                    f"'{lower_range.name}' and '{upper_range.name}' share memory; store the tensor under one name"
                )


class _AddressRange(NamedTuple):
    """The addresses of a tensor in memory, from `start` to just before `end`, and the tensor's name."""

    start: int
    end: int
    name: str


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`; raise a DataError if it cannot be read."""
    if not path.exists():
        raise DataError(f"{path} is missing")
    if not path.is_file():
        raise DataError(f"{path} is not a file")
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


def decode_json(data: bytes, source: Path | str) -> Any:
    """Decode JSON; error messages call it `source`."""
    try:
        return json.loads(data.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is truncated or not valid JSON: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and infinity, which Python's decoder accepts."""
    raise ValueError(f"{name} is not valid JSON")


def decode_object(data: bytes, source: Path | str) -> dict[str, Any]:
    """Decode JSON that must be an object; error messages call it `source`."""
    value = decode_json(data, source)
    if not isinstance(value, dict):
        raise DataError(f"{source} does not hold a JSON object")
    return value


def decode_sealed(data: bytes, source: Path | str) -> dict[str, Any]:
    """Decode bytes that `encode_sealed` returned; raise a DataError if they have changed."""
    body = decode_object(data, source)
    body.pop("sha256", None)
    try:
        is_unchanged = encode_sealed(body) == data
    except ValueError:  # a string with a lone surrogate cannot be encoded
        is_unchanged = False
    if not is_unchanged:
        raise DataError(f"{source} does not match its own SHA-256")
    return body


def decode_tensors(data: bytes, source: Path | str) -> dict[str, Tensor]:
    """Decode a safetensors file; error messages call it `source`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        # SafetensorError covers wrong offsets and sizes. The other errors come from number types that torch lacks.
        raise DataError(f"{source} is truncated or not a safetensors file: {error}") from error


# -- the steps of a safe write --------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """Return the temporary name for `path`, in the same folder because a rename is atomic only in one file system.

    Process 42 writes `model.json` as `model.json.tmp-42` first.
    """
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` into a ResourceError."""
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in _DISK_FULL_ERRORS:
            hint = "; free some space and run the same command again"
        raise ResourceError(f"cannot write {path}: {error.strerror or error}{hint}") from error


def write_and_sync(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it to disk. This is not atomic, so no other process may read the file yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        remaining = memoryview(data)
        while remaining:
            bytes_written = os.write(descriptor, remaining)
            remaining = remaining[bytes_written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path` and flush the new name to disk."""
    os.replace(temporary, path)  # noqa: PTH105 - the system call by its name
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file to disk, or the list of names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder. A failure is ignored, because nothing depends on it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that other code recognises by its name. A kill never leaves the name with some of its files.

    The folder is renamed to a temporary name first. `remove_leftovers` removes what a killed process left. A failure is
    ignored, because nothing depends on it.
    """
    temporary = temporary_path(folder)
    with contextlib.suppress(OSError):
        os.replace(folder, temporary)  # noqa: PTH105 - the system call by its name
        remove(temporary)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files in `folder` whose processes have ended.

    Args:
        folder: The folder of the temporary files.
        name: Remove only those that were to be renamed to this name. By default all.
    """
    for path in folder.glob("*.tmp-*" if name is None else f"{glob.escape(name)}.tmp-*"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and not _is_running(int(match["process_id"])):
            remove(path)


def _is_running(process_id: int) -> bool:
    """Return whether another process with this id is running on this machine."""
    if process_id == os.getpid():
        return False  # this process writes one file at a time, so an older temporary file is not in use
    try:
        os.kill(process_id, 0)  # signal 0 only checks whether the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # the process exists and belongs to another user
    return True
