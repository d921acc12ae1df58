"""The classifier of most language models: the class vectors are the rows of a word table.

    score(y | h) = e_y . h + bias[y]

e_y is the row of class y. The base class `Classifier` does all the work.
"""

from __future__ import annotations

from reefknot.nn.classifiers.contract import Classifier, check_word_table
from reefknot.nn.tables import WordTable


class Plain(Classifier):
    """A classifier whose class vectors are the rows of a table.

    Scores are dot products of the rows with the hidden state. This is weight tying if the input end holds the same
    table (Inan et al. 2017; Press & Wolf 2017).

    Args:
        table: The word table whose rows are the class vectors. The hidden state must have the same dimension.
        bias: Add a learned bias per class. Press & Wolf use one, Inan et al. do not.
    """

    def __init__(self, table: WordTable, bias: bool = True) -> None:
        check_word_table(type(self).__name__, table)
        super().__init__(table, table.dim, bias)
