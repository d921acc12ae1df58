"""Dynamic evaluation (Krause et al. 2018): the model keeps learning from the text that it is scored on.

The three functions are called in this order:

    statistics = gradient_statistics(model, train_split)                              # reads the training text once
    settings, grid = search_rates(model, valid_split, vocabulary, statistics)         # searches for eta and lambda
    score = dynamic_score(model, test_split, vocabulary, statistics, settings)        # restores the weights at the end

The text is read in short segments. Each segment is scored before the weights are updated on it, so no weights have seen
the tokens that they score. The update of the weights theta is

    theta <- theta + lambda rate (theta_0 - theta) - eta g / (MS + epsilon)

g is the gradient of the mean loss of the segment, and theta_0 are the trained weights. MS holds one number per weight:
the root mean square of its gradient over the training text. MS is never updated. Weights with large gradients are
pulled back faster: rate = MS / m, where m is the mean over the tensors of each tensor's mean MS. lambda rate is at most
1.

Shapes: B streams, T tokens of the text, which is scored as one stream, S tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.kernels.capture import RepeatedSteps, send, side_stream
from reefknot.kernels.small import general_kernels
from reefknot.lab.config.settings import Count, NonNegative, Positive, Settings
from reefknot.lab.evaluation.grid import Grid, Point, grid_search
from reefknot.lab.evaluation.perplexity import Score, autocast, build_stream, score
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.scores import Dynamic
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.streams import Streams
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.encoders.contract import overwrite
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.progress import ProgressCallback, ignore_progress

STREAMS = 100
"""Number of streams (contiguous parts that are read in parallel) when the training text is read for its gradients."""
SEGMENT = 5
"""Number of tokens per segment of a stream. Published rates depend on STREAMS x SEGMENT, so both are constants."""

ETA_FACTORS = (0.6, 0.8, 1.0, 1.2, 1.4, 2.0)
LAMBDA_FACTORS = (0.5, 1.0, 1.5, 2.5)
"""The search grid of Krause et al., in multiples of the default rates. A search may continue beyond the grid."""

_SEGMENTS_PER_REPORT = 50  # number of segments between two progress reports

Scale = Literal["mean", "sum"]
"""Scale of the rates; see `Rates`."""


@dataclass(frozen=True)
class Rates:
    """Rates of dynamic evaluation: the learning rate `eta`, the rate `decay` and `epsilon`.

    `decay`, which the papers call lambda, pulls the weights back to the trained weights. `epsilon` is added to MS.

    Published rates are on one of two scales. The formula at the top of this file uses the newer scale ("mean"). The
    older scale ("sum"), in the paper and in the mixture of softmaxes, uses the root of the *sum* of squares for MS and
    the *sum* over the tensors for m. With B batches in the statistics and K tensors in the model, the updates are the
    same if

        eta_mean = eta_sum / sqrt(B),   epsilon_mean = epsilon_sum / sqrt(B),   lambda_mean = lambda_sum / K
    """

    eta: float
    decay: float
    epsilon: float
    scale: Scale = "mean"

    def on_scale(self, scale: Scale, *, batches: int, tensors: int) -> Rates:
        """Convert the rates to another scale, on which they give the same updates.

        Args:
            scale: The other scale.
            batches: Number of gradients that MS is computed from.
            tensors: Number of trainable tensors in the model.
        """
        if scale == self.scale:
            return self
        power = 1 if scale == "sum" else -1
        batch_factor = math.sqrt(batches) ** power
        tensor_factor = float(tensors) ** power
        return Rates(self.eta * batch_factor, self.decay * tensor_factor, self.epsilon * batch_factor, scale)


DEFAULTS: dict[Scale, Rates] = {
    "mean": Rates(eta=5e-5, decay=2e-3, epsilon=2e-5, scale="mean"),
    "sum": Rates(eta=0.002, decay=0.02, epsilon=0.001, scale="sum"),
}
"""Default rates for segments of 5 tokens, by scale."""


class DynamicSettings(Settings):
    """Settings of dynamic evaluation."""

    model_config = ConfigDict(populate_by_name=True)  # recipes may write `lambda`, which is a keyword in Python

    scale: Annotated[Scale, Field(description="Scale of the rates: mean (newer) or sum (older).")] = "mean"
    eta: Annotated[
        Positive | None,
        Field(description="Learning rate. The default is 5e-5 x segment / 5, or 0.002 x segment / 5 on the scale sum."),
    ] = None
    decay: Annotated[
        NonNegative | None,
        Field(
            alias="lambda",
            description="Rate at which the weights return to the trained weights. The default is 0.002 x segment / 5, "
            "or 0.02 x segment / 5 on the scale sum.",
        ),
    ] = None
    epsilon: Annotated[
        Positive | None,
        Field(
            description="Constant added to the root mean square of the gradients. The default is 2e-5, or 0.001 on "
            "the scale sum."
        ),
    ] = None
    segment: Annotated[Count, Field(description="Number of tokens that are scored before each update.")] = SEGMENT

    def rates(self) -> Rates:
        """Return the rates, with defaults for rates that are not set. Default rates are proportional to the segment."""
        default = DEFAULTS[self.scale]
        segment_factor = self.segment / SEGMENT
        eta = self.eta
        if eta is None:
            eta = default.eta * segment_factor
        decay = self.decay
        if decay is None:
            decay = default.decay * segment_factor
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = default.epsilon
        return Rates(eta, decay, epsilon, self.scale)


class GradientStatistics(NamedTuple):
    """Statistics of the gradients on the training text, on the scale "mean"."""

    ms: list[Tensor]
    """MS, the root mean square of the gradient of each weight, with one tensor per parameter."""
    batches: int
    """Number of gradients that MS is computed from."""

    def pull_rates(self) -> list[Tensor]:
        """Return the relative rate, MS / m, at which each weight is pulled back, with one tensor per parameter."""
        mean_of_tensors = torch.stack([ms.mean() for ms in self.ms])
        overall_mean = mean_of_tensors.mean()
        return [ms / overall_mean for ms in self.ms]


def gradient_statistics(
    model: LanguageModel,
    split: Split,
    *,
    precision: str = "float32",
    progress: ProgressCallback = ignore_progress,
) -> GradientStatistics:
    """Return the root mean square of the gradient of every weight over a text, usually the training text.

    The text is read once, in 100 streams and segments of 5 tokens, without dropout.
    """
    segments = Streams(split.ids, STREAMS, SEGMENT, split.inputs)
    device = next(model.parameters()).device
    state = model.initial_state(STREAMS)
    with adapting(model) as (parameters, _):
        ms = [torch.zeros_like(parameter) for parameter in parameters]
        for index in range(segments.num_windows):
            inputs_BS, targets_BS = segments.window(index)
            # The plan groups the targets by band (a cluster of words of similar frequency) for an adaptive softmax.
            plan = model.output.prepare(targets_BS).to(device)
            with autocast(device, precision):
                losses = model.loss(send(inputs_BS, device), send(targets_BS, device), state, plan)
            state = losses.state

            # Add the squared gradient of the mean loss.
            nll = losses.parts["nll"]
            gradients = _gradients(nll.sum / nll.count, parameters)
            torch._foreach_addcmul_(ms, gradients, gradients)
            if index % _SEGMENTS_PER_REPORT == 0:
                progress("gradients of the training text", index / segments.num_windows)

    # From the sum of squares to the root mean square.
    torch._foreach_div_(ms, segments.num_windows)
    torch._foreach_sqrt_(ms)
    return GradientStatistics(ms, segments.num_windows)


def dynamic_score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    statistics: GradientStatistics,
    settings: DynamicSettings | None = None,
    *,
    precision: str = "float32",
    progress: ProgressCallback = ignore_progress,
) -> Score:
    """Score a text by dynamic evaluation, and restore the weights of the model afterwards."""
    settings = settings or DynamicSettings()
    plain = score(model, split, vocabulary, precision=precision)
    stream = build_stream(split, vocabulary)
    nll_T = _score_while_learning(model, stream, statistics, settings, precision=precision, progress=progress)
    if not bool(nll_T.isfinite().all()):
        raise NonFiniteError(
            f"the loss of dynamic evaluation on the {split.name} text is NaN or infinite; "
            "use a smaller eta or a larger epsilon"
        )
    rates = settings.rates()
    mode = Dynamic(
        kind="dynamic",
        scale=rates.scale,
        eta=rates.eta,
        decay=rates.decay,
        epsilon=rates.epsilon,
        segment=settings.segment,
        gradients=statistics.batches,
        plain=perplexity(plain.mean),
    )
    return replace(plain, nll=nll_T.float().cpu().numpy(), mode=mode)


def search_rates(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    statistics: GradientStatistics,
    settings: DynamicSettings | None = None,
    *,
    precision: str = "float32",
    progress: ProgressCallback = ignore_progress,
) -> tuple[DynamicSettings, Grid]:
    """Search for eta and lambda on a validation text, over the authors' grid and beyond its edges.

    Rates that are given explicitly are not searched. Returns the best settings, and the losses of all points.
    """
    settings = settings or DynamicSettings()
    stream = build_stream(split, vocabulary)
    initial = settings.rates()
    etas = [initial.eta]
    if settings.eta is None:
        etas = [initial.eta * factor for factor in ETA_FACTORS]
    lambdas = [initial.decay]
    if settings.decay is None:
        lambdas = [initial.decay * factor for factor in LAMBDA_FACTORS]

    def settings_at(point: Point) -> DynamicSettings:
        return settings.model_copy(update={"eta": point["eta"], "decay": point["lambda"]})

    def measure(point: Point, progress: ProgressCallback) -> float:
        point_settings = settings_at(point)
        nll_T = _score_while_learning(model, stream, statistics, point_settings, precision=precision, progress=progress)
        return float(nll_T.mean())

    grid = grid_search({"eta": etas, "lambda": lambdas}, measure, split, progress)
    return settings_at(grid.best), grid


@contextmanager
def adapting(model: LanguageModel) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield the trainable parameters of a model, and a copy of their trained values, which are restored on exit.

    In this context, the model is in evaluation mode, without dropout. Encoders compute gradients in this mode, too,
    with and without cuDNN. Class vectors are not cached, because they change with the parameters.
    """
    if not model.encoder.carries_state:
        raise SettingsError(
            "dynamic evaluation reads short segments, so the encoder must carry its state from one to the next, but "
            f"{type(model.encoder).__name__} carries none; use more context instead (--context, --stride)"
        )
    parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = [parameter.detach().clone() for parameter in parameters]
    was_training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            yield parameters, trained
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)
        model.train(was_training)


