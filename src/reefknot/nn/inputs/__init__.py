"""Input ends: the first stage of a language model, word ids to vectors. `contract.py` has their interface."""
