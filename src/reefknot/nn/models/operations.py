"""Floating-point operations of a training step, for the share of a machine's matrix rate that training achieves.

Only matrix products count. A weight of a matrix costs two operations per row, and as many for each of the two
gradients: 6 in all. Causal attention counts half of the products of all pairs. The cost of an end depends on the batch:

    softmax                 6 D V per target
    translators             sources and targets are multiplied by their own matrices; attention counts pairs of tokens
    adaptive softmax        head and clusters for every target, a tail and its matrix for the targets that lie in it
    adaptive input          the matrix of its band for every token
    char-CNN                convolutions and the layers after them, once per distinct word of the batch

Recomputed activations, scores that are computed again in the backward pass, and rows that only pad a shape do not
count. So a faster program has a higher share, and a program that does more work does not.

A kind of part without a function of its own here counts as matrices that are applied once to every row.

Shapes: B streams, S source tokens, T steps, N rows (targets), D dimensions, V classes, U distinct words, L bytes.
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
"""A product and its two gradients, each with a multiplication and an addition."""


def operations(model: LanguageModel, x_BT: Tensor, y_BT: Tensor) -> int:
    """Return the operations of one forward and backward pass over a window.

    Args:
        model: A language model or a translator.
        x_BT: Inputs of the window, on the host.
        y_BT: Targets of the window, on the host. Tokens without a target (`IGNORE`) count as padding on the right.
    """
    scored_BT = y_BT != IGNORE
    lengths_B = scored_BT.sum(dim=1)
    if isinstance(model, Translator):
        source_BS, x_BT = sides(x_BT, y_BT)
        there_BS = source_BS != PAD
        body = input_operations(model.source, source_BS[there_BS])
        body += source_encoder_operations(model.encoder, there_BS.sum(dim=1), lengths_B)
    else:
        body = encoder_operations(model.encoder, lengths_B)
    return body + input_operations(model.input, x_BT[scored_BT]) + output_operations(model.output, y_BT[scored_BT])


# -- input ends ----------------------------------------------------------------------------------------------------


@singledispatch
def input_operations(part: InputEnd, x_N: Tensor) -> int:
    """Return the operations of an input end for these tokens."""
    return PER_WEIGHT * len(x_N) * _weights(part)


@input_operations.register
def _(part: AdaptiveLookup, x_N: Tensor) -> int:
    rows = _counts(x_N, part.table.bounds)
    weights = [width * part.dim for width in part.projections.widths]
    return PER_WEIGHT * sum(count * weight for count, weight in zip(rows, weights, strict=True))


@input_operations.register
def _(part: CharCNN, x_N: Tensor) -> int:
    spelled_UL = part.spellings[torch.unique(x_N).to(part.spellings.device)] > 0
    windows = int(spelled_UL.sum(dim=1).clamp(min=1).sum())
    per_word = _weights(part.highway) + _weights(part.projection)
    return PER_WEIGHT * (windows * _weights(part.convolutions) + len(spelled_UL) * per_word)


# -- encoders ------------------------------------------------------------------------------------------------------


@singledispatch
def encoder_operations(part: Encoder, lengths_B: Tensor) -> int:
    """Return the operations of an encoder for windows of these lengths."""
    return PER_WEIGHT * int(lengths_B.sum()) * _weights(part)


@encoder_operations.register
def _(part: RecurrentHighway, lengths_B: Tensor) -> int:
    return PER_WEIGHT * int(lengths_B.sum()) * (part.input_weight.numel() + part.weight.numel())


@encoder_operations.register
def _(part: Transformer, lengths_B: Tensor) -> int:
    # Scores and weighted values: two products of T x T by D in each block, half of each masked.
    attention = len(part.blocks) * part.dim * int(lengths_B.square().sum())
    return PER_WEIGHT * (int(lengths_B.sum()) * _weights(part) + attention)


@singledispatch
def source_encoder_operations(part: Encoder, sources_B: Tensor, lengths_B: Tensor) -> int:
    """Return the operations of an encoder for sources and targets of these lengths."""
    return PER_WEIGHT * int(sources_B.sum() + lengths_B.sum()) * _weights(part)


@source_encoder_operations.register
def _(part: AttentionGRU, sources_B: Tensor, lengths_B: Tensor) -> int:
    reading = sum(_weights(layer) for layer in (part.rightward, part.leftward, part.keys))
    once = _weights(part.start)
    writing = _weights(part) - reading - once
    # The weighted sum of the annotations, and the attention scores, which cost as much.
    attention = 2 * part.keys.out_features * int((sources_B * lengths_B).sum())
    rows = int(sources_B.sum()) * reading + len(sources_B) * once + int(lengths_B.sum()) * writing
    return PER_WEIGHT * (rows + attention)


@source_encoder_operations.register
def _(part: EncoderDecoder, sources_B: Tensor, lengths_B: Tensor) -> int:
    reading, writing = _weights(part.source_blocks), _weights(part.target_blocks)
    rows = int(sources_B.sum()) * (reading + _weights(part.source_in)) + int(lengths_B.sum()) * writing
    # Scores and weighted values, two products over D dimensions for each pair of tokens: all pairs of a source, all
    # pairs of a source and its target, and half of the pairs of a target.
    pairs = 2 * sources_B.square() + 2 * sources_B * lengths_B + lengths_B.square()
    return PER_WEIGHT * (rows + len(part.target_blocks) * part.dim * int(pairs.sum()))


# -- output ends ---------------------------------------------------------------------------------------------------


@singledispatch
def output_operations(part: OutputEnd, y_N: Tensor) -> int:
    """Return the operations of the loss of these targets."""
    return PER_WEIGHT * len(y_N) * (_weights(part) + part.context_dim * part.vocab_size)


@output_operations.register
def _(part: Softmax, y_N: Tensor) -> int:
    return classifier_operations(part.classifier, len(y_N))


@output_operations.register
def _(part: Augmented, y_N: Tensor) -> int:
    # Soft targets, once per distinct target: scores, means of vectors and, unless detached, the gradients of both.
    distinct = len(torch.unique(y_N))
    soft = (6 if part.detach_target else 10) * distinct * part.classifier.dim * part.vocab_size
    return classifier_operations(part.classifier, len(y_N)) + soft


@output_operations.register
def _(part: MixtureOfSoftmaxes, y_N: Tensor) -> int:
    latents = PER_WEIGHT * len(y_N) * (_weights(part.latent) + _weights(part.prior))
    return latents + classifier_operations(part.classifier, part.experts * len(y_N))


@output_operations.register
def _(part: SampledSoftmax, y_N: Tensor) -> int:
    return classifier_operations(part.classifier, len(y_N), min(part.samples, part.vocab_size))


@output_operations.register
def _(part: AdaptiveSoftmax, y_N: Tensor) -> int:
    rows = _counts(y_N, part.bounds)
    dim = part.projections.dim
    for_every_row = 0 if part.front is None else _weights(part.front)
    if part.clusters is not None:
        for_every_row += part.clusters.numel()
    if part.head_projection != "none":
        for_every_row += dim * part.projections.widths[0]
    total = PER_WEIGHT * len(y_N) * for_every_row
    for band, classifier in enumerate(part.classifiers):
        assert isinstance(classifier, Classifier)
        total += classifier_operations(classifier, rows[band] if band else len(y_N))
        total += PER_WEIGHT * rows[band] * dim * part.projections.widths[band] if band else 0
    return total


@singledispatch
def classifier_operations(part: Classifier, rows: int, classes: int | None = None) -> int:
    """Return the operations of a classifier for this number of rows, with all of its classes or only some."""
    classes = part.vocab_size if classes is None else classes
    return PER_WEIGHT * rows * (_weights(part) + part.dim * classes)


@classifier_operations.register
def _(part: Drill, rows: int, classes: int | None = None) -> int:
    classes = part.vocab_size if classes is None else classes
    return PER_WEIGHT * (rows * part.dim * classes + classes * _weights(part))


@classifier_operations.register
def _(part: Dual, rows: int, classes: int | None = None) -> int:
    classes = part.vocab_size if classes is None else classes
    of_rows = rows * (_weights(part.context_layer) + part.dim * classes)
    return PER_WEIGHT * (of_rows + classes * _weights(part.label_layer))


# -- counts --------------------------------------------------------------------------------------------------------


def _weights(module: nn.Module) -> int:
    """Return the number of weights in matrices. A table does not count: its rows are looked up, or are classes."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, WordTable | nn.Embedding)}
    matrices = (weight for weight in module.parameters() if weight.dim() > 1 and id(weight) not in tables)
    return sum(weight.numel() for weight in matrices)


def _counts(ids_N: Tensor, bounds: tuple[int, ...]) -> list[int]:
    """Return the number of ids in each band."""
    return [int(((ids_N >= start) & (ids_N < stop)).sum()) for start, stop in pairwise(bounds)]