def _score_while_learning(
    model: LanguageModel,
    stream: tuple[Tensor, Tensor],
    statistics: GradientStatistics,
    settings: DynamicSettings,
    *,
    precision: str,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """Return the loss of every token, nll_T, of a model that learns while it reads, without waiting for the device.

    On a GPU, all segments are replays of one CUDA graph (a recorded sequence of kernels), except the first segment and
    a shorter last segment. A replay always uses the same tensors, so everything that changes from segment to segment is
    updated in place: the position in the text, the state and the weights.
    """
    device = next(model.parameters()).device
    use_graph = device.type == "cuda" and not model.synchronizes
    inputs_1T, targets_1T = stream
    inputs_1T = inputs_1T.to(device)
    targets_1T = targets_1T.to(device)
    num_tokens = inputs_1T.shape[1]
    num_full_segments, num_remaining_tokens = divmod(num_tokens, settings.segment)

    state = _initial_state(model)
    position = torch.zeros((), dtype=torch.int64, device=device)
    nll_T = torch.zeros(num_tokens, dtype=torch.float64, device=device)
    with side_stream(device) if use_graph else nullcontext(), adapting(model) as (parameters, trained):
        pull_factors, step_sizes = _update_factors(settings, statistics)

        def learn(length: int) -> None:
            """Score the next `length` tokens and update the weights on them."""
            positions_S = position + torch.arange(length, device=device)
            inputs_1S = inputs_1T[:, positions_S]
            targets_1S = targets_1T[:, positions_S]
            with autocast(device, precision), general_kernels():  # the same bits whether or not the step is captured
                logp_1S, next_state = model.target_log_probs(inputs_1S, targets_1S, state)
            gradients = _gradients(-logp_1S.mean(), parameters)
            with torch.no_grad():
                nll_T.index_copy_(0, positions_S, -logp_1S[0].double())
                # The update at the top of this file, for all parameters at once: the pull towards theta_0, then the
                # gradient step.
                torch._foreach_lerp_(parameters, trained, pull_factors)
                torch._foreach_addcmul_(parameters, gradients, step_sizes, value=-1.0)
                overwrite(state, next_state)
                position.add_(length)

        learn_segment: Callable[[], None] = partial(learn, settings.segment)
        if use_graph:
            learn_segment = partial(RepeatedSteps[None](device), None, learn_segment)
        for index in range(num_full_segments):
            learn_segment()
            if index % _SEGMENTS_PER_REPORT == 0:
                progress("scoring and learning", index / num_full_segments)
        if num_remaining_tokens:
            learn(num_remaining_tokens)
    return nll_T


def _initial_state(model: LanguageModel) -> dict[str, Tensor]:
    """Return the state before the first token, in tensors that later states can be copied into.

    They need the dtype of later states, which is float64 for a float64 model.
    """
    model_dtype = next(model.parameters()).dtype
    state = {}
    for name, tensor in model.initial_state(1).items():
        state[name] = tensor.to(torch.promote_types(tensor.dtype, model_dtype))
    return state


def _update_factors(settings: DynamicSettings, statistics: GradientStatistics) -> tuple[list[Tensor], list[Tensor]]:
    """Return the factors of the update for each parameter.

    The first list has the factors of the pull, lambda rate (at most 1). The second list has the factors of the
    gradient, eta / (MS + epsilon).
    """
    rates = settings.rates().on_scale("mean", batches=statistics.batches, tensors=len(statistics.ms))
    pull_factors = [(rates.decay * pull_rate).clamp(max=1.0) for pull_rate in statistics.pull_rates()]
    step_sizes = [rates.eta / (ms + rates.epsilon) for ms in statistics.ms]
    return pull_factors, step_sizes


def _gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the loss, zero for parameters without influence. Their `grad` is left unchanged."""
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
