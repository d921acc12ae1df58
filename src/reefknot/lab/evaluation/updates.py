"""The changes that one training step makes to the tables (Press & Wolf 2017, section 3).

A step of plain gradient descent changes only the rows of an input table whose words are in the input. It changes every
row of an output table: the row of word k by the sum over the tokens of (p_k - 1[k is the target]) h. A tied table gets
both changes. The change of the row of an input word by the output end is small unless the word is likely to follow
itself. So p(i_t), the probability that the current word is also the next word, shows how much the two parts interfere.

The change by a step at learning rate 1 is the gradient of the mean loss over the tokens of a training window, without
dropout.

Shapes: B streams, T steps, N = B x T tokens of a training window, W windows, V words, D dimension.
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
"""The parts of the change of a row: from the input end, from the output end, and their sum."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

Norms = NDArray[np.float64]
Changes = dict[str, dict[str, Norms]]
"""Norms of the change of each row, by table ("input" and "output", or "tied") and side."""


class SeparateEnds:
    """A copy of a model whose ends share no parameters. Its outputs are the same, but each end has its own gradient.

    The sum of the gradients of both ends is the gradient of the table that they shared.
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
        """Return the change of each row by a step on one training window, and the state after the window."""
        self.model.zero_grad()
        losses = self.model.loss(tokens_BT, targets_BT, state)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        changes: Changes = {}
        for name, tables in self._tables.items():
            bands = [self._norms(table) for table in tables]
            changes[name] = {side: np.concatenate([band[side] for band in bands]) for side in SIDES}
        return changes, losses.state

    def _norms(self, table: WordTable) -> dict[str, Norms]:
        parts = {}
        for end, copies in self._copies.items():
            copied = copies.get(table)
            gradient = None if copied is None else copied.weight.grad
            parts[end] = torch.zeros_like(table.weight) if gradient is None else gradient
        parts["both"] = parts["input"] + parts["output"]
        return {side: part_VD.double().norm(dim=-1).cpu().numpy() for side, part_VD in parts.items()}

    @torch.no_grad()
    def current_words(self, tokens_BT: Tensor, state: State | None = None) -> Norms:
        """Return p(i_t), the probability that each input word is also the next word."""
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
    """Return the mean changes by steps on the first training windows of a text, as plain JSON.

    Args:
        model: The language model.
        text: Ids of the text.
        counts: Training count of each word.
        streams: Number of streams that the text is read in.
        steps: Number of tokens per stream and window.
        windows: Number of windows.
    """
    separate, counts_V = SeparateEnds(model), np.asarray(counts, dtype=np.int64)
    device = next(model.parameters()).device
    norms: dict[str, dict[str, list[Norms]]] = {}
    current, inputs, repeats, state = [], [], [], None
    read = Streams(text, streams, steps)
    for tokens_BT, targets_BT in (read.window(index) for index in range(min(windows, read.num_windows))):
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
        "words_in": float(np.mean([len(np.unique(words_N)) for words_N in inputs])),
        "tables": {name: _summary(sides, counts_V) for name, sides in norms.items()},
        "current": _current(np.concatenate(current), np.concatenate(inputs), np.concatenate(repeats), counts_V),
    }


def by_frequency(values_V: Norms, counts: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the mean of per-word values for each band of training counts."""
    counts_V = np.asarray(counts, dtype=np.int64)
    return [
        {"low": low, "high": high, "types": int(inside_V.sum()), "mean": float(values_V[inside_V].mean())}
        for low, high, inside_V in _bands(counts_V)
    ]


def _bands(counts_V: NDArray[np.int64]) -> Iterator[tuple[int, int | None, NDArray[np.bool_]]]:
    """Yield the bands of training counts that have words, each with a mask of its words."""
    for low, above in zip(EDGES, (*EDGES[1:], None), strict=True):
        inside_V = (counts_V >= low) & (counts_V < above if above is not None else True)
        if inside_V.any():
            yield low, None if above is None else above - 1, inside_V


def _summary(sides: dict[str, list[Norms]], counts_V: NDArray[np.int64]) -> dict[str, Any]:
    """Return, per side, the share of rows that a step changes and the mean norm, over all words and by frequency."""
    summary = {}
    for side, windows in sides.items():
        norms_WV = np.stack(windows)
        changed_V, norm_V = (norms_WV > 0).mean(0), norms_WV.mean(0)
        bands = [
            {**norm, "changed": changed["mean"]}
            for norm, changed in zip(by_frequency(norm_V, counts_V), by_frequency(changed_V, counts_V), strict=True)
        ]
        summary[side] = {"changed": float(changed_V.mean()), "mean": float(norm_V.mean()), "bands": bands}
    return summary


def _current(
    p_N: Norms, words_N: NDArray[np.int64], repeats_N: NDArray[np.bool_], counts_V: NDArray[np.int64]
) -> dict[str, Any]:
    """Summarise the probability that a word follows itself, compared with a uniform and a unigram model."""
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
    """Return the tables of an end, each with its counterpart in the copy of the end."""
    pairs = zip(end.modules(), copied.modules(), strict=True)
    return {table: copy_ for table, copy_ in pairs if isinstance(table, WordTable) and isinstance(copy_, WordTable)}
