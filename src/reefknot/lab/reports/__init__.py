"""What people look at, read from result folders: tables, plots, one HTML page and PAPERS.md."""
