"""Input ends: ids -> vectors. `contract.py` has what each of them promises."""
