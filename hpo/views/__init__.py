"""What people look at: tables, lines, figures and exports of what a run has recorded."""
