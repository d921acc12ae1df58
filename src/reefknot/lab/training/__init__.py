"""Training that can be killed at any moment and resumes to bit-identical results."""
