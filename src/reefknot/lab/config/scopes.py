"""What the nested classifier of an output end is built with, where that differs from what the end itself is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.nn.tables import check_banded


def one_classifier_per_band(settings: Any, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """An adaptive softmax has one classifier per band, each with its band's table and projected hidden state."""
    name = settings.classifier.table
    table = given["tables"][name]
    check_banded(table, "adaptive output")
    context_dims = [band.dim for band in table.tables]
    if settings.head_projection == "none":
        context_dims[0] = settings.project_to or given["context_dim"]
    return [
        {**given, "tables": {**given["tables"], name: band}, "context_dim": context_dim}
        for band, context_dim in zip(table.tables, context_dims, strict=True)
    ]


def latent_as_context(settings: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The classifier of a mixture of softmaxes reads a latent vector in place of the hidden state."""
    return given if settings.latent_dim is None else {**given, "context_dim": settings.latent_dim}
