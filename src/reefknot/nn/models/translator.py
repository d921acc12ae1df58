"""A translator: a language model of the target that reads a source first (Press & Wolf 2017; Pappas & Henderson 2019).

Start reading at `Translator`. It has one more input end (word ids to vectors) than a language model, for the source. In
three-way tying, the input ends of source and target and the output classifier share one word table.

A batch of sentence pairs is one tensor, pairs_BU, so that the training code of language models works for translators
too. The source is in the first S columns, and the inputs of the target are in the last T:

    pairs_BU = [ source_BS | inputs_BT ]

Shapes: B pairs, S source tokens, T target tokens, U = S + T, D dimensions, M positions with a target.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from reefknot.errors import ArgumentError, SettingsError, describe_type
from reefknot.kernels.scores import IGNORE
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel, Losses, share_table
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.nn.outputs.contract import OutputEnd, Plan

PAD = IGNORE
"""The id that pads short sources on the right."""


class Translator(LanguageModel):
    """A translator: predicts the next word of a target from a source and the target's words so far.

        pairs = torch.cat([source, target[:, :-1]], dim=1)      # source: (B, S), target: (B, T + 1)
        losses = model.loss(pairs, target[:, 1:])

        state = model.start_decoding(source)                    # to decode step by step
        encoded = model(first_tokens, state)                    # first_tokens: (B, 1)
        encoded = model(second_tokens, encoded.state)

    Args:
        source: The input end of the source.
        input: The input end of the target.
        encoder: An encoder that reads a source, such as `AttentionGRU` or `EncoderDecoder`.
        output: The output end of the target.
        regularisation: Weights of penalties on the activations. By default there are none.
    """

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
                "a translator needs an encoder that reads a source, such as AttentionGRU or EncoderDecoder; "
                f"{describe_type(encoder)} does not"
            )
        if source.dim != encoder.source_dim:
            raise SettingsError(
                f"the source's input end has dimension {source.dim} but the encoder expects "
                f"{encoder.source_dim}; make the encoder's source_dim equal to the dimension of the source's table"
            )
        super().__init__(input, encoder, output, regularisation)
        self.source = source

    @property
    def three_way(self) -> bool:
        """Whether the input ends of source and target and the classes share one table."""
        return self.tied and share_table(self.source.tables(), self.output.tables())

    def encode_source(self, source_BS: Tensor) -> State:
        """Return the state before the first target step. It has everything that target steps need from the source.

        Args:
            source_BS: Ids of the source tokens, with shape (B, S), padded on the right with -100.
        """
        mask_BS = source_BS != PAD
        vectors_BSD = self.source(source_BS.where(mask_BS, 0))
        encoder = cast(SourceEncoder, self.encoder)
        return encoder.encode_source(vectors_BSD, mask_BS)

    def start_decoding(self, source_BS: Tensor) -> State:
        """Return the state before a target that is decoded step by step, as in a beam search.

        Args:
            source_BS: Ids of the source tokens, with shape (B, S), padded on the right with -100.
        """
        return self.decoding_state(len(source_BS)) | self.encode_source(source_BS)

    def forward(self, tokens_BT: Tensor, state: State | None = None) -> Encoded:
        """Return the hidden states of target tokens, and the state after them.

        Args:
            tokens_BT: Ids of the target tokens, with shape (B, T).
            state: The state that `encode_source`, `start_decoding` or an earlier call returned.
        """
        if not state:
            raise ArgumentError(
                "a translator reads its source first; pass the state that encode_source or start_decoding returned"
            )
        return super().forward(tokens_BT, state)

    def attention(self, tokens_BT: Tensor, state: State) -> Tensor:
        """Return the attention weights of each target token over the source, with shape (B, T, S). Each row sums to 1.

        Args:
            tokens_BT: Ids of the target tokens, with shape (B, T).
            state: The state that `encode_source`, `start_decoding` or an earlier call returned.
        """
        encoder = cast(SourceEncoder, self.encoder)
        return encoder.attention(self.input(tokens_BT), state)

    def loss(
        self,
        pairs_BU: Tensor,
        targets_BT: Tensor | None = None,
        state: State | None = None,
        plan: Plan | None = None,
        positions_M: Tensor | None = None,
    ) -> Losses:
        """Return the loss of a batch of sentence pairs. Pairs are independent.

        Args:
            pairs_BU: Sources and target inputs in one tensor, with shape (B, S + T). Sources are padded with -100.
            targets_BT: Target ids, with shape (B, T), padded with -100. They are required, because their number of
                columns shows where the source ends.
            state: Not used.
            plan: The result of `output.prepare` for the targets. By default it is computed here.
            positions_M: For a batch with padding, the positions that the output end reads, with shape (M,), counted
                over pairs and steps. They must include all positions that have a target. The plan is for these
                positions.
        """
        if targets_BT is None:
            raise ArgumentError("a translator needs targets: their number of columns shows where the source ends")
        source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
        encoded = self(inputs_BT, self.encode_source(source_BS))
        # Nothing follows these pairs, so the keys and values of the source can be freed.
        encoded = encoded._replace(state={})
        return self._compute_losses(encoded, targets_BT, plan, positions_M)

    def target_log_probs(
        self, pairs_BU: Tensor, targets_BT: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Return the log-probability of every target of a batch of pairs, with shape (B, T), and the state after it.

        Args:
            pairs_BU: Sources and target inputs in one tensor, with shape (B, S + T).
            targets_BT: Target ids, with shape (B, T). The result is 0 where the target is -100.
            state: Not used.
        """
        source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
        return super().target_log_probs(inputs_BT, targets_BT, self.encode_source(source_BS))

    def flops(self, pairs_BU: Tensor, targets_BT: Tensor) -> int:
        """Return the number of floating-point operations of a training step on a batch of pairs (see `nn/part.py`).

        Args:
            pairs_BU: Sources and target inputs in one tensor, with shape (B, S + T), on the host.
            targets_BT: Target ids, with shape (B, T), on the host.
        """
        source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
        is_source_BS = source_BS != PAD
        is_scored_BT = targets_BT != IGNORE

        source_flops = self.source.flops(source_BS[is_source_BS])
        input_flops = self.input.flops(inputs_BT[is_scored_BT])
        encoder = cast(SourceEncoder, self.encoder)
        encoder_flops = encoder.translation_flops(is_source_BS.sum(dim=1), is_scored_BT.sum(dim=1))
        output_flops = self.output.flops(targets_BT[is_scored_BT])
        return source_flops + input_flops + encoder_flops + output_flops


def split_sides(pairs_BU: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Split a batch of pairs into the sources, source_BS, and the inputs of the targets, inputs_BT."""
    num_source_columns = pairs_BU.shape[1] - targets_BT.shape[1]
    source_BS, inputs_BT = pairs_BU.tensor_split([num_source_columns], dim=1)
    return source_BS, inputs_BT
