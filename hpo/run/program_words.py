"""Read and change the options of a search in a command line such as `mpirun -n 8 hpo search x.py --run-dir runs/x`."""

from __future__ import annotations

from collections.abc import Sequence


def find_option(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option in a command line, or None. If the option is repeated, its final value counts.

    Words after ``--`` belong to the user's own program.
    """
    value = None
    own = _cut_program(words)
    for word, following in zip(own, [*own[1:], ""], strict=True):
        if word == name:
            value = following
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
    return value


def set_option(words: Sequence[str], name: str, *value: object) -> list[str]:
    """Return a command line with an option, so that its final value counts. An option without a value is a switch."""
    own = _cut_program(words)
    if not value and name in own:
        return list(words)
    return [*own, name, *map(str, value), *words[len(own) :]]


def _cut_program(words: Sequence[str]) -> list[str]:
    """Return the words before the ``--`` of a search. A launcher may have its own ``--`` before the search."""
    search = next((index for index, word in enumerate(words) if word == "search" or word.endswith(".py")), 0)
    return list(words[: words.index("--", search)] if "--" in words[search:] else words)
