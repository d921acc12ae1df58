"""Word vectors without a model: in memory, as gensim's `KeyedVectors`, and in the file formats of other programs."""
