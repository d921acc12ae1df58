"""Input ends: ids to vectors. `contract.py` has the interface that they share."""
