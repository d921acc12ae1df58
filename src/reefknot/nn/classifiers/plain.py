"""Classes are rows of a table: the classifier of most language models; weight tying when the input holds it too."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.tables import NamedTable

Bias = Annotated[bool, Field(description="a learned bias per class: Press & Wolf keep it, Inan et al. have none")]


class Plain(Classifier):
    """Rows of a table, against the hidden state as it is."""

    def __init__(self, table: NamedTable, bias: Bias = True) -> None:
        super().__init__(table, table.dim, bias)
