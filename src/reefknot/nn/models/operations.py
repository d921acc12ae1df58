"""Floating-point operations of a training step: what its achieved share of a machine's matrix rate is reckoned by.

Only products of matrices count. A matrix of weights costs two operations per weight and row, and the two gradients as
much each: 6 in all. Causal attention counts half of the products of all pairs. What an end costs depends on the batch:

    softmax                 6 D V per target
    translators             sources and targets meet their own matrices; attention counts pairs of places
    adaptive softmax        head and clusters for every target, a tail and its matrix for the targets that lie in it
    adaptive input          the matrix of its band for every token
    char-CNN                convolutions and what follows them, once per distinct word of the batch

What a method makes a second time (activations made again, scores made again in the backward pass) and rows that only
fill up a shape (padding, rows of a tail without a target, bands asked for words of others) do not count: a faster
program has a higher share, a busier one has not.

A kind of part that has no line here is taken for matrices that meet every row once, which is true of most.

Shapes: B streams, T steps, N rows (targets), D width, V classes, U distinct words.
"""

from __future__ import annotations

from functools import singledispatch
from itertools import pairwise

import torch
from torch import Tensor, nn

from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.dual import Dual
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.highway import RecurrentHighway
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.translator import PAD, Translator, sides
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.sampled import SampledSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

PER_WEIGHT = 6
"""A product and its two gradients, each a multiplication and an addition."""


def operations(model: LanguageModel, x_BT: Tensor, y_BT: Tensor) -> int:
    """Of one forward and backward pass over a window, whose inputs and targets are on the host.

    Tokens without a target (`IGNORE`) are taken for padding at the right.
    """
    scored_BT = y_BT != IGNORE
    lengths_B = scored_BT.sum(dim=1)
    if isinstance(model, Translator):
        source_BS, x_BT = sides(x_BT, y_BT)
        there_BS = source_BS != PAD
        body = of_input(model.source, source_BS[there_BS])
        body += of_source_encoder(model.encoder, there_BS.sum(dim=1), lengths_B)
    else:
        body = of_encoder(model.encoder, lengths_B)
    return body + of_input(model.input, x_BT[scored_BT]) + of_output(model.output, y_BT[scored_BT])


# -- input ends ----------------------------------------------------------------------------------------------------


@singledispatch
def of_input(part: InputEnd, x_N: Tensor) -> int:
    """Operations of an input end that looks up so many tokens."""
    return PER_WEIGHT * len(x_N) * _weights(part)


@of_input.register
def _(part: AdaptiveLookup, x_N: Tensor) -> int:
    rows = _counts(x_N, part.table.bounds)
    return PER_WEIGHT * sum(each * width * part.dim for each, width in zip(rows, part.projections.widths, strict=True))


@of_input.register
def _(part: CharCNN, x_N: Tensor) -> int:
    spelled_UL = part.spellings[torch.unique(x_N).to(part.spellings.device)] > 0
    windows = int(spelled_UL.sum(dim=1).clamp(min=1).sum())
    at_once = windows * _weights(part.convolutions) + len(spelled_UL) * (
        _weights(part.highway) + _weights(part.projection)
    )
    return PER_WEIGHT * at_once


# -- encoders ------------------------------------------------------------------------------------------------------


@singledispatch
def of_encoder(part: Encoder, lengths_B: Tensor) -> int:
    """Operations of an encoder that reads windows of these lengths."""
    return PER_WEIGHT * int(lengths_B.sum()) * _weights(part)


@of_encoder.register
def _(part: RecurrentHighway, lengths_B: Tensor) -> int:
    return PER_WEIGHT * int(lengths_B.sum()) * (part.input_weight.numel() + part.weight.numel())


@of_encoder.register
def _(part: Transformer, lengths_B: Tensor) -> int:
    # Scores and weighted values: two products of T x T by D in each block, and half of each is masked.
    attention = len(part.blocks) * part.dim * int(lengths_B.square().sum())
    return PER_WEIGHT * (int(lengths_B.sum()) * _weights(part) + attention)


@singledispatch
def of_source_encoder(part: Encoder, sources_B: Tensor, lengths_B: Tensor) -> int:
    """Operations of an encoder that reads sources and targets of these lengths."""
    return PER_WEIGHT * int(sources_B.sum() + lengths_B.sum()) * _weights(part)


