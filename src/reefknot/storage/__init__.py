"""Durable files, hashes, the cache and lines of text on disk."""
