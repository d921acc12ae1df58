"""Dynamic evaluation (Krause et al. 2018): a model goes on learning from the text that it is scored on.

The text is read in short segments. Each is scored first and learned from afterwards, so that no token is scored by
weights that have seen it:

    theta <- theta + lambda rate (theta_0 - theta) - eta g / (MS + epsilon)

g is the gradient of the segment's mean loss, theta_0 the trained weights. MS, one number per weight, is the root mean
square of that weight's gradients over the training text, read once in 100 streams by segments of 5 tokens without
dropout; it is never updated. Weights with large gradients are pulled back faster: rate = MS / m, where m is the mean
over the tensors of each tensor's mean MS, and lambda rate never exceeds 1.

The numbers in print are on one of two scales. The newer ("mean") is the one above. The older ("sum": the paper, the
mixture of softmaxes) takes the root of the *sum* of squares for MS and the *sum* over the tensors for m. With B batches
in the statistics and K tensors in the model the updates are the same where

    eta_mean = eta_sum / sqrt(B),   epsilon_mean = epsilon_sum / sqrt(B),   lambda_mean = lambda_sum / K

The numbers depend on 100 x 5 tokens per gradient too, so these two are constants here.

Shapes: T tokens of the one stream.
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
from reefknot.lab.config.settings import Count, NonNegative, Positive, Settings
from reefknot.lab.evaluation.grid import Grid, Point, Progress, search, unheard
from reefknot.lab.evaluation.perplexity import Score, autocast, one_stream, score
from reefknot.lab.runs.scores import Dynamic
from reefknot.lab.runs.units import perplexity
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.streams import Streams
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.encoders.contract import overwrite
from reefknot.nn.models.language_model import LanguageModel

STREAMS, SEGMENT = 100, 5
"""How the training text is read for the gradients' statistics; the numbers in print are for segments of as many."""

ETA_FACTORS = (0.6, 0.8, 1.0, 1.2, 1.4, 2.0)
LAMBDA_FACTORS = (0.5, 1.0, 1.5, 2.5)
"""What the authors' grid is, in multiples of the defaults; a search goes on from there."""

_TOLD_EVERY = 50  # segments

Scale = Literal["mean", "sum"]


@dataclass(frozen=True)
class Rates:
    """How fast the weights follow the text (eta), go back to where they were (decay, the papers' lambda), and how
    little a gradient may be expected to be (epsilon)."""

    eta: float
    decay: float
    epsilon: float
    scale: Scale = "mean"

    def on_scale(self, scale: Scale, *, batches: int, tensors: int) -> Rates:
        """The rates on this scale that make the same updates."""
        if scale == self.scale:
            return self
        power = 1 if scale == "sum" else -1
        root, count = math.sqrt(batches) ** power, float(tensors) ** power
        return Rates(self.eta * root, self.decay * count, self.epsilon * root, scale)


DEFAULTS: dict[Scale, Rates] = {
    "mean": Rates(eta=5e-5, decay=2e-3, epsilon=2e-5, scale="mean"),
    "sum": Rates(eta=0.002, decay=0.02, epsilon=0.001, scale="sum"),
}


class DynamicSettings(Settings):
    """How a model learns from the text that it is scored on."""

    model_config = ConfigDict(populate_by_name=True)  # lambda, which a recipe may say, is no name in Python

    scale: Annotated[Scale, Field(description="which scale the rates are on: mean (newer) or sum (older)")] = "mean"
    eta: Annotated[
        Positive | None, Field(description="rate of learning; left out, 5e-5 (sum: 0.002) x segment / 5")
    ] = None
    decay: Annotated[
        NonNegative | None,
        Field(alias="lambda", description="lambda, the pull back; left out, 0.002 (sum: 0.02) x segment / 5"),
    ] = None
    epsilon: Annotated[Positive | None, Field(description="added to MS; left out, 2e-5 (sum: 0.001)")] = None
    segment: Annotated[Count, Field(description="tokens scored before each update")] = SEGMENT

    def rates(self) -> Rates:
        """The rates with what was left out filled in."""
        default = DEFAULTS[self.scale]
        longer = self.segment / SEGMENT
        return Rates(
            default.eta * longer if self.eta is None else self.eta,
            default.decay * longer if self.decay is None else self.decay,
            default.epsilon if self.epsilon is None else self.epsilon,
            self.scale,
        )


class GradientStatistics(NamedTuple):
    """What the gradients of the training text were like, on the scale "mean"."""

    ms: list[Tensor]
    """MS of each parameter."""
    batches: int

    def rates(self) -> list[Tensor]:
        """How fast each weight is pulled back, before lambda."""
        mean = torch.stack([each.mean() for each in self.ms]).mean()
        return [each / mean for each in self.ms]


