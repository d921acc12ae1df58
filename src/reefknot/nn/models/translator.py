"""A translator: a language model of the target that has read a source (Press & Wolf 2017; Pappas & Henderson 2019).

It has one end more than a language model, the one that the source goes in by. Three-way tying is three ends with one
table: of the source, of the target, and of the classes.

A window of pairs holds both sides in one tensor, x_BU: the source in the first S columns, the target's inputs in the
last T, where T is the width of the targets. So whatever trains a language model trains a translator.

Shapes: B pairs, S source tokens, T target tokens, U = S + T, D width, M places with a target.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel, Losses
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.nn.outputs.contract import OutputEnd, Plan

PAD = IGNORE
"""Fills up a source that is shorter than others of its window, at the right. Nothing reads it."""


class Translator(LanguageModel):
    """The ends joined: a source in, then words in, hidden states, words out."""

    def __init__(
        self,
        source: InputEnd,
        input: InputEnd,
        encoder: SourceEncoder,
        output: OutputEnd,
        regularisation: RegularisationSettings | None = None,
    ) -> None:
        if not encoder.reads_source:
            raise SettingsError(
                f"a translator needs an encoder that reads a source, such as AttentionGRU or EncoderDecoder; "
                f"a {type(encoder).__name__} reads none"
            )
        if source.dim != encoder.source_dim:
            raise SettingsError(
                f"the source's end gives {source.dim} numbers per token but the encoder reads {encoder.source_dim}; "
                "make the encoder's source_dim as wide as the source's table"
            )
        super().__init__(input, encoder, output, regularisation)
        self.source = source

    @property
    def three_way(self) -> bool:
        """Whether one table holds the words of the source, of the target and of the classes."""
        held = self.source.tables()
        return self.tied and any(table is other for table in self.output.tables() for other in held)

    def read(self, source_BS: Tensor) -> State:
        """All that the target needs of its source."""
        there_BS = source_BS != PAD
        encoder = cast(SourceEncoder, self.encoder)
        return encoder.read(self.source(source_BS.where(there_BS, 0)), there_BS)

    def begin(self, source_BS: Tensor) -> State:
        """The state to begin with where the target comes step by step."""
        return self.memory(len(source_BS)) | self.read(source_BS)

    def forward(self, tokens_BT: Tensor, state: State | None = None) -> Encoded:
        """Hidden states of target tokens that follow a state."""
        if not state:
            raise ArgumentError("a translator reads its source first: give the state that read or begin returned")
        return super().forward(tokens_BT, state)

    def attention(self, tokens_BT: Tensor, state: State) -> Tensor:
        """Where each target token that goes in looks at the source, a_BTS: each row adds up to 1."""
        return cast(SourceEncoder, self.encoder).attention(self.input(tokens_BT), state)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        state: State | None = None,
        plan: Plan | None = None,
        places_M: Tensor | None = None,
    ) -> Losses:
        """The loss of a window of pairs, `tokens` being x_BU. Each pair is computed afresh: a state has no meaning."""
        if targets_BT is None:
            raise ArgumentError("a translator needs targets: they tell where the source ends in x_BU")
        source_BS, x_BT = sides(tokens_BT, targets_BT)
        encoded = self(x_BT, self.read(source_BS))
        # Nothing follows: keys and values of the source need not wait for it.
        return self._losses(encoded._replace(state={}), targets_BT, plan, places_M)

    def target_log_probs(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Log-probability of every target of a window of pairs, logp_BT; zero where there is none."""
        source_BS, x_BT = sides(tokens_BT, targets_BT)
        return super().target_log_probs(x_BT, targets_BT, self.read(source_BS))


def sides(x_BU: Tensor, y_BT: Tensor) -> tuple[Tensor, Tensor]:
    """A window's sources, source_BS, and the target's inputs, x_BT."""
    source_BS, x_BT = x_BU.tensor_split([x_BU.shape[1] - y_BT.shape[1]], dim=1)
    return source_BS, x_BT
