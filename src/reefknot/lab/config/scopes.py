"""Constructor arguments of the classifiers inside an output end, where they differ from those of the output end.

An output end computes the distribution over words and the loss. It contains one or more classifiers, which have the
vectors of the output classes. `Registry.build` in `registry.py` calls these functions before it builds the classifiers.

A function gets the settings of the output end and the available arguments: dimensions, the vocabulary size, and the
word tables (the parameters of every word) by name. It returns the available arguments of each classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.nn.tables import check_banded


def one_classifier_per_band(settings: Any, available: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the available arguments of each classifier of an adaptive softmax.

    An adaptive softmax has one classifier per band, which is a group of words of similar frequency. A classifier gets
    the table of its band, and the dimension of the hidden state that is projected for this band.
    """
    table_name = settings.classifier.table
    banded_table = available["tables"][table_name]
    check_banded(banded_table, "adaptive output")
    context_dims = [band_table.dim for band_table in banded_table.tables]
    if settings.head_projection == "none":
        context_dims[0] = settings.project_to or available["context_dim"]

    available_by_band: list[Mapping[str, Any]] = []
    for band_table, context_dim in zip(banded_table.tables, context_dims, strict=True):
        tables = {**available["tables"], table_name: band_table}
        available_by_band.append({**available, "tables": tables, "context_dim": context_dim})
    return available_by_band


def latent_as_context(settings: Any, available: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the available arguments of the classifier of a mixture of softmaxes.

    This classifier reads a latent vector instead of the hidden state. `latent_dim` is the dimension of this vector.
    """
    if settings.latent_dim is None:
        return available
    return {**available, "context_dim": settings.latent_dim}
