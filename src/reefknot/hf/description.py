"""Describe an output end as JSON, for the config of a saved model, and build it again.

    description = describe_end(end, embedding)     # {"end": {"class": "Softmax", "classifier": ...}, "shared": [...]}
    end = build_end(description, embedding, order)

Every part is described by the name of its class and the arguments of its constructor (`RecordsArguments`). Tables and
projections may be used in several places, so they are listed once, under `shared`, and named by their position. A table
that holds the embedding of the model is described as such, so that the new end is tied to the embedding again.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

import reefknot.nn.classifiers
import reefknot.nn.outputs
from reefknot.errors import ArgumentError, DataError, describe_type
from reefknot.hf.bands import EmbeddingBands, TokenOrder
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.part import RecordsArguments
from reefknot.nn.tables import BandedTable, BandProjections, EmbeddingTable, WordTable

Description = dict[str, Any]

_SHARED = (WordTable, BandedTable, BandProjections)
_HOLDS = {"embedding": nn.Embedding, "linear": nn.Linear}


def describe_end(end: OutputEnd, embedding: nn.Module) -> Description:
    """Return the description of an output end. An argument that JSON cannot hold raises an `ArgumentError`.

    Args:
        end: The output end.
        embedding: The input embedding of the model. Tables that hold it are tied.
    """
    shared: list[Any] = []
    descriptions: list[Description] = []

    def describe(value: Any, name: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple | nn.ModuleList):
            return [describe(item, name) for item in value]
        if isinstance(value, _SHARED):
            if not any(value is other for other in shared):
                shared.append(value)
                descriptions.append({})
                descriptions[_position(shared, value)] = describe_shared(value)
            return {"shared": _position(shared, value)}
        if isinstance(value, OutputEnd | Classifier):
            return {"class": type(value).__name__, **describe_arguments(value)}
        raise ArgumentError(
            f"replace_head: {name} is {describe_type(value)}, which cannot be saved in the config of the model"
        )

    def describe_shared(value: Any) -> Description:
        kind = type(value).__name__
        if isinstance(value, EmbeddingBands):
            if any(cast(EmbeddingTable, band).layer is not embedding for band in value.bands):
                raise ArgumentError(
                    "save_pretrained: the bands of the output end are no longer rows of the input embedding, for "
                    "example because PEFT copied the end (modules_to_save); make the end with a BandedTable instead"
                )
            return {"class": kind, "cutoffs": list(value.bounds[1:-1])}
        if isinstance(value, EmbeddingTable):
            if value.layer is embedding:
                return {"class": kind, "holds": "input", "unit_norm": value.unit_norm}
            holds = "linear" if isinstance(value.layer, nn.Linear) else "embedding"
            sizes = {"vocab_size": value.vocab_size, "dim": value.dim}
            return {"class": kind, "holds": holds, **sizes, "unit_norm": value.unit_norm}
        return {"class": kind, **describe_arguments(value)}

    def describe_arguments(part: RecordsArguments) -> Description:
        kind = type(part).__name__
        return {name: describe(value, f"{name} of {kind}") for name, value in part.constructor_arguments.items()}

    return {"end": describe(end, "end"), "shared": descriptions}


def _position(objects: list[Any], value: Any) -> int:
    """Return the position of an object in a list, compared by identity."""
    return next(index for index, other in enumerate(objects) if other is value)


def build_end(description: Description, embedding: nn.Embedding, order: TokenOrder | None) -> OutputEnd:
    """Build an output end from its description, with new parameters.

    Args:
        description: The result of `describe_end`.
        embedding: The input embedding of the model, to which tied tables belong.
        order: The order of the tokens by frequency, for an adaptive end.
    """
    classes = {kind.__name__: kind for base in (OutputEnd, Classifier) for kind in _subclasses(base)}
    classes |= {"WordTable": WordTable, "BandedTable": BandedTable, "BandProjections": BandProjections}
    shared: dict[int, Any] = {}

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "shared" in value:
            position = value["shared"]
            if position not in shared:
                shared[position] = build_shared(description["shared"][position])
            return shared[position]
        return build_part(value)

    def build_shared(settings: Description) -> Any:
        if settings["class"] == EmbeddingBands.__name__:
            return EmbeddingBands(embedding, order, cutoffs=settings["cutoffs"])
        if settings["class"] == EmbeddingTable.__name__:
            return EmbeddingTable(build_layer(settings), settings["unit_norm"])
        return build_part(settings)

    def build_layer(settings: Description) -> nn.Embedding | nn.Linear:
        vocab_size, dim = settings.get("vocab_size", 0), settings.get("dim", 0)
        if settings["holds"] == "input":
            return embedding
        if settings["holds"] == "embedding":
            return nn.Embedding(vocab_size, dim)
        return nn.Linear(dim, vocab_size, bias=False)

    def build_part(settings: Description) -> Any:
        name = settings["class"]
        if name not in classes:
            raise DataError(
                f"the config of the model names the class {name}, which this version of Reefknot does not have; "
                "update Reefknot, or import your own class before you load the model"
            )
        return classes[name](**{key: build(value) for key, value in settings.items() if key != "class"})

    end: OutputEnd = build(description["end"])
    return end


def change_vocab_size(description: Description, vocab_size: int) -> Description:
    """Return the description of the same end for another number of words.

    Args:
        description: The result of `describe_end`, for an end without bands.
        vocab_size: The new number of words.
    """
    resized = []
    for table in description["shared"]:
        resized.append({**table, "vocab_size": vocab_size} if "vocab_size" in table else table)
    return {**description, "shared": resized}


def _subclasses(base: type) -> Iterator[type]:
    """Yield all subclasses of a class, after importing the modules of Reefknot that define them."""
    for package in (reefknot.nn.outputs, reefknot.nn.classifiers):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        if kind.__name__ != base.__name__:  # torch.export makes such subclasses of the modules that it traces
            yield kind
            yield from _subclasses(kind)
