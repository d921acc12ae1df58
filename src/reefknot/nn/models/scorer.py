"""A trained language model as a plain module for `torch.export`.

    scorer = Scorer(model, kind="targets")
    program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())

Start reading at `Scorer`. It shares the weights of the model, and stores everything that is constant after training:
the class vectors of DRILL and dual classifiers, and the word vectors of a char-CNN. An exported scorer contains only
torch's own operators, so it runs without Reefknot.

Shapes: B streams (rows of a batch), T steps, N = B x T tokens, V classes, K best classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.choice import using
from reefknot.nn.bounds import Count
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.folded import fold_classifier, store_vectors
from reefknot.nn.encoders.contract import State
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel

ScorerKind = Literal["log_probs", "targets", "topk", "step"]


class Scorer(nn.Module):
    """A trained language model that computes one kind of score, always in evaluation mode.

        kind        inputs              results
        log_probs   tokens_BT           log-probabilities of all classes, (B, T, V)
        targets     tokens_BT,          log-probability of every target, (B, T); 0 where the target is -100
                    targets_BT
        topk        tokens_BT           log-probabilities and ids of the best classes, best first, (B, T, K) each
        step        tokens_B, state     log-probabilities of all classes after one more token, (B, V), and the state

    Each call of the first three kinds starts a text. For `step`, the first state is the result of `initial_state`.

    Exported programs accept any number of streams. The number of steps is dynamic for a transformer. For a recurrent
    encoder, it is fixed to that of the example inputs, because the loop over the steps is unrolled; use `step` for
    texts of any length.

    The scorer shares the weights of the model. Make a new scorer after further training, because class vectors that are
    computed from a table are stored.

    Args:
        model: The language model. It is not changed.
        kind: The kind of scores: `log_probs`, `targets`, `topk` or `step`.
        k: Number of best classes that `topk` returns.
    """

    def __init__(self, model: LanguageModel, kind: ScorerKind = "log_probs", k: Count = 10) -> None:
        super().__init__()
        if kind not in get_args(ScorerKind):
            raise SettingsError(f"scorer: kind = {kind!r}: must be one of {', '.join(get_args(ScorerKind))}")
        if model.encoder.reads_source:
            raise SettingsError(
                "scorer: a translator also reads a source, which a scorer cannot pass on; use its methods"
            )
        if kind == "topk":
            model.output.check_topk_size(k)
        self.kind = kind
        self.k = k
        self.model = _fold(model)
        self.eval()

    def train(self, mode: bool = True) -> Scorer:
        """Stay in evaluation mode, because dropout would make the scores random.

        Args:
            mode: Ignored.
        """
        return super().train(False)

    def initial_state(self, streams: int) -> State:
        """Return the state before the first step of a text, for the kind `step`.

        Args:
            streams: Number of streams, B.
        """
        return self.model.decoding_state(streams)

    def forward(self, tokens: Tensor, targets_or_state: Any = None) -> Any:
        """Return the scores of the tokens (see the table above).

        Args:
            tokens: Token ids, with shape (B, T), or (B,) for the kind `step`.
            targets_or_state: The targets, with shape (B, T), for the kind `targets`; the state for the kind `step`.
        """
        with _plain_operators():
            if self.kind == "step":
                return self._step(tokens, targets_or_state)
            if self.kind == "targets":
                log_probs_BT, _ = self.model.target_log_probs(tokens, targets_or_state)
                return log_probs_BT
            hidden_ND = self.model(tokens).output.flatten(0, 1)
            if self.kind == "topk":
                log_probs_NK, ids_NK = self._topk(hidden_ND)
                return log_probs_NK.view(*tokens.shape, -1), ids_NK.view(*tokens.shape, -1)
            return self.model.output.log_probs(hidden_ND).view(*tokens.shape, -1)

    def example_inputs(self, streams: int = 3, steps: int = 5) -> tuple[Any, ...]:
        """Return inputs for `torch.export.export`.

        Args:
            streams: Number of streams, B.
            steps: Number of steps, T. For the kind `step`, the number of steps before the state.
        """
        device = next(self.model.parameters()).device
        tokens_BT = torch.zeros((streams, steps), dtype=torch.long, device=device)
        if self.kind == "targets":
            return tokens_BT, tokens_BT.clone()
        if self.kind != "step":
            return (tokens_BT,)
        with torch.no_grad():
            state = self.model(tokens_BT, self.initial_state(streams)).state
        return tokens_BT[:, 0].clone(), state

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return the dynamic dimensions of the inputs for `torch.export.export`."""
        streams = torch.export.Dim("streams", min=1)
        if self.kind == "step":
            state_shapes: dict[str, dict[int, Any]] = {}
            cached_steps = torch.export.Dim("cached_steps", min=0)
            for name, tensor in self.initial_state(1).items():
                state_shapes[name] = {1: streams}
                if tensor.dim() == 5:  # a KV cache, (2, B, H, S, K), which grows with every step
                    state_shapes[name][3] = cached_steps
            return {0: streams}, state_shapes
        shape: dict[int, Any] = {0: streams}
        if not self.model.encoder.carries_state:
            shape[1] = torch.export.Dim("steps", min=1)
        return (shape, shape) if self.kind == "targets" else (shape,)

    def extra_repr(self) -> str:
        """Return the arguments that `print(scorer)` shows."""
        return f"kind={self.kind}" + (f", k={self.k}" if self.kind == "topk" else "")

    def _step(self, tokens_B: Tensor, state: State) -> tuple[Tensor, State]:
        encoded = self.model(tokens_B[:, None], state)
        return self.model.output.log_probs(encoded.output[:, 0]), encoded.state

    def _topk(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            return self.model.output.topk(hidden_ND, self.k)
        # The searches of the output ends depend on the number of rows and on values.
        log_probs_NK, ids_NK = self.model.output.log_probs(hidden_ND).topk(self.k, dim=-1)
        return log_probs_NK, ids_NK


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Use plain torch instead of our own operators inside the `with` block, if the call is exported or compiled."""
    if not torch.compiler.is_compiling():
        yield
        return
    with using("reference"):
        yield


def _fold(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model that shares its parameters and stores what is constant after training."""
    # deepcopy() does not copy the tensors that are already in its memo.
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    folded = copy.deepcopy(model, memo).eval()
    with torch.no_grad():
        if not folded.input.tables():
            # Word vectors that are computed from spellings become a table.
            folded.input = Lookup(store_vectors(folded.input.vectors()))
    for module in list(folded.output.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Classifier):
                setattr(module, name, fold_classifier(child))
    # Only the loss of the augmented softmax reads this table.
    if "table" in folded.output._modules:
        del folded.output._modules["table"]
    return folded.eval()
