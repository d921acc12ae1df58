"""Measure how much one training step changes each word vector (Press & Wolf 2017, section 3).

Start with `measure_updates`. It shows how the two ends of a model (input embeddings and output classifier) train their
word vectors, in separate tables or in one tied table. A table has one row per word.

A step of plain gradient descent changes only the rows of an input table whose words are in the input. It changes every
row of an output table: the row of word k by the sum over the tokens of (p_k - 1[k is the target]) h, where h is the
hidden state. A tied table gets both changes. The output end changes the row of an input word little, unless the word is
likely to follow itself. So p(i_t), the probability that the current word i_t is also the next word, shows how much the
two changes interfere.

Shapes: B streams (parts of the text that are read in parallel), T steps, N tokens of all windows, W training windows, V
words, D dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reefknot.lab.evaluation.frequency import EDGES, iterate_bands
from reefknot.lab.text.streams import Streams
from reefknot.nn.encoders.contract import State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.tables import WordTable

SIDES = ("input", "output", "both")
"""The parts of the change of a row: from the input end, from the output end, and their sum."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the repeat probability that are reported."""

Floats = NDArray[np.float64]
Changes = dict[str, dict[str, Floats]]
"""Norm of the change of each row, norms_V, by table ("input" and "output", or "tied") and side."""


class SeparateEnds:
    """A copy of a model whose ends share no parameters. Its outputs are the same, but each end has its own gradient.

    The sum of the gradients of both ends is the gradient of the table that they shared.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = copy.deepcopy(model).eval()
        self.model.input = copy.deepcopy(self.model.input)

        # The tables of the original model, by name.
        input_tables = model.input.tables()
        output_tables = model.output.tables()
        is_tied = [id(table) for table in input_tables] == [id(table) for table in output_tables]
        if is_tied:
            tables_by_name = {"tied": input_tables}
        else:
            tables_by_name = {"input": input_tables, "output": output_tables}
        self._tables = {name: tables for name, tables in tables_by_name.items() if tables}

        self._copies = {
            "input": _match_tables(model.input, self.model.input),
            "output": _match_tables(model.output, self.model.output),
        }
        """The copy of each table at each end."""

    def changes(self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None) -> tuple[Changes, State]:
        """Return the change of each row by a step on one training window, and the state after the window.

        The change by a step at learning rate 1 is the gradient of the mean loss over the tokens of the window, without
        dropout.
        """
        self.model.zero_grad()
        losses = self.model.loss(tokens_BT, targets_BT, state)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        changes: Changes = {}
        for name, tables in self._tables.items():
            # A banded table has one table per band (a cluster of words of similar frequency).
            norms_of_bands = [self._gradient_norms(table) for table in tables]
            changes[name] = {}
            for side in SIDES:
                changes[name][side] = np.concatenate([norms_by_side[side] for norms_by_side in norms_of_bands])
        return changes, losses.state

    def _gradient_norms(self, table: WordTable) -> dict[str, Floats]:
        """Return, per side, the norm of the gradient of each row of a table; zero if the end does not use the table."""
        gradients: dict[str, Tensor] = {}
        for end, copies in self._copies.items():
            gradients[end] = torch.zeros_like(table.weight)
            table_copy = copies.get(table)
            if table_copy is not None and table_copy.weight.grad is not None:
                gradients[end] = table_copy.weight.grad
        gradients["both"] = gradients["input"] + gradients["output"]

        norms_by_side = {}
        for side, gradient_VD in gradients.items():
            norms_by_side[side] = gradient_VD.double().norm(dim=-1).cpu().numpy()
        return norms_by_side

    @torch.no_grad()
    def repeat_probabilities(self, tokens_BT: Tensor, state: State | None = None) -> Floats:
        """Return p(i_t), the probability that each input word is also the next word, for all tokens in one array."""
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
    separate_ends = SeparateEnds(model)
    device = next(model.parameters()).device
    text_windows = Streams(text, streams, steps)

    # Measure each window.
    changes_of_windows: list[Changes] = []
    prob_chunks: list[Floats] = []
    id_chunks: list[NDArray[np.int64]] = []
    repeat_chunks: list[NDArray[np.bool_]] = []
    state: State | None = None
    for index in range(min(windows, text_windows.num_windows)):
        tokens_BT, targets_BT = text_windows.window(index)
        prob_chunks.append(separate_ends.repeat_probabilities(tokens_BT.to(device), state))
        changes, state = separate_ends.changes(tokens_BT.to(device), targets_BT.to(device), state)
        changes_of_windows.append(changes)
        id_chunks.append(tokens_BT.flatten().numpy())
        repeat_chunks.append((tokens_BT == targets_BT).flatten().numpy())

    # Summarise the windows.
    counts_V = np.asarray(counts, dtype=np.int64)
    probs_N = np.concatenate(prob_chunks)
    ids_N = np.concatenate(id_chunks)
    is_repeat_N = np.concatenate(repeat_chunks)
    words_per_window = [len(np.unique(ids_of_window)) for ids_of_window in id_chunks]
    summaries = {}
    for name in changes_of_windows[0]:
        changes_of_table = [changes[name] for changes in changes_of_windows]
        summaries[name] = _summarise_changes(changes_of_table, counts_V)
    return {
        "windows": len(id_chunks),
        "tokens": len(ids_N),
        "types": len(counts_V),
        "words_in": float(np.mean(words_per_window)),
        "tables": summaries,
        "current": _summarise_repeats(probs_N, ids_N, is_repeat_N, counts_V),
    }


def mean_by_frequency(values_V: Floats, counts: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the mean of per-word values for each band (range) of training counts. Bands without words are left out."""
    bands: list[dict[str, Any]] = []
    for band in iterate_bands(np.asarray(counts, dtype=np.int64), EDGES):
        mean = float(values_V[band.mask].mean())
        bands.append({"low": band.low, "high": band.high, "types": int(band.mask.sum()), "mean": mean})
    return bands


