"""How a report is written, by name: terminal, json, markdown; and HTML for notebooks."""

from __future__ import annotations

import html
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_mp.errors import UsageError

#: Enough for the longest label of ours.
MIN_WIDTH = 20

#: Unit prefixes of seconds, largest first. ASCII only: a terminal may know nothing else.
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(slots=True)
class Section:
    """A named group of entries (key, label, value); key and label are None for the unnamed one."""

    key: str | None
    label: str | None
    entries: list[tuple[str, str, object]] = field(default_factory=list)

    def add(self, key: str, label: str, value: object) -> None:
        """Append an entry: ``key`` for ``to_dict``, ``label`` for people; floats show as .2f."""
        self.entries.append((key, label, value))


@dataclass(frozen=True, slots=True)
class Block:
    """What stands below LMCache's table: entries, and a table of a row a metric. All is text."""

    label: str
    entries: Sequence[tuple[str, str]]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Document:
    """A report ready to be written: ``data`` is its strict-JSON form, the rest is for people."""

    title: str
    sections: Sequence[Section]
    block: Block | None
    data: Mapping[str, object]


def quantity(value: float | None, unit: str | None) -> str:
    """``value`` with three significant digits and its unit; whole counts in full.

    >>> quantity(0.00123456, "s"), quantity(1234, "tokens"), quantity(None, "s")
    ('1.23 ms', '1234 tokens', 'N/A')
    """
    if value is None or math.isnan(value):
        return "N/A"
    if unit == "s":
        return _seconds(value)
    text = str(value) if isinstance(value, int) else _three_digits(value)
    return text if unit in (None, "", "1") else f"{text} {unit}"


def _seconds(value: float) -> str:
    rounded = abs(float(f"{value:.3g}"))  # so that 999.9 us becomes 1.00 ms
    scale, name = next((it for it in _SECONDS if rounded >= it[0]), (1.0, "s"))
    return f"{_three_digits(value / scale)} {name}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def plain(value: object) -> object:
    """``value`` as strict JSON has it: numpy scalars unwrapped, NaN and infinities None."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def shown(value: object) -> str:
    """``value`` as LMCache's table shows it: floats ``.2f``, None ``N/A``."""
    value = plain(value)
    if value is None:
        return "N/A"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def terminal(document: Document, width: int) -> str:
    """LMCache's table; then our block, no line of it wider than ``width``."""
    # str.center and a format's "^" put an odd space on different sides; LMCache uses the former.
    lines = [f" {document.title} ".center(width, "=")]
    for section in document.sections:
        if section.label is not None:
            lines.append(f" {section.label} ".center(width, "-"))
        lines += [_entry(label, shown(value), width) for _, label, value in section.entries]
    lines.append("=" * width)
    if document.block is not None:
        lines += _block_lines(document.block, width)
    return "\n".join(lines)


def _entry(label: str, value: str, width: int) -> str:
    padding = max(1, width - len(label) - 1 - len(value))
    return f"{label}:{' ' * padding}{value}"


def _block_lines(block: Block, width: int) -> list[str]:
    lines = [f" {block.label} ".center(width, "-")]
    for label, value in block.entries:
        lines += _folded(label, value, width)
    names = max((len(label) for label, _ in block.rows), default=0)
    cell = (width - names) // max(1, len(block.columns))
    cells = [text for _, values in block.rows for text in (*block.columns, *values)]
    if all(len(text) < cell for text in cells):
        names = width - cell * len(block.columns)
        for label, values in [("", block.columns), *block.rows]:
            lines.append(label.ljust(names) + "".join(text.rjust(cell) for text in values))
    else:
        for label, values in block.rows:
            lines.append(label)
            for column, text in zip(block.columns, values, strict=True):
                lines += _folded(f"  {column}", text, width)
    lines.append("=" * width)
    return lines


def _folded(label: str, value: str, width: int) -> list[str]:
    """An entry on one line, or on two where it is too wide for one."""
    if len(label) + len(value) + 2 <= width:
        return [_entry(label, value, width)]
    return [f"{label}:", value.rjust(width)]


def as_json(document: Document, width: int) -> str:
    """Strict JSON, indented by two; ``width`` has no part in it."""
    return json.dumps(document.data, indent=2, allow_nan=False)


def markdown(document: Document, width: int) -> str:
    """A heading and tables, as GitHub renders them; ``width`` has no part in it."""
    lines = [f"## {_cell(document.title)}"]
    for section in document.sections:
        rows = [(label, [shown(value)]) for _, label, value in section.entries]
        lines += ["", *_markdown_table(section.label or "", [""], rows)]
    if document.block is not None:
        block = document.block
        rows = [(label, [value]) for label, value in block.entries]
        lines += ["", *_markdown_table("", [""], rows)]
        lines += ["", *_markdown_table(block.label, block.columns, block.rows)]
    return "\n".join(lines)


def _markdown_table(
    corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]
) -> list[str]:
    table = [[corner, *columns], *([label, *values] for label, values in rows)]
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in table]
    lines.insert(1, f"| --- |{' ---: |' * len(columns)}")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def as_html(document: Document) -> str:
    """One table in the colours of the page around it, light or dark."""
    block = document.block
    span = 2 if block is None else 1 + len(block.columns)
    rows: list[str] = []
    for section in document.sections:
        if section.label is not None:
            rows.append(_html_heading(section.label, span))
        rows += [_html_row(label, [shown(value)], span) for _, label, value in section.entries]
    if block is not None:
        rows.append(_html_heading(block.label, span))
        rows += [_html_row(label, [value], span) for label, value in block.entries]
        rows.append(_html_row("", block.columns, span))
        rows += [_html_row(label, values, span) for label, values in block.rows]
    title = f"<caption><b>{html.escape(document.title)}</b></caption>"
    return f"<table style='border-collapse:collapse'>{title}{''.join(rows)}</table>"


def _html_heading(text: str, span: int) -> str:
    # currentColor is the page's own text colour.
    style = "border-top:1px solid currentColor;text-align:left"
    return f"<tr><th colspan='{span}' style='{style}'>{html.escape(text)}</th></tr>"


def _html_row(label: str, values: Sequence[str], span: int) -> str:
    wide = span - len(values)
    cells = "".join(f"<td style='text-align:right'>{html.escape(value)}</td>" for value in values)
    return f"<tr><td colspan='{wide}' style='text-align:left'>{html.escape(label)}</td>{cells}</tr>"


#: The formats by name.
FORMATS: dict[str, Callable[[Document, int], str]] = {
    "terminal": terminal,
    "json": as_json,
    "markdown": markdown,
}


def check_format(fmt: str) -> str:
    """``fmt`` itself, or a UsageError that names the formats there are."""
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise UsageError(f"unknown format {fmt!r}: there are {', '.join(FORMATS)}")
    return fmt


def check_width(width: int) -> int:
    """``width`` as an int, or a UsageError: a report is at least ``MIN_WIDTH`` characters wide."""
    try:
        if isinstance(width, bool):
            raise TypeError("a bool is no width")
        number = operator.index(width)
    except TypeError:
        raise UsageError(f"width must be an int, not {type(width).__name__}") from None
    if number < MIN_WIDTH:
        raise UsageError(f"width {number} is too narrow: it must be at least {MIN_WIDTH}")
    return number
