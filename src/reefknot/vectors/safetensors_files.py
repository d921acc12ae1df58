"""Read and write word vectors in the safetensors format, which can store any word, and counts.

`files.py` calls these functions. A file contains these tensors:

    vectors   V x D, floating point
    words     the bytes of a JSON list of the words, as uint8
    counts    V, int64: how often each word occurs in the training text (optional)

JSON can represent words that a line of text cannot. The list is a tensor because the length of the metadata of a
safetensors file is limited.

Shapes: V words, B words of a block (a part of the file that is read at once), D dimensions.
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
from reefknot.vectors.word_vectors import Block, WordVectors, block_slices


def read_safetensors(path: Path) -> Iterator[Block]:
    """Yield the words, vectors and counts of a file in blocks."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensor_names = set(file.keys())
            if not {"vectors", "words"} <= tensor_names:
                raise DataError(f"{path} contains no word vectors: it needs the tensors vectors and words")

            vectors_VD = file.get_slice("vectors")  # not in memory yet
            _check_matrix(vectors_VD.get_shape(), vectors_VD.get_dtype(), path)
            num_words, dim = vectors_VD.get_shape()
            words = _decode_words(file.get_tensor("words"), num_words, path)
            counts_V = None
            if "counts" in tensor_names:
                counts_V = file.get_tensor("counts")
                _check_counts(counts_V, num_words, path)

            for block in block_slices(num_words, dim, bytes_per_number=4):
                with np.errstate(over="ignore"):
                    vectors_BD = vectors_VD[block].astype(np.float32)
                counts_B = None if counts_V is None else counts_V[block]
                yield Block(words[block], vectors_BD, counts_B)
    except (SafetensorError, TypeError, ValueError) as error:
        raise DataError(f"{path} is truncated or not a safetensors file: {error}") from error


def write_safetensors(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words, with counts if they are known, and yield the number of words written."""
    from safetensors.numpy import save_file

    json_text = json.dumps(vectors.words)
    json_bytes = np.frombuffer(json_text.encode(), dtype=np.uint8)
    tensors: dict[str, NDArray[Any]] = {"vectors": vectors.vectors_VD, "words": json_bytes}
    if vectors.counts is not None:
        tensors["counts"] = vectors.counts
    save_file(tensors, path, {"format": "np"})
    yield len(vectors)


def _check_matrix(shape: list[int], dtype: str, path: Path) -> None:
    is_matrix = len(shape) == 2 and all(shape)
    if not is_matrix or dtype not in ("F16", "F32", "F64"):
        raise DataError(
            f"{path}: vectors must be a matrix of floating-point numbers with a row for each word, "
            f"not {dtype} of shape {tuple(shape)}"
        )


def _check_counts(counts_V: NDArray[Any], num_words: int, path: Path) -> None:
    if counts_V.shape != (num_words,) or counts_V.dtype != np.int64:
        raise DataError(f"{path}: counts must be {num_words:,} numbers of type int64, one for each word")


def _decode_words(json_bytes: NDArray[Any], num_words: int, path: Path) -> list[bytes]:
    """Return the words, encoded in UTF-8, from the bytes of a JSON list."""
    words = decode_json(json_bytes.tobytes(), f"{path}, words,")
    is_list_of_strings = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not is_list_of_strings or len(words) != num_words:
        raise DataError(f"{path}: words must be the bytes of a JSON list of {num_words:,} strings, one for each vector")
    try:
        return [word.encode() for word in words]
    except UnicodeEncodeError:
        raise DataError(
            f"{path}: a word contains a lone surrogate, which cannot be encoded as UTF-8; remove the word"
        ) from None
