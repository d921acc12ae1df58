"""A language model: an input end, an encoder, an output end.

Shapes: B streams, T steps, D width, V classes, N = B x T places, M of them with a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.encoders.contract import Encoded, Encoder, State, detach
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.regularisation import RegularisationSettings, activation_losses
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan


@dataclass(frozen=True)
class Losses:
    """The loss of one window in named parts, the penalties on parameters, and the state that follows the window."""

    parts: dict[str, LossPart]
    penalties: dict[str, Tensor]
    """Sums like the losses; they belong to an optimiser step, so whoever adds windows up adds them once."""
    state: State
    """Cut from the graph, for the next window."""

    def sum(self) -> Tensor:
        """The parts added up as they weigh in the objective, without the penalties."""
        return torch.stack([part.weight * part.sum for part in self.parts.values()]).sum()

    def mean(self) -> Tensor:
        """The loss of a training loop of your own that makes one step per window.

        Each part divided by its own count, and the penalties divided by the number of tokens, added up: what
        `divisor = "tokens"` is in a recipe.
        """
        means = [part.weight * part.sum / max(part.count, 1) for part in self.parts.values()]
        tokens = max(self.parts["nll"].count, 1)
        return torch.stack([*means, *(penalty / tokens for penalty in self.penalties.values())]).sum()


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """The model without dropout, and afterwards back in the mode it was in. No parameter may change meanwhile: without
    gradients, class vectors that a network computes are computed once."""
    was_training = model.training
    model.eval()
    try:
        with model.output.holding():
            yield
    finally:
        model.train(was_training)


class LanguageModel(nn.Module):
    """The ends joined: words in, hidden states, words out."""

    def __init__(
        self,
        input: InputEnd,
        encoder: Encoder,
        output: OutputEnd,
        regularisation: RegularisationSettings | None = None,
    ) -> None:
        super().__init__()
        # An input end that spells may know more words than there are classes.
        if input.vocab_size < output.vocab_size or (input.tables() and input.vocab_size > output.vocab_size):
            raise SettingsError(
                f"the input end has {input.vocab_size} words but the output end has {output.vocab_size}; "
                "give their tables the same vocabulary"
            )
        if input.dim != encoder.input_dim:
            raise SettingsError(
                f"the input end gives {input.dim} numbers per token but the encoder reads {encoder.input_dim}; "
                "make the encoder's input_dim as wide as the input's table"
            )
        if encoder.dim != output.context_dim:
            raise SettingsError(
                f"the encoder gives {encoder.dim} numbers per token but the output end reads {output.context_dim}; "
                "make the output's table as wide as the encoder, or use a classifier that projects (kind = 'projected')"
            )
        held = {id(parameter) for parameter in input.parameters()}
        for parameter, sentence in output.left_to_others():
            if id(parameter) not in held:
                raise SettingsError(sentence)
        self.input = input
        self.encoder = encoder
        self.output = output
        self.regularisation = regularisation or RegularisationSettings()

    def initial_state(self, streams: int) -> State:
        return self.encoder.initial_state(streams, next(self.parameters()).device)

    def memory(self, streams: int, steps: int | None = None) -> State:
        """The state to begin with where the text comes piece by piece; with `steps`, one that keeps its size."""
        return self.encoder.memory(streams, next(self.parameters()).device, steps)

    @property
    def waits(self) -> bool:
        """Whether to read tokens and score others asks a GPU for a number, which a step that is captured must not."""
        return self.input.waits or self.encoder.waits or self.output.waits

    def forward(self, tokens_BT: Tensor, state: State | None = None) -> Encoded:
        """Hidden states of a window. Without a state the streams start from nothing."""
        if state is None:
            state = self.initial_state(tokens_BT.shape[0])
        encoded: Encoded = self.encoder(self.input(tokens_BT), state)
        return encoded

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        state: State | None = None,
        plan: Plan | None = None,
        places_M: Tensor | None = None,
    ) -> Losses:
        """The loss of a window. Without targets, each token is the target of the one before it.

        Of a window with padding, `places_M` are those that have a target, counted over streams and steps, and perhaps
        some that have none: the output end sees no others, and the plan is one of theirs.
        """
        if targets_BT is None:
            tokens_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        return self._losses(self(tokens_BT, state), targets_BT, plan, places_M)

    def _losses(self, encoded: Encoded, targets_BT: Tensor, plan: Plan | None, places_M: Tensor | None) -> Losses:
        h_ND, targets_N = encoded.output.flatten(0, 1), targets_BT.reshape(-1)
        if places_M is not None:
            # Places are distinct, so the gradient of this adds nothing up, and in no order.
            h_ND, targets_N = h_ND.index_select(0, places_M), targets_N.index_select(0, places_M)
        plan = plan or self.output.prepare(targets_N)
        parts = self.output.loss(h_ND, targets_N, plan)
        there_BT = None if places_M is None else targets_BT != IGNORE
        parts |= activation_losses(encoded, self.regularisation, there_BT, plan.count)
        return Losses(parts, self.output.penalties(), detach(encoded.state))

    def target_log_probs(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Log-probability of every target, logp_BT, and the state that follows."""
        encoded = self(tokens_BT, state)
        logp_N = self.output.target_log_probs(encoded.output.flatten(0, 1), targets_BT.reshape(-1))
        return logp_N.view_as(targets_BT), encoded.state

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part. A shared tensor counts once, at the first part that holds it."""
        counts = {name: 0 for name, _ in self.named_children()}
        for name, parameter in self.named_parameters():
            counts[name.partition(".")[0]] += parameter.numel()
        return counts

    def parameter_parts(self) -> dict[str, int]:
        """Parameters by what holds them, such as `output.classifier.layers`; the layers of a stack are one part."""
        counts: dict[str, int] = {}
        for name, parameter in self.named_parameters():
            *holders, last = name.split(".")
            holder = self.get_submodule(".".join(holders))
            belongs = last == "weight" or type(holder).__module__.startswith("torch.nn")
            path = holders if belongs else [*holders, last]
            part = ".".join(each for each in path if not each.isdigit())
            counts[part] = counts.get(part, 0) + parameter.numel()
        return counts

    @property
    def tied(self) -> bool:
        """Whether the classes are made from a table that the input end holds."""
        held = self.input.tables()
        return any(table is other for table in self.output.tables() for other in held)
