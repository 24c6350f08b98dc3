"""A run while it goes on, as a terminal shows it: what there is to show, how it is drawn, what keeps it up to date."""
