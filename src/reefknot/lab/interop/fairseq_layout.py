"""Derive the settings of a Reefknot experiment from a fairseq checkpoint. Both describe the same language model.

    layout = Layout.from_checkpoint(checkpoint)       # from the names and shapes of the tensors
    options = Options.from_checkpoint(checkpoint)     # what tensors do not show, such as heads and dropout rates
    settings = layout.to_settings(options, corpus, checkpoint.path)

In an adaptive model, the words are divided into bands by frequency. Words of a rarer band have vectors of a lower
dimension, and a projection maps them to the dimension of the model. The adaptive softmax has a head for the first band
and a tail for each other band. Besides the vectors of its words, the head has one vector for each tail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.interop.fairseq_files import FairseqCheckpoint
from reefknot.lab.text.corpus import CorpusSettings

# Prefixes of the names of fairseq's tensors.
EMBEDDINGS = "decoder.embed_tokens.embeddings"
HEAD = "decoder.adaptive_softmax.head"
TAIL = "decoder.adaptive_softmax.tail"
LAYERS = "decoder.layers"
FINAL_NORM = "decoder.layer_norm"
VERSION = "decoder.adaptive_softmax.version"  # the full name

_DROPOUT_RATE = Field(default=0.0, ge=0.0, lt=1.0)


class Options(BaseModel):
    """Options of a checkpoint that do not follow from its tensors. The defaults are fairseq's defaults."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    decoder_attention_heads: int = Field(ge=1)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    attention_dropout: float = _DROPOUT_RATE
    activation_dropout: float = _DROPOUT_RATE
    relu_dropout: float = _DROPOUT_RATE
    """The former name of activation_dropout."""
    adaptive_softmax_dropout: float = _DROPOUT_RATE
    activation_fn: str = "relu"
    decoder_normalize_before: bool = True
    """Whether norms come before the layers (True) or after the residual connections (False)."""
    no_scale_embedding: bool = False
    no_token_positional_embeddings: bool = False
    add_bos_token: bool = False
    tokens_per_sample: int = Field(default=1024, ge=1)
    sample_break_mode: str | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: FairseqCheckpoint) -> Options:
        """Return the options of a checkpoint, or raise a DataError if the architecture is not supported."""
        try:
            options = cls.model_validate(checkpoint.arguments)
        except ValidationError as error:
            first_error = error.errors(include_url=False)[0]
            name = ".".join(map(str, first_error["loc"]))
            raise DataError(f"{checkpoint.path}: invalid option {name}: {first_error['msg']}") from None

        supported_values = {
            "activation_fn": "relu",
            "decoder_normalize_before": True,
            "no_token_positional_embeddings": False,
            "add_bos_token": False,
        }
        for name, supported_value in supported_values.items():
            value = getattr(options, name)
            if value != supported_value:
                raise DataError(
                    f"{checkpoint.path}: unsupported architecture: {name} = {value}; only models with "
                    f"{supported_value} can be imported"
                )
        return options


