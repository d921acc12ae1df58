"""The papers' figures, and what generates PAPERS.md."""
