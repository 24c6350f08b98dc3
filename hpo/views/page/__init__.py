"""The report of a run as a page: its figures, its template, and how it is written."""
