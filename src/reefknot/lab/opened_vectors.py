"""Word vectors by a path, whatever lies there: a run of any kind, or a file of vectors of any format."""

from __future__ import annotations

from pathlib import Path

from reefknot.lab.trained_run import open_any
from reefknot.storage.progress import Say, silent
from reefknot.vectors.files import read_vectors
from reefknot.vectors.projector import VECTORS
from reefknot.vectors.word_vectors import WordVectors


def open_vectors(path: str | Path, *, device: str = "cpu", say: Say = silent) -> dict[str, WordVectors]:
    """The vectors of a run as `input` and `output`, or as `tied` where both ends have the same; those of a file as
    `vectors`.

    Words of a run are those of its vocabulary, symbols such as <eos> and pieces of words as they stand there, but of
    skip-gram those that it has learned. Vectors of the output are what its classifier makes of a word, not always rows
    of a table. `say` hears what is odd about a file.
    """
    path = Path(path)
    if path.is_dir() and not (path / VECTORS).exists():
        return open_any(path, device).vectors()
    return {"vectors": read_vectors(path, say=say)}
