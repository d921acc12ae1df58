"""Files with the loss of every token of a text, which `rk.hf.score_tokens` writes and `reefknot compare` reads.

A file in the safetensors format contains these tensors:

    nll       N, float32: negative log-likelihood of each token, in nats
    targets   N, int64: ids of these tokens; two files can be compared if the ids are the same
    windows   2, int64: number of tokens that a window reads before the tokens that it scores, and number of the latter
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reefknot.errors import DataError
from reefknot.storage.files import read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"


class TokenScores(NamedTuple):
    """The loss of every token of a text."""

    nll: Tensor
    targets: Tensor
    windows: Tensor


def write_token_scores(path: Path, scores: TokenScores) -> None:
    """Write a file of scores. Its name must end in `.safetensors`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, scores._asdict())


def read_token_scores(path: Path) -> TokenScores:
    """Read a file of scores; raise a `DataError` if it is another file."""
    tensors = read_tensors(path)
    if tensors.keys() != set(TokenScores._fields):
        names = ", ".join(sorted(tensors))
        raise DataError(f"{path} does not contain scores of rk.hf.score_tokens: it has the tensors {names}")
    scores = TokenScores(**tensors)
    if scores.nll.dim() != 1 or scores.nll.shape != scores.targets.shape or scores.windows.shape != (2,):
        raise DataError(
            f"{path}: nll and targets must have one number per token, and windows two; score the text again"
        )
    return scores
