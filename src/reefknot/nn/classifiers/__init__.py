"""Classifiers: one vector per class, and a transformation of the hidden state before it meets them."""
