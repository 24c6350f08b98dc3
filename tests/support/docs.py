"""Find the listings and commands in the pages of the documentation."""

from __future__ import annotations

import re
import shlex

from tests.support.launch import ROOT


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


def example(page: str, name: str) -> str:
    """Return the code of the listing in a page that users should save as `name`."""
    (block,) = re.findall(
        rf"`{name}`[^`]*\n\n```python\n(.*?)^```",
        (ROOT / page).read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return str(block)


def commands_with(page: str, start: str) -> list[list[str]]:
    """Return the words of each command in a page that begins with `start`.

    Lines that end with a backslash are joined.
    """
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith(f"    {start}")]
