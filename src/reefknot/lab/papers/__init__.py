"""The figures of the papers, and the code that generates PAPERS.md."""
