"""Models that other programs have trained, brought into run folders."""