def _summarise_changes(changes_of_table: list[dict[str, Floats]], counts_V: NDArray[np.int64]) -> dict[str, Any]:
    """Return, per side, the share of rows that a step changes and the mean norm, over all words and by frequency.

    Args:
        changes_of_table: The norms of the changes of one table, by side, for each window.
        counts_V: Training count of each word.
    """
    summary = {}
    for side in SIDES:
        norms_WV = np.stack([norms_by_side[side] for norms_by_side in changes_of_table])
        mean_norm_V = norms_WV.mean(0)
        changed_share_V = (norms_WV > 0).mean(0)

        bands = mean_by_frequency(mean_norm_V, counts_V)
        share_bands = mean_by_frequency(changed_share_V, counts_V)
        for band, share_band in zip(bands, share_bands, strict=True):
            band["changed"] = share_band["mean"]
        summary[side] = {
            "changed": float(changed_share_V.mean()),
            "mean": float(mean_norm_V.mean()),
            "bands": bands,
        }
    return summary


def _summarise_repeats(
    probs_N: Floats, ids_N: NDArray[np.int64], is_repeat_N: NDArray[np.bool_], counts_V: NDArray[np.int64]
) -> dict[str, Any]:
    """Summarise the probability that a word follows itself, compared with a uniform and a unigram model."""
    uniform_prob = 1 / len(counts_V)
    unigram_probs_N = counts_V[ids_N] / counts_V.sum()
    return {
        "mean": float(probs_N.mean()),
        "quantiles": {str(share): float(np.quantile(probs_N, share)) for share in QUANTILES},
        "uniform": uniform_prob,
        "unigram": float(unigram_probs_N.mean()),
        "below_uniform": float((probs_N < uniform_prob).mean()),
        "below_unigram": float((probs_N < unigram_probs_N).mean()),
        "repeats": float(is_repeat_N.mean()),
    }


def _match_tables(end: nn.Module, copied_end: nn.Module) -> dict[WordTable, WordTable]:
    """Return the tables of an end, each with its counterpart in the copy of the end."""
    copy_of_table = {}
    for module, module_copy in zip(end.modules(), copied_end.modules(), strict=True):
        if isinstance(module, WordTable) and isinstance(module_copy, WordTable):
            copy_of_table[module] = module_copy
    return copy_of_table
