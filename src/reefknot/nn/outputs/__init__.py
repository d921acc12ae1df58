"""Output ends: hidden states -> log-probabilities and losses. `contract.py` has what each of them promises."""
