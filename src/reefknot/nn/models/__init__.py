"""The ends joined by an encoder."""
