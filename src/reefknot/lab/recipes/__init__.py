"""Recipes: the TOML files that come with the package, and the code that reads them."""
