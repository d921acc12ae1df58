"""Word vectors as a .safetensors file: `vectors`, and `words` as the bytes of a JSON list, so that any word survives.

JSON spells what no line of text could hold, and as a tensor it may be of any length, which a file's metadata may not.

Shapes: V words, D width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.storage.files import decode_json
from reefknot.vectors.contract import Block, slices
from reefknot.vectors.word_vectors import WordVectors


def read_safetensors(path: Path) -> Iterator[Block]:
    """The words of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            if not {"vectors", "words"} <= set(file.keys()):
                raise DataError(f"{path} holds no word vectors: it needs the tensors vectors and words")
            vectors_VD = file.get_slice("vectors")
            shape, kind = vectors_VD.get_shape(), vectors_VD.get_dtype()
            if len(shape) != 2 or not all(shape) or kind not in ("F16", "F32", "F64"):
                raise DataError(f"{path}: vectors must be a matrix of floating-point numbers, a row for each word")
            words = _words(file.get_tensor("words"), shape[0], path)
            counts_V = file.get_tensor("counts") if "counts" in file.keys() else None  # noqa: SIM118 - no mapping
            if counts_V is not None and (counts_V.shape != (len(words),) or counts_V.dtype != np.int64):
                raise DataError(f"{path}: counts must be whole numbers, one for each word")
            for rows in slices(shape[0], shape[1], bytes_per_number=4):
                with np.errstate(over="ignore"):
                    found = vectors_VD[rows].astype(np.float32)
                yield Block(words[rows], found, None if counts_V is None else counts_V[rows])
    except (SafetensorError, TypeError, ValueError) as error:
        raise DataError(f"{path} is truncated or not a safetensors file: {error}") from error


def _words(spelled: NDArray[Any], number: int, path: Path) -> list[bytes]:
    words = decode_json(spelled.tobytes(), f"{path}, words,")
    if not isinstance(words, list) or not set(map(type, words)) <= {str} or len(words) != number:
        raise DataError(f"{path}: words must be the bytes of a JSON list of {number:,} words, as many as vectors")
    try:
        return [word.encode() for word in words]
    except UnicodeEncodeError:
        raise DataError(f"{path}: a word holds half a character, which no file and no screen takes") from None


def write_safetensors(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words, with their counts where these are known."""
    from safetensors.numpy import save_file

    words = np.frombuffer(json.dumps(vectors.words).encode(), dtype=np.uint8)
    tensors: dict[str, NDArray[Any]] = {"vectors": vectors.vectors_VD, "words": words}
    if vectors.counts is not None:
        tensors["counts"] = vectors.counts
    save_file(tensors, path, {"format": "np"})
    yield len(vectors)
