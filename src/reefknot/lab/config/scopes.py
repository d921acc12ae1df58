"""Arguments for the classifiers inside output ends, where they differ from the arguments of the output end itself.

An output end (classifier and loss) contains one or more classifiers. `Registry.build` in `registry.py` calls these
functions before it builds them. A function gets the settings of the output end and the available arguments: dimensions,
the vocabulary size, and the word tables by name. It returns the available arguments of each classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.nn.tables import check_banded


def one_classifier_per_band(settings: Any, available: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the available arguments of an adaptive softmax's classifiers, one per band (words of similar frequency).

    A classifier gets the table of its band and the dimension of the hidden state that is projected for this band.
    """
    table_name = settings.classifier.table
    banded_table = available["tables"][table_name]
    check_banded(banded_table, "adaptive output")
    context_dims = [table.dim for table in banded_table.tables]
    if settings.head_projection == "none":
        context_dims[0] = settings.project_to or available["context_dim"]
    return [
        {**available, "tables": {**available["tables"], table_name: table}, "context_dim": context_dim}
        for table, context_dim in zip(banded_table.tables, context_dims, strict=True)
    ]


def latent_as_context(settings: Any, available: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the available arguments of a mixture's classifier, which reads a latent vector, not the hidden state."""
    if settings.latent_dim is None:
        return available
    return {**available, "context_dim": settings.latent_dim}
