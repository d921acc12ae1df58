"""Skip-gram with negative sampling (Mikolov et al. 2013), whose two ends can be tied (Press and Wolf 2017).

    loss(centre o, context i, negatives) = - log sigmoid(u_o . v_i) - sum_k log sigmoid(- u_k . v_i)

v are rows of the input table, u of the output table. As in word2vec's program, the context word goes in and the centre
word comes out. Tied, both are rows of one table.

Shapes: N pairs, K negatives, V words, D width.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.skip_gram_draws import Counts, Draws
from reefknot.lab.config.settings import Count, Dim, NonNegative, Settings
from reefknot.nn.tables import WordTable


class SkipGramSettings(Settings):
    """Skip-gram with negative sampling; the defaults are word2vec's."""

    dim: Annotated[Dim, Field(description="width of a word's vector")] = 100
    tied: Annotated[bool, Field(description="one table is the input's and the output's")] = False
    window: Annotated[Count, Field(le=1000, description="words on either side at most; shrunk at random")] = 5
    negatives: Annotated[Count, Field(le=1000, description="noise words per pair")] = 5
    power: Annotated[NonNegative, Field(le=10, description="noise words are drawn by counts to this power")] = 0.75
    sample: Annotated[
        NonNegative, Field(le=1, description="words with a larger share of the text are left out at random; 0: none")
    ] = 1e-3

    def draws(self, counts: Counts, *, eos: int | None, unknown: int | None, seed: int) -> Draws:
        """What is drawn over a text whose words occur so often; `eos` ends its lines, and `unknown` stands for words
        outside the vocabulary."""
        return Draws.of(
            counts,
            window=self.window,
            negatives=self.negatives,
            power=self.power,
            sample=self.sample,
            eos=eos,
            unknown=unknown,
            seed=seed,
        )


class SkipGram(nn.Module):
    """Two tables, or one that is both."""

    def __init__(self, input: WordTable, output: WordTable) -> None:
        super().__init__()
        shapes = [(table.vocab_size, table.dim) for table in (input, output)]
        if shapes[0] != shapes[1]:
            (words, width), (others, other) = shapes
            raise SettingsError(
                f"skip-gram: the input has {words:,} words of width {width}, the output {others:,} of width {other}; "
                "both ends need the same words and the same width"
            )
        if input.unit_norm or output.unit_norm:
            raise SettingsError("skip-gram trains vectors of any length; use tables without unit_norm")
        self.input = input
        self.output = output

    @classmethod
    def of(cls, settings: SkipGramSettings, vocab_size: int) -> SkipGram:
        """As word2vec starts, drawn from torch's generator: inputs uniform in +-0.5 / dim, outputs zero. A tied table
        starts as the inputs do, since one of zeros would have no gradient."""
        dim = settings.dim
        table = WordTable(vocab_size, dim)
        nn.init.uniform_(table.weight, -0.5 / dim, 0.5 / dim)
        if settings.tied:
            return cls(table, table)
        output = WordTable(vocab_size, dim)
        nn.init.zeros_(output.weight)
        return cls(table, output)

    @property
    def tied(self) -> bool:
        return self.input is self.output

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by end. A shared table counts once, at the input."""
        return {"input": self.input.weight.numel(), "output": 0 if self.tied else self.output.weight.numel()}

    def parameter_parts(self) -> dict[str, int]:
        """Parameters by what holds them: an end that holds none of its own is left out."""
        return {end: count for end, count in self.parameter_counts().items() if count}

    def loss(self, centres_N: Tensor, contexts_N: Tensor, negatives_NK: Tensor) -> Tensor:
        """The sum over pairs. A negative that is the pair's own centre is left out."""
        v_ND = self.input.vectors(contexts_N)
        right_N = (self.output.vectors(centres_N) * v_ND).sum(-1)
        wrong_NK = torch.einsum("nkd,nd->nk", self.output.vectors(negatives_NK), v_ND)
        others_NK = negatives_NK != centres_N[:, None]
        return -F.logsigmoid(right_N).sum() - (F.logsigmoid(-wrong_NK) * others_NK).sum()
