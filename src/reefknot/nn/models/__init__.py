"""Whole models: `LanguageModel` and `Translator` join input, encoder and output. `SkipGram` has two word tables."""
