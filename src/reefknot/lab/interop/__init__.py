"""Import models that other programs have trained as run folders."""