def gradient_statistics(
    model: LanguageModel,
    split: Split,
    *,
    precision: str = "float32",
    progress: Progress = unheard,
) -> GradientStatistics:
    """Root mean square of the gradient of every weight over a text, the training text as a rule."""
    windows = Streams(split.ids, STREAMS, SEGMENT, split.inputs)
    device = next(model.parameters()).device
    state = model.initial_state(STREAMS)
    with adapting(model) as (parameters, _):
        squares = [torch.zeros_like(each) for each in parameters]
        for number in range(windows.windows):
            x_BT, y_BT = windows.window(number)
            plan = model.output.prepare(y_BT).to(device)
            with autocast(device, precision):
                losses = model.loss(send(x_BT, device), send(y_BT, device), state, plan)
            state = losses.state
            nll = losses.parts["nll"]
            gradients = _gradients(nll.sum / nll.count, parameters)
            torch._foreach_addcmul_(squares, gradients, gradients)
            if number % _TOLD_EVERY == 0:
                progress("gradients of the training text", number / windows.windows)
    torch._foreach_div_(squares, windows.windows)
    torch._foreach_sqrt_(squares)
    return GradientStatistics(squares, windows.windows)


def dynamic_score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    statistics: GradientStatistics,
    settings: DynamicSettings | None = None,
    *,
    precision: str = "float32",
    progress: Progress = unheard,
) -> Score:
    """Score a text with a model that learns from it, and put the model back as it was."""
    settings = settings or DynamicSettings()
    plain = score(model, split, vocabulary, precision=precision)
    nll_T = _adapt(model, one_stream(split, vocabulary), statistics, settings, precision, progress)
    if not bool(nll_T.isfinite().all()):
        raise NonFiniteError(
            f"the model, learning from the {split.name} text, gives it a probability that is not a number; "
            "use a smaller eta or a greater epsilon"
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
    progress: Progress = unheard,
) -> tuple[DynamicSettings, Grid]:
    """Try the authors' grid on a validation text, and beyond it. What is given of eta and lambda stays as it is."""
    settings = settings or DynamicSettings()
    stream = one_stream(split, vocabulary)
    start = settings.rates()
    axes = {
        "eta": [start.eta * factor for factor in (ETA_FACTORS if settings.eta is None else (1.0,))],
        "lambda": [start.decay * factor for factor in (LAMBDA_FACTORS if settings.decay is None else (1.0,))],
    }

    def at(point: Point) -> DynamicSettings:
        return settings.model_copy(update={"eta": point["eta"], "decay": point["lambda"]})

    def measure(point: Point, progress: Progress) -> float:
        return float(_adapt(model, stream, statistics, at(point), precision, progress).mean())

    grid = search(axes, measure, split, progress)
    return at(grid.best), grid


@contextmanager
def adapting(model: LanguageModel) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The model's trainable parameters and their values now, to which they return however the context is left.

    Meanwhile nothing is dropped; encoders give gradients in evaluation mode too, cuDNN or not. Class vectors are not
    held, because they change with the parameters.
    """
    if not model.encoder.carries:
        raise SettingsError(
            "dynamic evaluation learns from one short segment after the other, and knows the earlier ones by the state "
            f"that is carried; {type(model.encoder).__name__} carries none: give it more context instead "
            "(--context, --stride)"
        )
    parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
    trained = [each.detach().clone() for each in parameters]
    was_training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            yield parameters, trained
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)
        model.train(was_training)


def _adapt(
    model: LanguageModel,
    stream: tuple[Tensor, Tensor],
    statistics: GradientStatistics,
    settings: DynamicSettings,
    precision: str,
    progress: Progress = unheard,
) -> Tensor:
    """The loss of every token by a model that learns as it reads, nll_T; nothing in between waits for the device.

    A segment finds on the device where it begins, so that on a GPU all but the first and the last, which may be
    shorter, are replays of one graph.
    """
    first = next(model.parameters())
    device, dtype = first.device, first.dtype
    capture = device.type == "cuda" and not model.waits
    x_1T, y_1T = (each.to(device) for each in stream)
    tokens, whole = x_1T.shape[1], x_1T.shape[1] // settings.segment
    # As wide as what will be left here: a float64 model's state is float64.
    state = {name: each.to(torch.promote_types(each.dtype, dtype)) for name, each in model.initial_state(1).items()}
    start = torch.zeros((), dtype=torch.int64, device=device)
    nll_T = torch.zeros(tokens, dtype=torch.float64, device=device)
    with side_stream(device) if capture else nullcontext(), adapting(model) as (parameters, trained):
        rates = settings.rates().on_scale("mean", batches=statistics.batches, tensors=len(statistics.ms))
        pull = [(rates.decay * each).clamp(max=1.0) for each in statistics.rates()]
        step = [rates.eta / (each + rates.epsilon) for each in statistics.ms]

        def read(length: int) -> None:
            here_S = start + torch.arange(length, device=device)
            with autocast(device, precision):
                logp_1S, after = model.target_log_probs(x_1T[:, here_S], y_1T[:, here_S], state)
            gradients = _gradients(-logp_1S.mean(), parameters)
            with torch.no_grad():
                nll_T.index_copy_(0, here_S, -logp_1S[0].double())
                torch._foreach_lerp_(parameters, trained, pull)
                torch._foreach_addcmul_(parameters, gradients, step, value=-1.0)
                overwrite(state, after)
                start.add_(length)

        read_segment: Callable[[], None] = partial(read, settings.segment)
        if capture:
            read_segment = partial(RepeatedSteps[None](device), None, read_segment)
        for number in range(whole):
            read_segment()
            if number % _TOLD_EVERY == 0:
                progress("scoring and learning", number / whole)
        if rest := tokens % settings.segment:
            read(rest)
    return nll_T


def _gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Zero for a parameter that the loss does not reach. The parameters' own `grad` is left alone."""
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
