"""Convert models that other programs have trained to run folders."""
