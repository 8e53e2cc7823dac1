"""The tables that commands print."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


def table(rows: Iterable[Sequence[str | Text]], columns: Sequence[str] = (), title: str | None = None) -> Table:
    """A table without lines, and without `columns` without a header.

    Texts are no markup: Rich reads `:train:` as some.
    """
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=bool(columns),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        made.add_column(column, overflow="fold", header_style="dim")
    for row in rows:
        made.add_row(*(Text(each) if isinstance(each, str) else each for each in row))
    return made
