"""Encoders: vectors to hidden states. `contract.py` has the interface that they share."""
