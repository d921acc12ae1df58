"""Turn the folders of training runs into tables, plots and an HTML page.

`results.py` reads runs, `rows.py` groups them into the rows of a table, `table.py` builds the table, and `page.py`
writes the HTML report.
"""