@of_source_encoder.register
def _(part: AttentionGRU, sources_B: Tensor, lengths_B: Tensor) -> int:
    reading = sum(_weights(each) for each in (part.rightward, part.leftward, part.keys))
    once = _weights(part.start)
    writing = _weights(part) - reading - once
    # The weighted annotations; what scores them adds one number for each of theirs.
    attention = 2 * part.keys.out_features * int((sources_B * lengths_B).sum())
    rows = int(sources_B.sum()) * reading + len(sources_B) * once + int(lengths_B.sum()) * writing
    return PER_WEIGHT * (rows + attention)


@of_source_encoder.register
def _(part: EncoderDecoder, sources_B: Tensor, lengths_B: Tensor) -> int:
    reading, writing = (_weights(each) for each in (part.source_blocks, part.target_blocks))
    rows = int(sources_B.sum()) * (reading + _weights(part.source_in)) + int(lengths_B.sum()) * writing
    # Scores and weighted values, two products of width D for each pair of places: all pairs of a source, all of a
    # source and its target, and half of those of a target.
    pairs = 2 * sources_B.square() + 2 * sources_B * lengths_B + lengths_B.square()
    return PER_WEIGHT * (rows + len(part.target_blocks) * part.dim * int(pairs.sum()))


# -- output ends ---------------------------------------------------------------------------------------------------


@singledispatch
def of_output(part: OutputEnd, y_N: Tensor) -> int:
    """Operations of the loss of these targets."""
    return PER_WEIGHT * len(y_N) * (_weights(part) + part.context_dim * part.vocab_size)


@of_output.register
def _(part: Softmax, y_N: Tensor) -> int:
    return of_classifier(part.classifier, len(y_N))


@of_output.register
def _(part: Augmented, y_N: Tensor) -> int:
    # Soft targets, once per distinct target: scores, means of vectors, and, where they learn, the gradients of both.
    distinct = len(torch.unique(y_N))
    soft = (6 if part.detach_target else 10) * distinct * part.classifier.dim * part.vocab_size
    return of_classifier(part.classifier, len(y_N)) + soft


@of_output.register
def _(part: MixtureOfSoftmaxes, y_N: Tensor) -> int:
    own = PER_WEIGHT * len(y_N) * (_weights(part.latent) + _weights(part.prior))
    return own + of_classifier(part.classifier, part.experts * len(y_N))


@of_output.register
def _(part: SampledSoftmax, y_N: Tensor) -> int:
    return of_classifier(part.classifier, len(y_N), min(part.samples, part.vocab_size))


@of_output.register
def _(part: AdaptiveSoftmax, y_N: Tensor) -> int:
    rows = _counts(y_N, part.bounds)
    width = part.projections.dim
    everywhere = 0 if part.front is None else _weights(part.front)
    if part.clusters is not None:
        everywhere += part.clusters.numel()
    if part.head_projection != "none":
        everywhere += width * part.projections.widths[0]
    total = PER_WEIGHT * len(y_N) * everywhere
    for band, classifier in enumerate(part.classifiers):
        assert isinstance(classifier, Classifier)
        total += of_classifier(classifier, rows[band] if band else len(y_N))
        total += PER_WEIGHT * rows[band] * width * part.projections.widths[band] if band else 0
    return total


@singledispatch
def of_classifier(part: Classifier, rows: int, classes: int | None = None) -> int:
    """Operations of a classifier that meets so many rows, all of its classes or some."""
    classes = part.vocab_size if classes is None else classes
    return PER_WEIGHT * rows * (_weights(part) + part.dim * classes)


@of_classifier.register
def _(part: Drill, rows: int, classes: int | None = None) -> int:
    classes = part.vocab_size if classes is None else classes
    return PER_WEIGHT * (rows * part.dim * classes + classes * _weights(part))


@of_classifier.register
def _(part: Dual, rows: int, classes: int | None = None) -> int:
    classes = part.vocab_size if classes is None else classes
    met = rows * (_weights(part.context_layer) + part.dim * classes)
    return PER_WEIGHT * (met + classes * _weights(part.label_layer))


# -- counts --------------------------------------------------------------------------------------------------------


def _weights(module: nn.Module) -> int:
    """Numbers of its matrices. A table is none: its rows are looked up, or are classes."""
    tables = {id(each.weight) for each in module.modules() if isinstance(each, WordTable | nn.Embedding)}
    return sum(each.numel() for each in module.parameters() if each.dim() > 1 and id(each) not in tables)


def _counts(ids_N: Tensor, bounds: tuple[int, ...]) -> list[int]:
    """How many of the ids lie in each band."""
    return [int(((ids_N >= start) & (ids_N < stop)).sum()) for start, stop in pairwise(bounds)]
