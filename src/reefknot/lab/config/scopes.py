"""Arguments of the nested classifiers of output ends, where they differ from the arguments of the end itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.nn.tables import check_banded


def one_classifier_per_band(settings: Any, available: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the arguments of an adaptive softmax's classifiers, one per band.

    A classifier gets the table of its band and the dimension of the hidden state that is projected for this band.
    """
    name = settings.classifier.table
    table = available["tables"][name]
    check_banded(table, "adaptive output")
    context_dims = [band.dim for band in table.tables]
    if settings.head_projection == "none":
        context_dims[0] = settings.project_to or available["context_dim"]
    return [
        {**available, "tables": {**available["tables"], name: band}, "context_dim": context_dim}
        for band, context_dim in zip(table.tables, context_dims, strict=True)
    ]


def latent_as_context(settings: Any, available: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a mixture's classifier, which reads a latent vector instead of the hidden state."""
    return available if settings.latent_dim is None else {**available, "context_dim": settings.latent_dim}
