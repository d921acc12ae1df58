"""Classifiers with stored class vectors, for models that are no longer trained.

    classifier = fold_classifier(Drill(table))      # the label encoder has run for the last time

A classifier may compute its class vectors from a word table by a network, the label encoder. After training, the class
vectors are constant. A folded classifier stores them as one matrix and needs neither the label encoder nor the table.

Shapes: V classes, D dimensions.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.tables import WordTable


class Folded(Classifier):
    """A classifier that gives the scores of another classifier, from stored class vectors.

    Args:
        classifier: The classifier whose class vectors are stored. It is used in its present mode, which should be
            evaluation mode. Its map of the hidden state and its bias are shared, not copied.
    """

    def __init__(self, classifier: Classifier) -> None:
        with torch.no_grad():
            vectors_VD = classifier.encode()
        super().__init__(store_vectors(vectors_VD), classifier.context_dim, bias=False)
        self.bias = classifier.bias

        # A shallow copy of the classifier, without the parts that only compute class vectors.
        mapping = copy.copy(classifier)
        unused_names = {"table", *classifier.label_modules}
        mapping._modules = {name: module for name, module in classifier._modules.items() if name not in unused_names}
        mapping._parameters = {name: tensor for name, tensor in classifier._parameters.items() if name != "bias"}
        self.mapping = mapping

    def context(self, hidden_ND: Tensor) -> Tensor:
        return self.mapping.context(hidden_ND)


def fold_classifier(classifier: Classifier) -> Classifier:
    """Return a classifier with the same scores and stored class vectors.

    A classifier whose class vectors are the rows of its table is returned unchanged, so that tied ends stay tied.
    """
    with torch.no_grad():
        is_stored = classifier.encode() is classifier.table.weight
    return classifier if is_stored else Folded(classifier)


def store_vectors(vectors_VD: Tensor) -> WordTable:
    """Return a frozen word table with these vectors."""
    vocab_size, dim = vectors_VD.shape
    with torch.device("meta"):
        table = WordTable(vocab_size, dim, frozen=True)
    table.weight = torch.nn.Parameter(vectors_VD.detach().clone(), requires_grad=False)
    return table
