"""The cache of `ReefknotForCausalLM` and `ReefknotForSeq2SeqLM`: recurrent states, or KV caches.

    hidden, cache = read_tokens(model, prompt_ids, attention_mask, None, use_cache=True)
    hidden, cache = read_tokens(model, next_ids, None, cache, use_cache=True)

A batch of texts of different lengths is padded, but our encoders do not read padding. So texts with the same number of
tokens form a group, which is read at once.

Shapes: B texts (rows of a batch), T columns, N tokens of a text, G texts of a group, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.nn.encoders.contract import State, join_streams
from reefknot.nn.models.language_model import LanguageModel

Group = tuple[Tensor, State]
"""The rows of some texts in the batch, rows_G, and their state."""


class ReefknotCache:
    """The state after the tokens that a model has read.

    Args:
        groups: The rows of each group of texts, and their state. By default nothing has been read.
        num_columns: Number of columns of the batch that have been read or skipped, padding included.
        tokens: Number of tokens of each text that are in its state.
    """

    is_compileable = False
    """Whether `generate` may compile a step, which needs a cache of fixed size."""
    is_croppable = False
    """Whether tokens can be removed from the cache again."""

    def __init__(self, groups: Sequence[Group] = (), num_columns: int = 0, tokens: Sequence[int] = ()) -> None:
        self.groups = list(groups)
        self.num_columns = num_columns
        self.tokens = list(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns that have been read.

        Args:
            layer_idx: Not used.
        """
        return self.num_columns

    def select(self, rows_B: Tensor) -> ReefknotCache:
        """Return the cache of other rows, as a beam search needs it. A row may occur several times.

        Args:
            rows_B: The row whose state each new row continues.
        """
        groups = []
        for group_rows_G, state in self.groups:
            # A matrix that shows which new rows (first dimension) continue which texts of this group.
            new_rows, indices = (rows_B[:, None] == group_rows_G).nonzero(as_tuple=True)
            if len(new_rows):
                groups.append((new_rows, {name: tensor.index_select(1, indices) for name, tensor in state.items()}))
        tokens = [self.tokens[row] for row in rows_B.tolist()] if self.tokens else []
        return ReefknotCache(groups, self.num_columns, tokens)


def read_tokens(
    model: LanguageModel,
    ids_BT: Tensor,
    mask: Tensor | None,
    cache: ReefknotCache | None,
    use_cache: bool,
) -> tuple[Tensor, ReefknotCache | None]:
    """Return the hidden states of tokens, (B, T, D), with zeros for padding, and the cache after them.

    Args:
        model: The language model.
        ids_BT: Token ids.
        mask: 1 for tokens and 0 for padding. It may also cover earlier columns, which are in the cache.
        cache: The cache of the tokens before; None, or without groups, if the texts start here.
        use_cache: Whether to return a cache.
    """
    batch_size, num_columns = ids_BT.shape
    if mask is None:
        mask = torch.ones_like(ids_BT)
    is_token_BT = mask[:, -num_columns:].bool()
    has_padding = not bool(is_token_BT.all())
    if not use_cache and not has_padding:
        return model(ids_BT).output, None

    groups: list[Group] = []
    tokens = is_token_BT.sum(1).tolist()
    if cache is not None and cache.groups:
        if has_padding:
            raise ArgumentError("padding after cached tokens is not supported; pad texts on the left")
        groups = cache.groups
        tokens = [old + new for old, new in zip(cache.tokens, tokens, strict=True)]
    else:
        for length in sorted(set(tokens)):
            rows_G = torch.tensor([row for row, count in enumerate(tokens) if count == length], device=ids_BT.device)
            state = model.decoding_state(len(rows_G)) if use_cache else model.initial_state(len(rows_G))
            groups.append((rows_G, state))

    hidden_BTD: Tensor | None = None
    next_groups: list[Group] = []
    for rows_G, state in groups:
        # The columns of the tokens, columns_GN. All texts of a group have the same number of tokens.
        columns_GN = is_token_BT[rows_G].nonzero()[:, 1].view(len(rows_G), -1)
        if not columns_GN.shape[1]:
            next_groups.append((rows_G, state))
            continue
        encoded = model(ids_BT[rows_G[:, None], columns_GN], state)
        next_groups.append((rows_G, encoded.state))
        if len(groups) == 1 and not has_padding:
            hidden_BTD = encoded.output
        else:
            if hidden_BTD is None:
                hidden_BTD = encoded.output.new_zeros(batch_size, num_columns, encoded.output.shape[-1])
            hidden_BTD = hidden_BTD.index_put((rows_G[:, None], columns_GN), encoded.output)
    if hidden_BTD is None:
        raise ArgumentError("every text is empty: the attention mask has no tokens")
    if not use_cache:
        return hidden_BTD, None
    if model.encoder.carries_state:
        next_groups = [_join_groups(next_groups)]
    past_columns = 0 if cache is None else cache.num_columns
    return hidden_BTD, ReefknotCache(next_groups, past_columns + num_columns, tokens)


def _join_groups(groups: list[Group]) -> Group:
    """Join groups whose states have the same shape for every length, so that one step continues all texts."""
    if len(groups) == 1:
        return groups[0]
    rows_B = torch.cat([rows_G for rows_G, _ in groups])
    order_B = rows_B.argsort()
    joined = join_streams([state for _, state in groups])
    return rows_B[order_B], {name: tensor.index_select(1, order_B) for name, tensor in joined.items()}
