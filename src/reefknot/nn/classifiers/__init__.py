"""Classifiers: one vector per class, and a map of the hidden state to the space of these vectors."""
