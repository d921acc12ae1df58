"""Word vectors by themselves, without a model: in memory, in the files that other programs read, and in gensim."""
