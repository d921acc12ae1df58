"""Models: ends joined by an encoder, and skip-gram, which has ends only."""
