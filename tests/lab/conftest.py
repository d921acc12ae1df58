"""Puts this folder on the import path, so that every folder of tests can import `cli.conftest` when it runs alone."""
