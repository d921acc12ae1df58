"""What one step of training changes in the tables (Press & Wolf 2017, section 3).

A step of plain gradient descent changes an input table only in the rows of the words that went in. It changes every row
of an output table: that of word k by the sum of (p_k - 1[k is the target]) h over the tokens. A tied table gets both.
The row of a word that goes in gets little from the output's side unless the word is likely to follow itself, so that
p(i_t), the probability of the current word as the next one, says how far the two parts are in each other's way.

Changes are those of a step at rate 1 on the mean loss of a window's tokens, without dropout: gradients, that is.

Shapes: B streams, T steps, N = B x T tokens of a window, V words, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reefknot.lab.evaluation.frequency import EDGES
from reefknot.lab.text.streams import Streams
from reefknot.nn.encoders.contract import State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.tables import WordTable

SIDES = ("input", "output", "both")
"""The part of a row's change that comes by way of the input, by way of the output, and their sum."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

Norms = NDArray[np.float64]
Changes = dict[str, dict[str, Norms]]
"""Table ("input" and "output", or "tied"), side, and the norm of each row's change."""


class SeparateEnds:
    """A copy of a model whose ends share nothing any more: it computes the same, and each end has its own gradient.

    Their sum over the ends is the gradient of the table that they held together.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = copy.deepcopy(model).eval()
        self.model.input = copy.deepcopy(self.model.input)
        held, classes = model.input.tables(), model.output.tables()
        tied = len(held) == len(classes) and all(one is other for one, other in zip(held, classes, strict=True))
        named = {"tied": held} if tied else {"input": held, "output": classes}
        self._tables = {name: tables for name, tables in named.items() if tables}
        self._copies = {
            "input": _copies(model.input, self.model.input),
            "output": _copies(model.output, self.model.output),
        }

    def changes(self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None) -> tuple[Changes, State]:
        """What a step on one window changes, row by row, and the state that follows the window."""
        self.model.zero_grad()
        losses = self.model.loss(tokens_BT, targets_BT, state)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        found: Changes = {}
        for name, tables in self._tables.items():
            bands = [self._of(table) for table in tables]
            found[name] = {side: np.concatenate([band[side] for band in bands]) for side in SIDES}
        return found, losses.state

    def _of(self, table: WordTable) -> dict[str, Norms]:
        parts = {}
        for end, copies in self._copies.items():
            own = copies.get(table)
            gradient = None if own is None else own.weight.grad
            parts[end] = torch.zeros_like(table.weight) if gradient is None else gradient
        parts["both"] = parts["input"] + parts["output"]
        return {side: part_VD.double().norm(dim=-1).cpu().numpy() for side, part_VD in parts.items()}

    @torch.no_grad()
    def current_words(self, tokens_BT: Tensor, state: State | None = None) -> Norms:
        """p(i_t): the probability of every word to follow itself."""
        logp_BT, _ = self.model.target_log_probs(tokens_BT, tokens_BT, state)
        return logp_BT.double().exp().flatten().cpu().numpy()


def update_rule(
    model: LanguageModel,
    text: NDArray[np.int32],
    counts: Sequence[int],
    *,
    streams: int = 20,
    steps: int = 35,
    windows: int = 10,
) -> dict[str, Any]:
    """What the first windows of a text, read as in training, would change: means over the windows, as plain JSON."""
    separate, counts_V = SeparateEnds(model), np.asarray(counts, dtype=np.int64)
    device = next(model.parameters()).device
    norms: dict[str, dict[str, list[Norms]]] = {}
    current, inputs, repeats, state = [], [], [], None
    read = Streams(text, streams, steps)
    for tokens_BT, targets_BT in (read.window(index) for index in range(min(windows, read.windows))):
        current.append(separate.current_words(tokens_BT.to(device), state))
        changed, state = separate.changes(tokens_BT.to(device), targets_BT.to(device), state)
        for name, sides in changed.items():
            for side, norms_V in sides.items():
                norms.setdefault(name, {}).setdefault(side, []).append(norms_V)
        inputs.append(tokens_BT.flatten().numpy())
        repeats.append((tokens_BT == targets_BT).flatten().numpy())
    return {
        "windows": len(inputs),
        "tokens": sum(map(len, inputs)),
        "types": len(counts_V),
        "words_in": float(np.mean([len(np.unique(each)) for each in inputs])),
        "tables": {name: _summary(sides, counts_V) for name, sides in norms.items()},
        "current": _current(np.concatenate(current), np.concatenate(inputs), np.concatenate(repeats), counts_V),
    }


def by_frequency(values_V: Norms, counts: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
    """The mean of something that every word has, by how often the words were seen in training."""
    counts_V = np.asarray(counts, dtype=np.int64)
    return [
        {"low": low, "high": high, "types": int(inside_V.sum()), "mean": float(values_V[inside_V].mean())}
        for low, high, inside_V in _bands(counts_V)
    ]


def _bands(counts_V: NDArray[np.int64]) -> Iterator[tuple[int, int | None, NDArray[np.bool_]]]:
    """The bands of training counts that have words, with which words these are."""
    for low, above in zip(EDGES, (*EDGES[1:], None), strict=True):
        inside_V = (counts_V >= low) & (counts_V < above if above is not None else True)
        if inside_V.any():
            yield low, None if above is None else above - 1, inside_V


def _summary(sides: dict[str, list[Norms]], counts_V: NDArray[np.int64]) -> dict[str, Any]:
    """Per side, the share of rows that a step changes and by how much, over all words and by their frequency."""
    found = {}
    for side, windows in sides.items():
        norms_WV = np.stack(windows)
        changed_V, norm_V = (norms_WV > 0).mean(0), norms_WV.mean(0)
        bands = [
            {**norm, "changed": changed["mean"]}
            for norm, changed in zip(by_frequency(norm_V, counts_V), by_frequency(changed_V, counts_V), strict=True)
        ]
        found[side] = {"changed": float(changed_V.mean()), "mean": float(norm_V.mean()), "bands": bands}
    return found


def _current(
    p_N: Norms, words_N: NDArray[np.int64], repeats_N: NDArray[np.bool_], counts_V: NDArray[np.int64]
) -> dict[str, Any]:
    """How likely words are to follow themselves, against a model that knows nothing and one that knows frequencies."""
    unigram_N = counts_V[words_N] / counts_V.sum()
    return {
        "mean": float(p_N.mean()),
        "quantiles": {str(share): float(np.quantile(p_N, share)) for share in QUANTILES},
        "uniform": 1 / len(counts_V),
        "unigram": float(unigram_N.mean()),
        "below_uniform": float((p_N < 1 / len(counts_V)).mean()),
        "below_unigram": float((p_N < unigram_N).mean()),
        "repeats": float(repeats_N.mean()),
    }


def _copies(end: nn.Module, copied: nn.Module) -> dict[WordTable, WordTable]:
    """The tables of an end, and which table of its copy each of them is."""
    pairs = zip(end.modules(), copied.modules(), strict=True)
    return {one: other for one, other in pairs if isinstance(one, WordTable) and isinstance(other, WordTable)}
