"""The corpora that are known by name: one file each."""
