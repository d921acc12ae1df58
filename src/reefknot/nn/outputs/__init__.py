"""Output ends (classifier and loss): hidden states to log-probabilities. `contract.py` has their interface."""
