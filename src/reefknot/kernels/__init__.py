"""The per-row primitive that every output end stands on. Tensors in, tensors out; knows no modules."""
