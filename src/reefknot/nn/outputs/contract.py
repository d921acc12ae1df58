"""What every output end promises, whatever it is made of.

Shapes: N rows (tokens), D width of the hidden state, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.capture import send
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.contract import Classifier, H
from reefknot.nn.classifiers.held import Kept, Shared
from reefknot.nn.tables import WordTable


@dataclass(frozen=True)
class LossPart:
    """One named part of a loss: a sum and what it was summed over. Whoever adds batches up divides, once."""

    sum: Tensor
    count: int
    weight: float = 1.0
    """What it weighs in the objective. The sum itself stays plain, so that metrics show the paper's own quantity."""


@dataclass(frozen=True)
class Plan:
    """What the host knows of a batch's targets before they are copied to the device."""

    count: int
    """Targets that are scored, so that no later step has to ask the device."""

    def to(self, device: torch.device) -> Self:
        """The same with every tensor on a device; itself where they are there already."""
        return self.map(lambda tensor: send(tensor, device))

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        found: list[Tensor] = []
        self.map(found.append)
        return found

    def map(self, function: Callable[[Tensor], Any]) -> Self:
        """The same with something else for every tensor; itself where the tensors come back."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped = {name: _mapped(value, function) for name, value in given.items()}
        return self if all(mapped[name] is value for name, value in given.items()) else replace(self, **mapped)


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A tensor, or a tuple of them however nested, through a function; anything else as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        mapped = tuple(_mapped(each, function) for each in value)
        return value if all(one is other for one, other in zip(value, mapped, strict=True)) else mapped
    return value


class OutputEnd(nn.Module):
    """An output end owns its loss: nothing else looks inside it."""

    vocab_size: int
    context_dim: int
    """Width of the hidden states it reads."""
    rows_per_token: int = 1
    """How many rows of scores a token takes: what a window's memory is reckoned by."""
    waits: bool = False
    """Whether `topk` or `target_log_probs` asks a GPU for a number, which a step that is captured must not; a loss has
    its plan for that."""

    def prepare(self, y_cpu: Tensor) -> Plan:
        """Look at the targets while they are still on the host."""
        scored = y_cpu != IGNORE
        outside = scored & ((y_cpu < 0) | (y_cpu >= self.vocab_size))
        if bool(outside.any()):
            raise ArgumentError(
                f"target {int(y_cpu[outside].flatten()[0])} is no class: there are {self.vocab_size}, counted from 0; "
                f"targets to leave out are {IGNORE}"
            )
        return Plan(count=int(scored.sum()))

    def prepare_pieces(self, pieces: Sequence[Tensor]) -> Sequence[Plan]:
        """The plans of all pieces of an update, whose shapes should vary together: an update is captured once for each
        set of them."""
        return [self.prepare(y_cpu) for y_cpu in pieces]

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Named parts of the loss. `nll` is always among them: it alone makes perplexity."""
        raise NotImplementedError

    def penalties(self) -> dict[str, Tensor]:
        """Penalties on parameters: sums like the losses, added once per optimiser step before the one division."""
        return {}

    def log_probs(self, h_ND: Tensor) -> Tensor:
        """All log-probabilities, logp_NV, at least in float32: the readable reference."""
        raise NotImplementedError

    def target_log_probs(self, h_ND: Tensor, y_N: Tensor) -> Tensor:
        """Log-probability of each row's target, logp_N; zero where the target is `IGNORE`."""
        raise NotImplementedError

    def topk(self, h_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best classes of each row: (logp_NK, ids_NK), best first."""
        self.check_k(k)
        values, ids = self.log_probs(h_ND).topk(k, dim=-1)
        return values, ids

    def check_k(self, k: int) -> None:
        """Refuse to search for more classes than there are, or for none."""
        if not 1 <= k <= self.vocab_size:
            raise SettingsError(
                f"the {k} best of {self.vocab_size} classes were asked for; ask for 1 to {self.vocab_size}"
            )

    def sample(self, h_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One class per row, drawn from the distribution: ids_N."""
        return torch.multinomial(self.log_probs(h_ND).exp(), 1, generator=generator).squeeze(-1)

    def vectors(self) -> Tensor:
        """One vector per class, for looking at."""
        raise NotImplementedError

    def tables(self) -> list[WordTable]:
        """What the class vectors are made from: an input end that holds one of these is tied to this end."""
        raise NotImplementedError

    def left_to_others(self) -> list[tuple[nn.Parameter, str]]:
        """Parameters of shared objects that it holds without training them, each with the sentence that refuses a model
        in which no other end does."""
        return []

    # -- class vectors computed once -------------------------------------------------------------------------------

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Compute the class vectors once for all calls without gradients, while no parameter changes: evaluation."""
        with self._held_by(Kept):
            yield

    @contextmanager
    def sharing(self) -> Iterator[Callable[[], None]]:
        """Compute the class vectors once for the micro-batches of an optimiser step.

        Call what it gives before the last of them: that one's backward goes through the label networks, for all. They
        have one dropout mask for the whole step.
        """
        with self._held_by(Shared) as shares:

            def join() -> None:
                for share in shares:
                    share.join()

            yield join
            for share in shares:
                share.check_joined()

    @contextmanager
    def _held_by(self, kind: Callable[[], H]) -> Iterator[list[H]]:
        with ExitStack() as stack:
            found = [each for each in self.modules() if isinstance(each, Classifier)]
            yield [stack.enter_context(classifier.holding(kind())) for classifier in found]
