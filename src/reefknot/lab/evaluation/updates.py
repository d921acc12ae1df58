"""Measure how much one training step changes each word vector (Press & Wolf 2017, section 3).

Start with `measure_updates`. It shows how the two ends of a model (input table and output classifier) train their word
vectors, separately or as one tied table.

A step of plain gradient descent changes only the rows of an input table whose words are in the input. It changes every
row of an output table: the row of word k by the sum over the tokens of (p_k - 1[k is the target]) h. A tied table gets
both changes. The change of the row of an input word by the output end is small unless the word is likely to follow
itself. So p(i_t), the probability that the current word is also the next word, shows how much the two parts interfere.

The change by a step at learning rate 1 is the gradient of the mean loss over the tokens of a training window, without
dropout.

Shapes: B streams (parts of the text that are read in parallel), T steps, N = B x T tokens of a training window, W
windows, V words, D dimension.
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
        input_tables, output_tables = model.input.tables(), model.output.tables()
        is_tied = [id(table) for table in input_tables] == [id(table) for table in output_tables]
        tables_by_name = {"tied": input_tables} if is_tied else {"input": input_tables, "output": output_tables}
        self._tables = {name: tables for name, tables in tables_by_name.items() if tables}
        self._copies = {
            "input": _match_tables(model.input, self.model.input),
            "output": _match_tables(model.output, self.model.output),
        }

    def changes(self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None) -> tuple[Changes, State]:
        """Return the change of each row by a step on one training window, and the state after the window."""
        self.model.zero_grad()
        losses = self.model.loss(tokens_BT, targets_BT, state)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        changes: Changes = {}
        for name, tables in self._tables.items():
            # A banded table has one table per band (a cluster of words of similar frequency).
            norms_of_bands = [self._gradient_norms(table) for table in tables]
            changes[name] = {side: np.concatenate([norms[side] for norms in norms_of_bands]) for side in SIDES}
        return changes, losses.state

    def _gradient_norms(self, table: WordTable) -> dict[str, Norms]:
        """Return, per side, the norm of the gradient of each row of a table; zero if the end does not use the table."""
        gradients = {}
        for end, copies in self._copies.items():
            table_copy = copies.get(table)
            gradient = None if table_copy is None else table_copy.weight.grad
            gradients[end] = torch.zeros_like(table.weight) if gradient is None else gradient
        gradients["both"] = gradients["input"] + gradients["output"]
        return {side: gradient_VD.double().norm(dim=-1).cpu().numpy() for side, gradient_VD in gradients.items()}

    @torch.no_grad()
    def repeat_probabilities(self, tokens_BT: Tensor, state: State | None = None) -> Norms:
        """Return p(i_t), the probability that each input word is also the next word."""
        log_probs_BT, _ = self.model.target_log_probs(tokens_BT, tokens_BT, state)
        return log_probs_BT.double().exp().flatten().cpu().numpy()


def measure_updates(
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
    separate_ends, counts_V = SeparateEnds(model), np.asarray(counts, dtype=np.int64)
    device = next(model.parameters()).device
    norms_by_table: dict[str, dict[str, list[Norms]]] = {}
    p_chunks, id_chunks, repeat_chunks, state = [], [], [], None
    text_windows = Streams(text, streams, steps)
    for index in range(min(windows, text_windows.num_windows)):
        tokens_BT, targets_BT = text_windows.window(index)
        p_chunks.append(separate_ends.repeat_probabilities(tokens_BT.to(device), state))
        changes, state = separate_ends.changes(tokens_BT.to(device), targets_BT.to(device), state)
        for name, sides in changes.items():
            for side, norms_V in sides.items():
                norms_by_table.setdefault(name, {}).setdefault(side, []).append(norms_V)
        id_chunks.append(tokens_BT.flatten().numpy())
        repeat_chunks.append((tokens_BT == targets_BT).flatten().numpy())
    probs_N, ids_N, is_repeat_N = map(np.concatenate, (p_chunks, id_chunks, repeat_chunks))
    return {
        "windows": len(id_chunks),
        "tokens": len(ids_N),
        "types": len(counts_V),
        "words_in": float(np.mean([len(np.unique(chunk)) for chunk in id_chunks])),
        "tables": {name: _summarise_changes(sides, counts_V) for name, sides in norms_by_table.items()},
        "current": _summarise_repeats(probs_N, ids_N, is_repeat_N, counts_V),
    }


def mean_by_frequency(values_V: Norms, counts: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the mean of per-word values for each band (range) of training counts."""
    counts_V = np.asarray(counts, dtype=np.int64)
    return [
        {"low": low, "high": high, "types": int(in_band_V.sum()), "mean": float(values_V[in_band_V].mean())}
        for low, high, in_band_V in _iterate_bands(counts_V)
    ]


def _iterate_bands(counts_V: NDArray[np.int64]) -> Iterator[tuple[int, int | None, NDArray[np.bool_]]]:
    """Yield the bands of training counts that have words, each with a mask of its words."""
    for low, next_low in zip(EDGES, (*EDGES[1:], None), strict=True):
        high = None if next_low is None else next_low - 1
        in_band_V = counts_V >= low
        if high is not None:
            in_band_V &= counts_V <= high
        if in_band_V.any():
            yield low, high, in_band_V


def _summarise_changes(sides: dict[str, list[Norms]], counts_V: NDArray[np.int64]) -> dict[str, Any]:
    """Return, per side, the share of rows that a step changes and the mean norm, over all words and by frequency."""
    summary = {}
    for side, norms_of_windows in sides.items():
        norms_WV = np.stack(norms_of_windows)
        mean_norm_V, changed_share_V = norms_WV.mean(0), (norms_WV > 0).mean(0)
        norm_bands = mean_by_frequency(mean_norm_V, counts_V)
        share_bands = mean_by_frequency(changed_share_V, counts_V)
        summary[side] = {
            "changed": float(changed_share_V.mean()),
            "mean": float(mean_norm_V.mean()),
            "bands": [{**norm, "changed": share["mean"]} for norm, share in zip(norm_bands, share_bands, strict=True)],
        }
    return summary


def _summarise_repeats(
    probs_N: Norms, ids_N: NDArray[np.int64], is_repeat_N: NDArray[np.bool_], counts_V: NDArray[np.int64]
) -> dict[str, Any]:
    """Summarise the probability that a word follows itself, compared with a uniform and a unigram model."""
    unigram_N = counts_V[ids_N] / counts_V.sum()
    return {
        "mean": float(probs_N.mean()),
        "quantiles": {str(share): float(np.quantile(probs_N, share)) for share in QUANTILES},
        "uniform": 1 / len(counts_V),
        "unigram": float(unigram_N.mean()),
        "below_uniform": float((probs_N < 1 / len(counts_V)).mean()),
        "below_unigram": float((probs_N < unigram_N).mean()),
        "repeats": float(is_repeat_N.mean()),
    }


def _match_tables(end: nn.Module, copied_end: nn.Module) -> dict[WordTable, WordTable]:
    """Return the tables of an end, each with its counterpart in the copy of the end."""
    pairs = zip(end.modules(), copied_end.modules(), strict=True)
    return {table: copy_ for table, copy_ in pairs if isinstance(table, WordTable) and isinstance(copy_, WordTable)}
