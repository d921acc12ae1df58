"""Losses over many classes, masked recurrences, skip-gram updates and CUDA graphs: tensors in, tensors out."""
