"""Present the records of a run to users: tables, lines, figures and exports."""
