"""Evaluation of trained models: perplexity, BLEU, word similarity, and comparisons with confidence intervals."""
