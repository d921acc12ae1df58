"""Recipes: the shipped TOML files, and what reads them."""
