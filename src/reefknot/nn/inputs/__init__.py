"""Input ends (embeddings): word ids to vectors. `contract.py` has the interface that they share."""
