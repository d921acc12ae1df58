"""The kinds of experiment: language models, translation, skip-gram."""
