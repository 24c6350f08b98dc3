"""Lines of a terminal: never wider than it is, and with nothing in them that is markup or a control character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from hpo.text import printable, short

_LONGEST = 500  # characters of one text that are looked at
GAP = 2


@dataclass(frozen=True)
class Pen:
    """Writes texts for a terminal with this many columns, and this encoding."""

    width: int
    encoding: str = "utf-8"

    @property
    def plain(self) -> bool:
        """Whether the terminal shows ASCII characters only."""
        return not self.encoding.lower().startswith("utf")

    def text(self, text: str, style: str = "") -> Text:
        """Return a text as it may be shown here."""
        return Text(self.shown(short(text, _LONGEST)), style, no_wrap=True)

    def shown(self, text: str) -> str:
        """Return a text with all that this terminal cannot show, or would act upon, replaced."""
        return printable(text).encode(self.encoding, "replace").decode(self.encoding)

    def cut(self, line: Text, width: int | None = None, fill: bool = False) -> Text:
        """Return a line, cut with dots at its end where it is too wide, or else filled with spaces if asked to."""
        room, line = self.width if width is None else max(0, width), line.copy()
        if line.cell_len > room:
            dots = ("..." if self.plain else "\u2026")[:room]
            line.truncate(room - cell_len(dots))
            line.append(dots)
        if fill:
            line.pad_right(room - line.cell_len)
        return line

    def between(self, left: Text, right: Text) -> Text:
        """Return a line with one text at its beginning, and another one, which is never cut, at its end."""
        return Text.assemble(self.cut(left, self.width - right.cell_len - GAP, fill=True), " " * GAP, right)

    def some(self, texts: Sequence[str], room: int) -> str:
        """Return as many texts as there is room for, joined, and how many more there are."""
        chosen = ""
        for place, text in enumerate(texts):
            joined = f"{chosen}  {text}" if chosen else text
            more = len(texts) - place - 1
            if cell_len(joined) + (len(f"  +{more} more") if more else 0) > room:
                return f"{chosen}  +{len(texts) - place} more" if chosen else text
            chosen = joined
        return chosen

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> list[Text]:
        """Return rows as lines, in columns that are as wide as they must be, aligned to the right."""
        cells = [[cell if isinstance(cell, Text) else self.text(cell) for cell in row] for row in rows]
        cells.insert(0, [self.text(heading, "bold") for heading in headings])
        widths = [max(row[column].cell_len for row in cells) for column in range(len(headings))]
        gap = Text(" " * GAP)
        return [
            gap.join(
                Text(" " * (width - cell.cell_len)).append_text(cell) for cell, width in zip(row, widths, strict=True)
            )
            for row in cells
        ]
