"""Turn training runs, as `lab/runs/loading.py` reads them, into tables, plots and an HTML page.

`rows.py` groups runs into the rows of a table, `table.py` builds the table, and `page.py` writes the HTML report.
"""
