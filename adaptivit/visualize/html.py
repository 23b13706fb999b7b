"""HTML pages that stand alone: headline figures, tables, pictures, how to run it again.

Pictures and styles are inside the file, and its content security policy forbids the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from ..errors import UserError
from ..utils.atomic_io import write_text

_NUMERIC = re.compile(r"[<>≈~±+\u2212-]?\s*[\d.]")
_MISSING = "—"
_HERE = Path(__file__).parent
STYLE = (_HERE / "html.css").read_text()


@dataclass(frozen=True)
class Picture:
    """A PNG with its words. `narrow` is the same content drawn for a phone's width."""

    png: bytes
    caption: str
    alt: str
    narrow: bytes | None = None


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Sequence[tuple[object, str]] = (),
    table: Sequence[Mapping[str, object]] = (),
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    command: str = "",
    environment: Mapping[str, object] | None = None,
    lead: str = "",
    table_caption: str = "",
) -> None:
    """Write a page of cards, a table, pictures and notes. Empty parts are left out; all text is escaped.

    summary: (value, label) pairs. table: one mapping a row, columns in the order in which keys first appear, the first
    column naming the row. lead: a sentence under the title.
    """
    parts = [cards(summary), table_of(table, table_caption), *map(_picture, pictures), _notes(notes)]
    write_text(path, page(title, "\n".join(filter(None, parts)), lead, footer(command, environment or {})))


def page(
    title: str,
    main: str,
    lead: str = "",
    footer: str = "",
    *,
    style: str = "",
    script: str = "",
    attributes: str = "",
    header: str = "",
) -> str:
    """A whole page. main, footer, header and attributes (of <html>) are HTML; only `script` may run, by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        (_HERE / "html_page.html")
        .read_text()
        .format(
            title=escaped(title),
            style=STYLE + style,
            lead=f'<p class="lead">{prose(lead)}</p>' if lead else "",
            main=main,
            footer=footer,
            header=header,
            attributes=f" {attributes}" if attributes else "",
            policy="style-src 'unsafe-inline'" + (f"; script-src 'sha256-{digest}'" if script else ""),
            script=f"<script>{script}</script>\n" if script else "",
        )
    )


def escaped(value: object) -> str:
    # Arguments from the command line may hold bytes that are not UTF-8 (as lone surrogates).
    return html.escape(str(value).encode("utf-8", "replace").decode())


def prose(value: object) -> str:
    """Escaped text in which per cent signs stay with their numbers."""
    return re.sub(r"(?<=\d) %", "\u00a0%", escaped(value))


def data_uri(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def cards(summary: Sequence[tuple[object, str]]) -> str:
    """(value, label) pairs as cards."""
    inner = "".join(f"<div><dt>{prose(label)}</dt><dd>{prose(value)}</dd></div>" for value, label in summary)
    return f'<dl class="cards">{inner}</dl>' if inner else ""


def table_of(rows: Sequence[Mapping[str, object]], caption: str) -> str:
    """A table that scrolls sideways where it is too wide; the caption stands outside of what scrolls."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ""
    cells = {key: _column([row.get(key) for row in rows]) for key in columns}
    first, *rest = columns
    numeric = [key for key in rest if all(cell == _MISSING or _NUMERIC.match(cell) for cell in cells[key])]
    kind = {key: ' class="n"' if key in numeric else "" for key in columns}
    head = "".join(f'<th scope="col"{kind[key]}>{escaped(key)}</th>' for key in columns)
    body = "".join(
        f'<tr><th scope="row">{escaped(cells[first][i])}</th>'
        + "".join(f"<td{kind[k]}>{escaped(cells[k][i])}</td>" for k in rest)
        + "</tr>"
        for i in range(len(rows))
    )
    title = f"<figcaption>{prose(caption)}</figcaption>" if caption else ""
    label = escaped(caption or "Results")
    return (
        f'<figure class="panel">{title}<div class="scroll" role="region" aria-label="{label}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _column(values: Sequence[object]) -> list[str]:
    """Cells of a column as text: fractions share their number of decimals, three significant digits for the largest."""
    plain = [float(v) if isinstance(v, Real) and not isinstance(v, Integral) else v for v in values]
    sizes = [abs(v) for v in plain if isinstance(v, float) and math.isfinite(v) and v]
    decimals = min(6, max(0, 2 - math.floor(math.log10(max(sizes))))) if sizes else 1
    return [_cell(value, decimals) for value in plain]


def _cell(value: object, decimals: int) -> str:
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return _MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{value:,.{decimals}f}" if isinstance(value, float) else str(value)


def _picture(picture: Picture) -> str:
    image = f'<img src="{data_uri(picture.png)}" {_size(picture.png)} alt="{escaped(picture.alt)}">'
    if picture.narrow is not None:
        source = f'<source media="(max-width: 40rem)" srcset="{data_uri(picture.narrow)}" {_size(picture.narrow)}>'
        image = f"<picture>{source}{image}</picture>"
    caption = f"<figcaption>{prose(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure><div class="frame">{image}</div>{caption}</figure>'


def _size(png: bytes) -> str:
    """The attributes width and height, from the file's header."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or len(png) < 24:
        raise UserError("A picture of the report is not a PNG.")
    return f'width="{int.from_bytes(png[16:20])}" height="{int.from_bytes(png[20:24])}"'


def _notes(notes: Sequence[str]) -> str:
    paragraphs = "".join(f"<p>{prose(note)}</p>" for note in notes)
    if not paragraphs:
        return ""
    return f'<section class="notes" aria-labelledby="notes"><h2 id="notes">Notes</h2>{paragraphs}</section>'


def footer(command: str, environment: Mapping[str, object]) -> str:
    """How to run it again, and where it ran."""
    parts = []
    if command:
        parts.append(f'<h2>Run it again</h2><pre tabindex="0"><code>{escaped(command)}</code></pre>')
    if environment:
        facts = "".join(f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in environment.items())
        parts.append(f'<h2>Environment</h2><dl class="facts">{facts}</dl>')
    return f"<footer>{''.join(parts)}</footer>" if parts else ""
