"""A language model: an input end (word ids to vectors), an encoder, and an output end (classifier and loss).

Start reading at `LanguageModel`. Training cuts a text into B streams, which are the rows of a batch, and reads them
window by window. A window has T steps of every stream. `LanguageModel.loss` runs one window and returns `Losses`: sums,
counts and the state for the next window.

Shapes: B streams, T steps, D dimensions, N = B x T positions, M positions that the output end reads
(by default all N).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError, describe_type
from reefknot.kernels.arguments import check_is_tensor
from reefknot.kernels.scores import IGNORE
from reefknot.nn.encoders.contract import Encoded, Encoder, State, detach
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.regularisation import RegularisationSettings, activation_losses
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan, add_scalars
from reefknot.nn.tables import WordTable


@dataclass(frozen=True)
class Losses:
    """The loss of one window in named parts, the penalties on parameters, and the state after the window."""

    parts: dict[str, LossPart]
    """Named parts of the loss: sums over the targets of the window."""
    penalties: dict[str, Tensor]
    """Penalties on parameters, by name. They are added once per optimiser step, not once per window."""
    state: State
    """The state for the next window, detached from the graph."""

    def sum(self) -> Tensor:
        """Return the weighted sum of the parts without the penalties, a scalar."""
        return add_scalars([part.weighted_sum() for part in self.parts.values()])

    def mean(self) -> Tensor:
        """Return the mean loss per token, a scalar, for a training loop that makes one optimiser step per window.

        Each part of the loss is divided by its count and multiplied by its weight. The penalties are divided by the
        number of tokens. A recipe selects the same with `divisor = "tokens"`.
        """
        means = [part.weighted_sum() / max(part.count, 1) for part in self.parts.values()]
        num_tokens = max(self.parts["nll"].count, 1)
        means += [penalty / num_tokens for penalty in self.penalties.values()]
        return add_scalars(means)


class LanguageModel(nn.Module):
    """A language model: an input end, an encoder, and an output end that predicts the next word.

        words = WordTable(10_000, 200)
        model = LanguageModel(Lookup(words), LSTM(200, 200), Softmax(Plain(words)))
        losses = model.loss(tokens)                           # tokens: ids with shape (B, T + 1)
        losses.mean().backward()
        losses = model.loss(next_tokens, state=losses.state)  # the next window of the same streams

    Args:
        input: The input end, which turns ids into vectors.
        encoder: The encoder, which turns vectors into hidden states.
        output: The output end, which turns hidden states into probabilities. It is tied to the input end if both hold
            the same table.
        regularisation: Weights of penalties on the activations. By default there are none.
    """

    def __init__(
        self,
        input: InputEnd,
        encoder: Encoder,
        output: OutputEnd,
        regularisation: RegularisationSettings | None = None,
    ) -> None:
        super().__init__()
        _check_parts_fit(input, encoder, output)
        self.input = input
        self.encoder = encoder
        self.output = output
        self.regularisation = regularisation or RegularisationSettings()

    def initial_state(self, streams: int) -> State:
        """Return the state before the first window of a text.

        Args:
            streams: Number of streams, B.
        """
        return self.encoder.initial_state(streams, next(self.parameters()).device)

    def decoding_state(self, streams: int, steps: int | None = None) -> State:
        """Return the state before a text that is decoded step by step, as in generation.

        Args:
            streams: Number of streams, B.
            steps: Capacity of the KV cache. If it is given, the state keeps its shape, which a CUDA graph needs. By
                default the cache of a transformer grows with every step.
        """
        return self.encoder.decoding_state(streams, next(self.parameters()).device, steps)

    @property
    def synchronizes(self) -> bool:
        """Whether the model reads a value from the GPU in a forward pass or to score targets, which a CUDA graph cannot
        capture."""
        return self.input.synchronizes or self.encoder.synchronizes or self.output.synchronizes

    def forward(self, tokens_BT: Tensor, state: State | None = None) -> Encoded:
        """Return the hidden states of a window, and the state after it.

        Args:
            tokens_BT: Token ids, with shape (B, T).
            state: The state before the window. By default the window starts a text.
        """
        _check_ids("tokens", tokens_BT)
        if state is None:
            state = self.initial_state(tokens_BT.shape[0])
        _check_streams(state, tokens_BT.shape[0])
        encoded: Encoded = self.encoder(self.input(tokens_BT), state)
        return encoded

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        state: State | None = None,
        plan: Plan | None = None,
        positions_M: Tensor | None = None,
    ) -> Losses:
        """Return the loss of a window.

        Args:
            tokens_BT: Token ids, with shape (B, T).
            targets_BT: Target ids, with shape (B, T). Targets of -100 are ignored. By default each token is the target
                of the token before it, so T + 1 tokens give T targets.
            state: The state before the window. By default the window starts a text.
            plan: The result of `output.prepare` for the targets. By default it is computed here.
            positions_M: For a window with padding, the positions that the output end reads, with shape (M,), counted
                over streams and steps. They must include all positions that have a target. The plan is for these
                positions.
        """
        if targets_BT is None:
            _check_ids("tokens", tokens_BT, min_steps=2)
            targets_BT = tokens_BT[:, 1:]
            tokens_BT = tokens_BT[:, :-1]
        _check_targets(tokens_BT, targets_BT)
        encoded = self(tokens_BT, state)
        return self._compute_losses(encoded, targets_BT, plan, positions_M)

    def _compute_losses(
        self, encoded: Encoded, targets_BT: Tensor, plan: Plan | None, positions_M: Tensor | None
    ) -> Losses:
        """Return the losses of a window from its hidden states. The arguments are those of `loss`."""
        hidden_MD = encoded.output.flatten(0, 1)
        targets_M = targets_BT.reshape(-1)
        mask_BT = None
        if positions_M is not None:
            # Positions are distinct, so the gradient of this selection involves no sum whose order could vary.
            hidden_MD = hidden_MD.index_select(0, positions_M)
            targets_M = targets_M.index_select(0, positions_M)
            mask_BT = targets_BT != IGNORE
        if plan is None:
            plan = self.output.prepare(targets_BT if positions_M is None else targets_M)

        loss_parts = self.output.loss(hidden_MD, targets_M, plan)
        loss_parts |= activation_losses(encoded, self.regularisation, mask_BT, plan.count)
        return Losses(loss_parts, self.output.penalties(), detach(encoded.state))

    def target_log_probs(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Return the log-probability of every target, with shape (B, T), and the state after the window.

        Args:
            tokens_BT: Token ids, with shape (B, T).
            targets_BT: Target ids, with shape (B, T). The result is 0 where the target is -100.
            state: The state before the window. By default the window starts a text.
        """
        _check_targets(tokens_BT, targets_BT)
        encoded = self(tokens_BT, state)
        hidden_ND = encoded.output.flatten(0, 1)
        log_probs_N = self.output.target_log_probs(hidden_ND, targets_BT.reshape(-1))
        return log_probs_N.view_as(targets_BT), encoded.state

    def flops(self, inputs_BT: Tensor, targets_BT: Tensor) -> int:
        """Return the floating-point operations of a training step on a window (see `nn/part.py`).

        Args:
            inputs_BT: Token ids of the window, with shape (B, T), on the host.
            targets_BT: Target ids, with shape (B, T), on the host. Targets of -100 count as padding on the right.
        """
        is_scored_BT = targets_BT != IGNORE
        input_flops = self.input.flops(inputs_BT[is_scored_BT])
        encoder_flops = self.encoder.flops(is_scored_BT.sum(dim=1))
        output_flops = self.output.flops(targets_BT[is_scored_BT])
        return input_flops + encoder_flops + output_flops

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters of `input`, `encoder` and `output`. A shared tensor counts once."""
        counts = {child_name: 0 for child_name, _ in self.named_children()}
        for parameter_name, parameter in self.named_parameters():
            child_name = parameter_name.partition(".")[0]
            counts[child_name] += parameter.numel()
        return counts

    def parameter_counts_by_module(self) -> dict[str, int]:
        """Return the number of parameters of each module by name, such as `output.classifier.layers`.

        A list of layers counts as one module.
        """
        counts: dict[str, int] = {}
        for parameter_name, parameter in self.named_parameters():
            *module_path, attribute = parameter_name.split(".")
            module = self.get_submodule(".".join(module_path))
            # The weight of a table, and all parameters of torch's own layers, are listed under the module's name.
            is_torch_layer = type(module).__module__.startswith("torch.nn")
            listed_path = module_path
            if attribute != "weight" and not is_torch_layer:
                listed_path = [*module_path, attribute]
            # Without the indices of lists of layers.
            listed_name = ".".join(component for component in listed_path if not component.isdigit())
            counts[listed_name] = counts.get(listed_name, 0) + parameter.numel()
        return counts

    @property
    def tied(self) -> bool:
        """Whether the class vectors are made from a table that the input end holds."""
        return share_table(self.input.tables(), self.output.tables())


def _check_ids(name: str, ids_BT: Any, min_steps: int = 0) -> None:
    """Raise an error unless these are ids with shape (B, T) and at least `min_steps` steps."""
    check_is_tensor("LanguageModel", name, ids_BT)
    has_shape = ids_BT.dim() == 2 and ids_BT.shape[1] >= min_steps
    if not has_shape or ids_BT.dtype not in (torch.int64, torch.int32):
        steps = f", and at least {min_steps} steps, because each token is the target of the token before it"
        raise ArgumentError(
            f"LanguageModel: {name} have the shape {tuple(ids_BT.shape)} and the type {ids_BT.dtype}; they must be "
            f"integer ids with shape (streams, steps){steps if min_steps else ''}"
        )


def _check_targets(tokens_BT: Any, targets_BT: Any) -> None:
    """Raise an error unless every token has a target."""
    _check_ids("tokens", tokens_BT)
    _check_ids("targets", targets_BT)
    if targets_BT.shape != tokens_BT.shape:
        raise ArgumentError(
            f"LanguageModel: tokens are {tuple(tokens_BT.shape)}, but targets are {tuple(targets_BT.shape)}; pass one "
            "target per token"
        )


def _check_streams(state: State, num_streams: int) -> None:
    """Raise an error unless every tensor of the state has this number of streams."""
    for name, tensor in state.items():
        if tensor.shape[1] != num_streams:
            raise ArgumentError(
                f"LanguageModel: the window has {num_streams} streams, but {name!r} of the state has "
                f"{tensor.shape[1]}; pass the state after the previous window of the same streams, or none at the "
                "start of a text"
            )


def _check_parts_fit(input: InputEnd, encoder: Encoder, output: OutputEnd) -> None:
    """Raise an error unless these are the three parts of a model, vocabularies and dimensions agree, and every
    parameter is trained."""
    for name, part, base in (("input", input, InputEnd), ("encoder", encoder, Encoder), ("output", output, OutputEnd)):
        if not isinstance(part, base):
            raise SettingsError(
                f"LanguageModel: {name} is {describe_type(part)} of {type(part).__module__}; it must be "
                f"an {base.__name__} of Reefknot. In a model of your own, call an output end on your hidden states"
            )
    # An input end without tables, which reads spellings, may know more words than there are classes.
    has_too_few_words = input.vocab_size < output.vocab_size
    has_too_many_words = bool(input.tables()) and input.vocab_size > output.vocab_size
    if has_too_few_words or has_too_many_words:
        raise SettingsError(
            f"the input end has {input.vocab_size} words but the output end has {output.vocab_size}; "
            "give their tables the same vocabulary"
        )
    if input.dim != encoder.input_dim:
        raise SettingsError(
            f"the input end has dimension {input.dim} but the encoder expects {encoder.input_dim}; "
            "make the encoder's input_dim equal to the dimension of the input's table"
        )
    if encoder.dim != output.context_dim:
        raise SettingsError(
            f"the encoder has dimension {encoder.dim} but the output end expects {output.context_dim}; "
            "make the output's table as large as the encoder's hidden state, or use a classifier that projects "
            "(kind = 'projected')"
        )
    input_parameter_ids = {id(parameter) for parameter in input.parameters()}
    for parameter, message in output.untrained_parameters():
        if id(parameter) not in input_parameter_ids:
            raise SettingsError(message)


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """Put the model into evaluation mode inside the `with` block, and back into its previous mode afterwards.

    No parameter may change inside the block, because class vectors are computed only once.
    """
    was_training = model.training
    model.eval()
    try:
        with model.output.cache_for_evaluation():
            yield
    finally:
        model.train(was_training)


def share_table(tables: Sequence[WordTable], other_tables: Sequence[WordTable]) -> bool:
    """Return whether at least one table object is in both sequences."""
    table_ids = {id(table) for table in tables}
    return any(id(table) in table_ids for table in other_tables)
