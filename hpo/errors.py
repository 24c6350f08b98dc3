"""Mistakes that the person at the command line can mend."""


class UsageError(ValueError):
    """A bad option, file, path or value: one message that names it, shows it and says what would work."""
