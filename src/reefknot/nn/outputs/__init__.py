"""Output ends: hidden states to log-probabilities and losses. `contract.py` has the interface that they share."""
