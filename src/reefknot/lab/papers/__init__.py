"""Reproduce the figures of the papers, and generate PAPERS.md.

`figures/` measures and draws the figures. `page.py` writes PAPERS.md from the records in results/.
"""
