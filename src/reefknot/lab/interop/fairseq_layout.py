"""What a checkpoint of fairseq shows of its language model, and the experiment that describes the same model here.

The tensors show most: bands and widths, blocks, what is tied, a last norm. Heads, rates of dropout and the scale of the
vectors are told by the options alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.interop.fairseq_files import FairseqCheckpoint
from reefknot.lab.text.corpus import CorpusSettings

WORDS = "decoder.embed_tokens.embeddings"
HEAD = "decoder.adaptive_softmax.head"
TAIL = "decoder.adaptive_softmax.tail"
LAYERS = "decoder.layers"
LAST_NORM = "decoder.layer_norm"
VERSION = "decoder.adaptive_softmax.version"

_RATE = Field(default=0.0, ge=0.0, lt=1.0)


class Options(BaseModel):
    """What only the options of a checkpoint tell. Those left out have the value that fairseq gives them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    decoder_attention_heads: int = Field(ge=1)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    attention_dropout: float = _RATE
    activation_dropout: float = _RATE
    relu_dropout: float = _RATE
    """What activation_dropout was called before."""
    adaptive_softmax_dropout: float = _RATE
    activation_fn: str = "relu"
    decoder_normalize_before: bool = True
    """False: the norms stand after the residuals. The tensors are the same."""
    no_scale_embedding: bool = False
    no_token_positional_embeddings: bool = False
    add_bos_token: bool = False
    tokens_per_sample: int = Field(default=1024, ge=1)
    sample_break_mode: str | None = None

    @classmethod
    def of(cls, checkpoint: FairseqCheckpoint) -> Options:
        """The options of a checkpoint, unless they are those of a model that we do not have."""
        try:
            found = cls.model_validate(checkpoint.arguments)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            name = ".".join(map(str, fault["loc"]))
            raise DataError(f"{checkpoint.path}: its option {name} does not fit: {fault['msg']}") from None
        needed = {
            "activation_fn": "relu",
            "decoder_normalize_before": True,
            "no_token_positional_embeddings": False,
            "add_bos_token": False,
        }
        for name, value in needed.items():
            if getattr(found, name) != value:
                raise DataError(
                    f"{checkpoint.path}: another architecture: {name} = {getattr(found, name)}; only models with "
                    f"{value} can be imported"
                )
        return found


@dataclass(frozen=True)
class Bands:
    """How many words the bands of a table have, and how wide their vectors are."""

    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, shapes: list[tuple[int, int]]) -> Bands:
        return cls(*zip(*shapes, strict=True))

    def settings(self, where: Path) -> dict[str, Any]:
        """Those of a banded table: each band is narrower than the one before by one whole factor."""
        dim, second = (*self.widths, self.widths[0])[:2]
        factor = dim // max(second, 1)
        if self.widths != tuple(dim // max(factor, 1) ** band for band in range(len(self.widths))):
            raise DataError(f"{where}: bands of the widths {self.widths}: no whole factor leads from one to the next")
        return {"kind": "banded", "dim": dim, "sizes": list(self.sizes[:-1]), "factor": factor}


@dataclass(frozen=True)
class Layout:
    """What the tensors show of a model."""

    dim: int
    layers: int
    ffn_dim: int
    final_norm: bool
    words: Bands
    classes: Bands | None
    """Of the output's own table; None: it has that of the input."""
    tied_projections: bool

    @classmethod
    def of(cls, checkpoint: FairseqCheckpoint) -> Layout:
        """Read off names and shapes. A matrix that both ends use is in the file twice."""
        tensors, where = checkpoint.tensors, checkpoint.path
        if f"{WORDS}.0.0.weight" not in tensors or f"{TAIL}.0.0.weight" not in tensors:
            raise DataError(
                f"{where}: another architecture: only language models with adaptive input and adaptive softmax can be "
                "imported (transformer_lm with --adaptive-input and --adaptive-softmax-cutoff)"
            )
        if VERSION not in tensors:
            raise DataError(f"{where}: from a fairseq of 2018, whose clusters took the place of words; use a later one")
        words = _shapes(checkpoint, f"{WORDS}.{{}}.0.weight")
        tails = _shapes(checkpoint, f"{TAIL}.{{}}.2.weight")
        tied = f"{HEAD}.word_proj.weight" in tensors
        heads = [] if tied else [_shape(checkpoint, f"{HEAD}.weight")]
        classes = [*((rows - len(tails), width) for rows, width in heads), *tails]
        return cls(
            dim=_shape(checkpoint, f"{WORDS}.0.1.weight")[0],
            layers=len(_shapes(checkpoint, f"{LAYERS}.{{}}.fc1.weight")),
            ffn_dim=_shape(checkpoint, f"{LAYERS}.0.fc1.weight")[0],
            final_norm=f"{LAST_NORM}.weight" in tensors,
            words=Bands.of(words),
            classes=None if tied else Bands.of(classes),
            tied_projections=tied
            and all(
                _equal(tensors, f"{TAIL}.{number}.0.weight", f"{WORDS}.{number + 1}.1.weight")
                for number in range(len(tails))
            ),
        )

    def settings(self, options: Options, corpus: CorpusSettings, where: Path) -> dict[str, Any]:
        """The experiment. What it says of training is what evaluation reads of it, the length of a window."""
        tables = {"words": self.words.settings(where)}
        projections: dict[str, Any] = {"bands": {"kind": "bands", "table": "words", "dim": self.dim}}
        classifier, tails = "words", "bands"
        if self.classes:
            classifier, tables["classes"] = "classes", self.classes.settings(where)
        if not self.tied_projections:
            tails, projections["tails"] = (
                "tails",
                {"kind": "bands", "table": classifier, "dim": self.dim, "head": False},
            )
        return {
            "corpus": corpus.model_dump(),
            "vocabulary": {"dictionary": "fairseq"},
            "tables": tables,
            "projections": projections,
            "input": {
                "kind": "adaptive",
                "table": "words",
                "projections": "bands",
                "scale": 1.0 if options.no_scale_embedding else math.sqrt(self.dim),
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
                "classifier": {"kind": "plain", "table": classifier, "bias": False},
                "projections": tails,
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
            "evaluation": {"windows": {"kind": "lines"}} if options.sample_break_mode == "eos" else {},
        }


def _shape(checkpoint: FairseqCheckpoint, name: str) -> tuple[int, int]:
    match tuple(checkpoint.get(name).shape):
        case (rows, columns):
            return rows, columns
    raise DataError(f"{checkpoint.path}: the tensor {name} is no matrix")


def _shapes(checkpoint: FairseqCheckpoint, name: str) -> list[tuple[int, int]]:
    """Shapes of the matrices of that name, in which {} stands for a number from 0."""
    end = next(number for number in count() if name.format(number) not in checkpoint.tensors)
    return [_shape(checkpoint, name.format(number)) for number in range(end)]


def _equal(tensors: Mapping[str, Tensor], one: str, other: str) -> bool:
    return one in tensors and other in tensors and torch.equal(tensors[one], tensors[other])
