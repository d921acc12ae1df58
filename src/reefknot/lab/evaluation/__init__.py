"""What a trained model is worth: perplexity, its breakdowns, and honest comparisons."""
