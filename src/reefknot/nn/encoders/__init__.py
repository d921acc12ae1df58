"""Encoders: vectors -> hidden states. `contract.py` has what each of them promises."""
