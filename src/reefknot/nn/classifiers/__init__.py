"""Classifiers: one vector per class, and what a paper does to the hidden state before it meets them."""