@dataclass(frozen=True)
class Bands:
    """The number of words and the dimension of every band of a table."""

    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def from_shapes(cls, shapes: list[tuple[int, int]]) -> Bands:
        """Return the bands of a table from the shapes of their matrices: number of words, dimension."""
        sizes = tuple(size for size, _ in shapes)
        dims = tuple(dim for _, dim in shapes)
        return cls(sizes, dims)

    def to_settings(self, path: Path) -> dict[str, Any]:
        """Return the settings of a banded table, or raise a DataError if dimensions do not fall by one factor.

        The dimensions (1024, 256, 64) have the factor 4.

        Args:
            path: The path of the checkpoint, for messages.
        """
        dim = self.dims[0]
        second_dim = self.dims[1] if len(self.dims) > 1 else dim
        factor = dim // max(second_dim, 1)
        expected_dims = tuple(dim // max(factor, 1) ** band for band in range(len(self.dims)))
        if self.dims != expected_dims:
            raise DataError(
                f"{path}: unsupported architecture: the dimensions of the bands, {self.dims}, do not fall by one "
                "integer factor"
            )
        return {"kind": "banded", "dim": dim, "sizes": list(self.sizes[:-1]), "factor": factor}


@dataclass(frozen=True)
class Layout:
    """The part of a model's architecture that follows from its tensors."""

    dim: int
    layers: int
    ffn_dim: int
    final_norm: bool
    input_bands: Bands
    """The bands of the embeddings."""
    output_bands: Bands | None
    """The bands of the class vectors, or None if they are tied to the embeddings."""
    tied_projections: bool
    """Whether input and output also share the projections between a band and the hidden state."""

    @classmethod
    def from_checkpoint(cls, checkpoint: FairseqCheckpoint) -> Layout:
        """Derive the layout from the names and shapes of the tensors.

        The file stores a shared projection twice, so the values show whether projections are shared.
        """
        _check_architecture(checkpoint)
        tensors = checkpoint.tensors

        input_shapes = _matrix_shapes(checkpoint, f"{EMBEDDINGS}.{{}}.0.weight")
        tail_shapes = _matrix_shapes(checkpoint, f"{TAIL}.{{}}.2.weight")
        is_tied = f"{HEAD}.word_proj.weight" in tensors
        output_bands = None
        if not is_tied:
            head_rows, head_dim = _matrix_shape(checkpoint, f"{HEAD}.weight")
            head_words = head_rows - len(tail_shapes)  # the head also has one row for each tail
            output_bands = Bands.from_shapes([(head_words, head_dim), *tail_shapes])

        dim, _ = _matrix_shape(checkpoint, f"{EMBEDDINGS}.0.1.weight")
        layer_shapes = _matrix_shapes(checkpoint, f"{LAYERS}.{{}}.fc1.weight")
        ffn_dim, _ = _matrix_shape(checkpoint, f"{LAYERS}.0.fc1.weight")
        return cls(
            dim=dim,
            layers=len(layer_shapes),
            ffn_dim=ffn_dim,
            final_norm=f"{FINAL_NORM}.weight" in tensors,
            input_bands=Bands.from_shapes(input_shapes),
            output_bands=output_bands,
            tied_projections=is_tied and _are_projections_equal(tensors, num_tails=len(tail_shapes)),
        )

    def to_settings(self, options: Options, corpus: CorpusSettings, path: Path) -> dict[str, Any]:
        """Return the settings of the experiment.

        The settings of training are placeholders, except for the window length `steps`, which evaluation uses.

        Args:
            options: The options of the checkpoint.
            corpus: The text of the run.
            path: The path of the checkpoint, for messages.
        """
        # The input end uses the table `words` and the projections `bands`. If the output end is tied, it uses them too.
        tables = {"words": self.input_bands.to_settings(path)}
        projections: dict[str, Any] = {"bands": {"kind": "bands", "table": "words", "dim": self.dim}}
        output_table = "words"
        if self.output_bands:
            output_table = "classes"
            tables["classes"] = self.output_bands.to_settings(path)
        output_projections = "bands"
        if not self.tied_projections:
            output_projections = "tails"
            projections["tails"] = {"kind": "bands", "table": output_table, "dim": self.dim, "head": False}

        input_scale = 1.0 if options.no_scale_embedding else math.sqrt(self.dim)
        evaluation: dict[str, Any] = {}
        if options.sample_break_mode == "eos":  # the model was trained on single lines
            evaluation["windows"] = {"kind": "lines"}
        return {
            "corpus": corpus.model_dump(),
            "vocabulary": {"dictionary": "fairseq"},
            "tables": tables,
            "projections": projections,
            "input": {
                "kind": "adaptive",
                "table": "words",
                "projections": "bands",
                "scale": input_scale,
            },
            "encoder": {
                "kind": "transformer",
                "layers": self.layers,
                "heads": options.decoder_attention_heads,
                "ffn_dim": self.ffn_dim,
                "dropout": options.dropout,
                "dropout_attention": options.attention_dropout,
                "dropout_relu": options.activation_dropout or options.relu_dropout,
                "final_norm": self.final_norm,
            },
            "output": {
                "kind": "adaptive",
                "classifier": {"kind": "plain", "table": output_table, "bias": False},
                "projections": output_projections,
                "softmax_dropout": options.adaptive_softmax_dropout,
                "tail_dropout": options.adaptive_softmax_dropout,
            },
            "training": {
                "epochs": 1,
                "batch": 1,
                "steps": options.tokens_per_sample,
                "optimiser": {"kind": "sgd", "learning_rate": 1.0},
                "schedule": {"kind": "constant"},
            },
            "evaluation": evaluation,
        }


def _check_architecture(checkpoint: FairseqCheckpoint) -> None:
    """Raise a DataError if the names of the tensors show an architecture that cannot be imported."""
    path = checkpoint.path
    tensors = checkpoint.tensors
    if f"{EMBEDDINGS}.0.0.weight" not in tensors or f"{TAIL}.0.0.weight" not in tensors:
        raise DataError(
            f"{path}: unsupported architecture: only language models with adaptive input and adaptive softmax can "
            "be imported (transformer_lm with --adaptive-input and --adaptive-softmax-cutoff)"
        )
    if VERSION not in tensors:
        raise DataError(
            f"{path}: written by a version of fairseq from 2018, in which clusters replaced words of the head; use "
            "a checkpoint of a later version"
        )


def _matrix_shapes(checkpoint: FairseqCheckpoint, name_format: str) -> list[tuple[int, int]]:
    """Return the shapes (rows, columns) of numbered matrices, such as one matrix per layer.

    Args:
        checkpoint: The checkpoint.
        name_format: Names of the matrices, with {} in place of the number. Numbers start from 0.
    """
    shapes: list[tuple[int, int]] = []
    for number in itertools.count():
        name = name_format.format(number)
        if name not in checkpoint.tensors:
            break
        shapes.append(_matrix_shape(checkpoint, name))
    return shapes


def _matrix_shape(checkpoint: FairseqCheckpoint, name: str) -> tuple[int, int]:
    """Return the number of rows and columns of a tensor, or raise a DataError if it is not a matrix."""
    shape = checkpoint.get(name).shape
    if len(shape) != 2:
        raise DataError(f"{checkpoint.path}: the tensor {name} is not a matrix")
    rows, columns = shape
    return rows, columns


def _are_projections_equal(tensors: Mapping[str, Tensor], num_tails: int) -> bool:
    """Return whether every tail has the same projection as its band of the input."""
    for tail in range(num_tails):
        input_band = tail + 1  # the first band is the head
        output_name = f"{TAIL}.{tail}.0.weight"
        input_name = f"{EMBEDDINGS}.{input_band}.1.weight"
        if output_name not in tensors or input_name not in tensors:
            return False
        if not torch.equal(tensors[output_name], tensors[input_name]):
            return False
    return True
