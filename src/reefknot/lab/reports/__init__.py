"""Reports made from result folders: tables, plots and the HTML page."""
