"""Output ends: the last stage of a language model, hidden states to log-probabilities. Start with `contract.py`."""
