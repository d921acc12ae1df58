"""Classifiers: one vector per class, and a map of the hidden state. `contract.py` has their interface."""
