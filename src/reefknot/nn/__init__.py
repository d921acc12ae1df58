"""The library as PyTorch modules: word tables, input ends, encoders, classifiers, output ends and whole models."""
