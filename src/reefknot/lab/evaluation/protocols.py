"""Perplexity as computed by the programs of the papers, to compare with their results.

`get_protocol` returns the rules of a program for each text, and `score_by_protocol` applies them. Our own definition,
which scores every token exactly once, is in `perplexity.py`. A stream is a contiguous part of the text that is read in
order; all streams are read in parallel. There are two protocols:

- `zaremba`: The validation text is split into streams and full windows as in training; the test text is one stream.
  (Zaremba et al. 2014 and TensorFlow's tutorial, which Inan et al. 2017 and Press & Wolf 2017 build on.)
- `awd`: The validation text is read in 10 streams, the test text as one stream. The total loss is divided by the number
  of all tokens of the streams, although the first token of a stream is not a target. (Merity et al. 2018, which Pappas
  & Henderson 2019 build on. Their program reads 70 tokens at once, which changes nothing, because the state is
  carried.)

Both protocols drop the tokens at the end of the text that do not fill the streams. In both, there is no input before
the first token of a stream, so that token is never scored.

Shapes: B streams, T targets per stream, L tokens per stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation.perplexity import stream_losses
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.result import Protocol, ProtocolName, ProtocolScores
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel


@dataclass(frozen=True)
class Counting:
    """How the program of a paper scores one text."""

    streams: int
    """Number of streams that the text is split into."""
    window: int = 1
    """Number of targets that the program reads at once. Targets at the end of a stream that do not fill a window are
    dropped."""
    rows_without_target: int = 0
    """Number of tokens per stream that count in the divisor but have no loss."""

    def targets_per_stream(self, split: Split) -> int:
        """Return the number of scored targets per stream. Raise an error if there are none."""
        num_available = split.tokens // self.streams - 1
        if num_available < self.window:
            raise DataError(
                f"evaluation.protocol: the {split.name} text has {split.tokens:,} tokens, but {self.streams:,} streams "
                f'with a window of {self.window:,} need {self.streams * (self.window + 1):,}; use "definition"'
            )
        return num_available - num_available % self.window

    def inputs_and_targets(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the inputs inputs_BT and the scored targets targets_BT."""
        num_targets = self.targets_per_stream(split)
        inputs_BL = self._split_into_streams(split.inputs)
        ids_BL = self._split_into_streams(split.ids)
        return inputs_BL[:, :num_targets], ids_BL[:, 1 : num_targets + 1]

    def _split_into_streams(self, ids: NDArray[np.int32]) -> Tensor:
        """Return the ids of each stream, ids_BL. Tokens that do not fill the streams are dropped."""
        length = len(ids) // self.streams
        used_ids = np.asarray(ids[: self.streams * length], dtype=np.int64)
        return torch.from_numpy(used_ids).view(self.streams, length)

    def mean(self, nll_BT: NDArray[np.float32]) -> float:
        """Return the mean loss of the scored targets, with the divisor of the program."""
        streams, num_targets = map(int, nll_BT.shape)
        total = float(nll_BT.sum(dtype=np.float64))
        return total / (streams * (num_targets + self.rows_without_target))

    def describe(self, split: Split) -> str:
        """Describe in words which tokens are scored."""
        num_targets = self.targets_per_stream(split)
        length = split.tokens // self.streams
        if self.streams == 1:
            reading = f"one stream of {length:,} tokens; the state is empty at its start and is carried to its end"
        else:
            reading = (
                f"{self.streams:,} contiguous streams of {length:,} tokens; each starts with an empty state, which is "
                "carried to its end"
            )
        clauses = [f"{split.name} text: {reading}"]

        num_outside_streams = split.tokens - length * self.streams
        if num_outside_streams:
            clauses.append(f"the last {num_outside_streams:,} tokens of the text are dropped")
        clauses.append("the first token of a stream is not scored")
        num_outside_windows = length - 1 - num_targets
        if num_outside_windows:
            clauses.append(
                f"the last {num_outside_windows:,} of a stream, which do not fill a window of {self.window:,}, are "
                "dropped"
            )

        num_scored = self.streams * num_targets
        divisor = self.streams * (num_targets + self.rows_without_target)
        clauses.append(f"{num_scored:,} of {split.tokens:,} tokens are scored and the total is divided by {divisor:,}")
        return "; ".join(clauses)


def get_protocol(name: ProtocolName, batch: int, steps: int) -> dict[str, Counting] | None:
    """Return how the program of a paper scores each held-out text, by split; None for our definition.

    Args:
        name: Name of the protocol.
        batch: Number of streams in training.
        steps: Number of tokens per window in training.
    """
    if name == "zaremba":
        return {"valid": Counting(batch, window=steps), "test": Counting(1)}
    if name == "awd":
        return {"valid": Counting(10, rows_without_target=1), "test": Counting(1, rows_without_target=1)}
    return None


def score_by_protocol(
    name: str,
    model: LanguageModel,
    splits: Mapping[str, Split],
    countings: Mapping[str, Counting],
    precision: str = "float32",
) -> Protocol:
    """Score each text as the program of a paper does, and describe how.

    Args:
        name: Name of the protocol, for messages.
        model: The language model.
        splits: The texts, by split.
        countings: How to score each text, by split, as returned by `get_protocol`.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
    """
    if not model.encoder.carries_state:
        raise SettingsError(
            f"the protocol {name} needs an encoder that carries its state, but {type(model.encoder).__name__} carries "
            'none; use the protocol "definition"'
        )
    scores: dict[str, ProtocolScores] = {}
    for split_name, counting in countings.items():
        split = splits[split_name]
        inputs_BT, targets_BT = counting.inputs_and_targets(split)
        nll_BT = stream_losses(model, inputs_BT, targets_BT, precision=precision)
        mean_nll = counting.mean(nll_BT)
        scores[split_name] = ProtocolScores(perplexity=perplexity(mean_nll), nll=mean_nll, tokens=nll_BT.size)

    descriptions = [counting.describe(splits[split_name]) for split_name, counting in countings.items()]
    definition = [
        "perplexity = exp(total negative log-likelihood / divisor), natural logarithm, temperature 1, per token",
        *descriptions,
        f"computed in {precision}, without dropout",
    ]
    return Protocol(name=name, definition=".\n".join(definition), **scores)
