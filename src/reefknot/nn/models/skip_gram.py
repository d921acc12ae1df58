"""Skip-gram with negative sampling (word2vec; Mikolov et al. 2013). Its two tables can be tied (Press & Wolf 2017).

A pair is a centre word o and a word i of its context. For each pair, K random words k, the negatives, are drawn:

    loss = - log sigmoid(u_o . v_i) - sum_k log sigmoid(- u_k . v_i)

v_i is a row of the input table, and u_o and u_k are rows of the output table. As in the word2vec program, the context
word is the input and the centre word the output. If the model is tied, both tables are the same object.

Shapes: N pairs, K negatives, V words, D dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.tables import WordTable


class SkipGram(nn.Module):
    """Skip-gram with negative sampling. It is tied if both ends are the same table.

    Args:
        input: Table of the input vectors, v.
        output: Table of the output vectors, u, with the same number of words and dimensions.
    """

    def __init__(self, input: WordTable, output: WordTable) -> None:
        super().__init__()
        if (input.vocab_size, input.dim) != (output.vocab_size, output.dim):
            raise SettingsError(
                f"skip-gram: the input has {input.vocab_size:,} words of dimension {input.dim}, the output "
                f"{output.vocab_size:,} of dimension {output.dim}; both ends need the same words and dimension"
            )
        if input.unit_norm or output.unit_norm:
            raise SettingsError("skip-gram trains vectors of any length; use tables without unit_norm")
        self.input = input
        self.output = output

    @classmethod
    def create(cls, vocab_size: int, dim: int, tied: bool = False) -> SkipGram:
        """Return a model with the initial weights of word2vec.

        Input vectors are uniform in [-0.5 / dim, 0.5 / dim] and output vectors are zero. A tied table is initialised
        like the input vectors, because the gradient of zeros would be zero.

        Args:
            vocab_size: Number of words, V.
            dim: Dimension of the vectors, D.
            tied: Use one table for both ends.
        """
        input_table = WordTable(vocab_size, dim)
        nn.init.uniform_(input_table.weight, -0.5 / dim, 0.5 / dim)
        if tied:
            return cls(input_table, input_table)
        output_table = WordTable(vocab_size, dim)
        nn.init.zeros_(output_table.weight)
        return cls(input_table, output_table)

    @property
    def tied(self) -> bool:
        """Whether both ends are the same table."""
        return self.input is self.output

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters of each end. A shared table is counted once, at the input."""
        output_count = 0 if self.tied else self.output.weight.numel()
        return {"input": self.input.weight.numel(), "output": output_count}

    def parameter_counts_by_module(self) -> dict[str, int]:
        """Return the number of parameters of each table by name, without the output if it shares the input's table."""
        return {name: count for name, count in self.parameter_counts().items() if count}

    def loss(self, centres_N: Tensor, contexts_N: Tensor, negatives_NK: Tensor) -> Tensor:
        """Return the sum of the losses of the pairs, a scalar.

        Args:
            centres_N: Ids of the centre words, with shape (N,).
            contexts_N: Ids of the context words, with shape (N,).
            negatives_NK: Ids of the negatives, with shape (N, K). A negative that equals the pair's centre is ignored.
        """
        context_vectors_ND = self.input.vectors(contexts_N)
        centre_vectors_ND = self.output.vectors(centres_N)
        centre_scores_N = (centre_vectors_ND * context_vectors_ND).sum(-1)
        negative_vectors_NKD = self.output.vectors(negatives_NK)
        negative_scores_NK = torch.einsum("nkd,nd->nk", negative_vectors_NKD, context_vectors_ND)

        is_valid_NK = negatives_NK != centres_N[:, None]
        log_prob_centres = F.logsigmoid(centre_scores_N).sum()
        log_prob_negatives = (F.logsigmoid(-negative_scores_NK) * is_valid_NK).sum()
        return -log_prob_centres - log_prob_negatives
