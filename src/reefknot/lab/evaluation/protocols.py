"""Perplexity as papers' own programs count it, for a comparison with their figures; ours is in `perplexity`.

- `zaremba`: validation in as many streams as training, in whole windows of as many steps; the test text is one stream.
  (Zaremba et al. 2014 and TensorFlow's tutorial, which Inan et al. 2017 and Press & Wolf 2017 build on.)
- `awd`: validation in 10 streams, test in 1; the total is divided by all rows of the streams although the first of them
  is no target. (Merity et al. 2018, which Pappas & Henderson 2019 build on; it reads 70 tokens at once, which changes
  nothing, since the state is carried.)

Both drop the tokens at the end of the text that do not fill the streams, and have nothing stand before a stream's first
token, which therefore is never scored.

Shapes: B streams, T targets of each, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation.perplexity import losses
from reefknot.lab.runs.result import Counted, Protocol
from reefknot.lab.runs.units import perplexity
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel

ProtocolName = Literal["definition", "zaremba", "awd"]


@dataclass(frozen=True)
class Counting:
    """What a paper's program counts in one text."""

    streams: int
    window: int = 1
    """Targets of a stream are counted in whole windows of so many; what does not fill one is dropped."""
    rows_without_target: int = 0
    """Rows per stream that enter the divisor and not the total."""

    def targets(self, split: Split) -> int:
        """How many targets of each stream are counted; refuses a text that has none."""
        there = split.tokens // self.streams - 1
        if there < self.window:
            raise DataError(
                f"evaluation.protocol: the {split.name} text has {split.tokens:,} tokens, but {self.streams:,} streams "
                f'with a window of {self.window:,} need {self.streams * (self.window + 1):,}; use "definition"'
            )
        return there - there % self.window

    def cut(self, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs x_BT and counted targets y_BT."""
        counted, length = self.targets(split), split.tokens // self.streams
        inputs_BL, ids_BL = (
            torch.from_numpy(np.asarray(each[: self.streams * length], dtype=np.int64)).view(self.streams, length)
            for each in (split.inputs, split.ids)
        )
        return inputs_BL[:, :counted], ids_BL[:, 1 : counted + 1]

    def mean(self, nll_BT: NDArray[np.float32]) -> float:
        """The mean loss of counted targets, as the program divides."""
        streams, counted = map(int, nll_BT.shape)
        total = float(nll_BT.sum(dtype=np.float64))
        return total / (streams * (counted + self.rows_without_target))

    def describe(self, split: Split) -> str:
        """What exactly was counted, in words."""
        counted = self.targets(split)
        length = split.tokens // self.streams
        scored, short = self.streams * counted, length - 1 - counted
        if self.streams == 1:
            cut = f"one stream of {length:,} tokens from an empty state that is carried to its end"
        else:
            cut = f"{self.streams:,} contiguous streams of {length:,} tokens, each from an empty state that is carried"
        told = [f"{split.name} text: {cut}"]
        if left := split.tokens - length * self.streams:
            told.append(f"the last {left:,} tokens of the text are dropped")
        told.append("the first token of a stream is not scored")
        if short:
            told.append(f"the last {short:,} of a stream, which do not fill a window of {self.window:,}, are dropped")
        divisor = self.streams * (counted + self.rows_without_target)
        told.append(f"{scored:,} of {split.tokens:,} tokens are scored and the total is divided by {divisor:,}")
        return "; ".join(told)


def protocol(name: ProtocolName, batch: int, steps: int) -> dict[str, Counting] | None:
    """How a paper's program counts each held-out text; None for our own definition, which counts everything.

    `batch` and `steps` are those of training.
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
    """Return the figures of each text and the definition that holds for them."""
    if not model.encoder.carries:
        raise SettingsError(
            f"papers' programs that read a text through carry a state and {type(model.encoder).__name__} carries none; "
            'count by the protocol "definition"'
        )
    figures: dict[str, Counted] = {}
    for split_name, counting in countings.items():
        split = splits[split_name]
        x_BT, y_BT = counting.cut(split)
        nll_BT = losses(model, x_BT, y_BT, precision=precision)
        mean = counting.mean(nll_BT)
        figures[split_name] = Counted(perplexity=perplexity(mean), nll=mean, tokens=nll_BT.size)
    lines = [
        "perplexity = exp(total negative log-likelihood / divisor), natural logarithm, temperature 1, per token",
        *(counting.describe(splits[split_name]) for split_name, counting in countings.items()),
        f"computed in {precision}, without dropout",
    ]
    return Protocol(name=name, definition=".\n".join(lines), **figures)
