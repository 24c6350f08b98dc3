"""Write the HTML report of a run: its figures, template and content."""
