"""Crash-safe files, hashes, the cache, and reading lines of text."""
