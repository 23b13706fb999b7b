"""One HTML file that says what a run found: headline figures, a table, pictures, and how to run it again.

The file stands alone: pictures and styles are inside, there is no script, and its own policy forbids the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from ..errors import UserError
from ..utils.atomic_io import write_text

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUMERIC = re.compile(r"[<>≈~±+\u2212-]?\s*[\d.]")
_MISSING = "—"


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
    """Write a self-contained report. Empty parts are left out; all text is escaped.

    summary: (value, label) pairs, shown as cards. table: one mapping per row, columns in the order in which keys first
    appear, the first column naming the row. lead: a sentence under the title.
    """
    parts = [
        html_cards(summary),
        html_table(table, table_caption),
        "".join(_picture(p) for p in pictures),
        _notes(notes),
    ]
    write_text(path, html_page(title, "\n".join(p for p in parts if p), lead, html_footer(command, environment or {})))


def html_page(
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
    """A page that stands alone. main, footer, header and attributes (of <html>) are HTML; `script` is the one that its
    policy lets run, known by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _PAGE.format(
        title=html_text(title),
        style=STYLE + style,
        mark=_MARK,
        lead=f'<p class="lead">{html_prose(lead)}</p>' if lead else "",
        main=main,
        footer=footer,
        header=header,
        attributes=f" {attributes}" if attributes else "",
        policy="style-src 'unsafe-inline'" + (f"; script-src 'sha256-{digest}'" if script else ""),
        script=f"<script>{script}</script>\n" if script else "",
    )


def html_text(value: object) -> str:
    # Arguments from the command line may hold bytes that are not UTF-8 (as lone surrogates).
    return html.escape(str(value).encode("utf-8", "replace").decode())


def html_prose(value: object) -> str:
    """Text whose per cent signs stay with their numbers."""
    return re.sub(r"(?<=\d) %", "\u00a0%", html_text(value))


def html_cards(summary: Sequence[tuple[object, str]]) -> str:
    if not summary:
        return ""
    cards = "".join(f"<div><dt>{html_prose(label)}</dt><dd>{html_prose(value)}</dd></div>" for value, label in summary)
    return f'<dl class="cards">{cards}</dl>'


def html_table(rows: Sequence[Mapping[str, object]], caption: str) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ""
    cells = {key: _column([row.get(key) for row in rows]) for key in columns}
    kind = {key: ' class="n"' if i and _numeric(cells[key]) else "" for i, key in enumerate(columns)}
    head = "".join(f'<th scope="col"{kind[key]}>{html_text(key)}</th>' for key in columns)
    body = []
    for i in range(len(rows)):
        first, *rest = columns
        line = f'<th scope="row">{html_text(cells[first][i])}</th>'
        body.append(f"<tr>{line}{''.join(f'<td{kind[k]}>{html_text(cells[k][i])}</td>' for k in rest)}</tr>")
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    # The caption stands outside what scrolls, or it would slide away with the columns.
    title = f"<figcaption>{html_prose(caption)}</figcaption>" if caption else ""
    label = html_text(caption or "Results")
    scroll = f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">{inner}</div>'
    return f'<figure class="panel">{title}{scroll}</figure>'


def _column(values: Sequence[object]) -> list[str]:
    """Cells of a column as text: fractions share their number of decimals, three significant digits for the largest."""
    plain = [float(v) if isinstance(v, Real) and not isinstance(v, Integral) else v for v in values]
    sizes = [abs(v) for v in plain if isinstance(v, float) and math.isfinite(v) and v]
    decimals = min(6, max(0, 2 - math.floor(math.log10(max(sizes))))) if sizes else 1
    return [_cell(value, decimals) for value in plain]


def _cell(value: object, decimals: int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if isinstance(value, float):
        return f"{value:,.{decimals}f}" if math.isfinite(value) else _MISSING
    return _MISSING if value is None or value == "" else str(value)


def _numeric(cells: Sequence[str]) -> bool:
    return all(cell == _MISSING or _NUMERIC.match(cell) for cell in cells)


def _picture(picture: Picture) -> str:
    width, height = _size(picture.png)
    image = f'<img src="{_data(picture.png)}" width="{width}" height="{height}" alt="{html_text(picture.alt)}">'
    if picture.narrow is not None:
        width, height = _size(picture.narrow)
        source = (
            f'<source media="(max-width: 40rem)" srcset="{_data(picture.narrow)}" width="{width}" height="{height}">'
        )
        image = f"<picture>{source}{image}</picture>"
    caption = f"<figcaption>{html_prose(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure><div class="frame">{image}</div>{caption}</figure>'


def _size(png: bytes) -> tuple[int, int]:
    if not png.startswith(_SIGNATURE) or len(png) < 24:
        raise UserError("A picture of the report is not a PNG.")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    paragraphs = "".join(f"<p>{html_prose(note)}</p>" for note in notes)
    return f'<section class="notes" aria-labelledby="notes"><h2 id="notes">Notes</h2>{paragraphs}</section>'


def html_footer(command: str, environment: Mapping[str, object]) -> str:
    parts = []
    if command:
        parts.append(f'<h2>Run it again</h2><pre tabindex="0"><code>{html_text(command)}</code></pre>')
    if environment:
        facts = "".join(f"<div><dt>{html_text(k)}</dt><dd>{html_text(v)}</dd></div>" for k, v in environment.items())
        parts.append(f'<h2>Environment</h2><dl class="facts">{facts}</dl>')
    return f"<footer>{''.join(parts)}</footer>" if parts else ""


# Nine patches, some worked on for longer than others.
_MARK = (
    '<svg viewBox="0 0 17 17" width="20" height="20" aria-hidden="true" focusable="false"><g fill="currentColor">'
    + "".join(
        f'<rect x="{6 * (i % 3)}" y="{6 * (i // 3)}" width="5" height="5" rx="1.2" opacity="{opacity}"/>'
        for i, opacity in enumerate((0.2, 0.45, 0.2, 0.45, 1, 0.75, 0.2, 0.75, 0.2))
    )
    + "</g></svg>"
)

_PAGE = """<!doctype html>
<html lang="en"{attributes}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; {policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="brand">{mark}adaptivit{header}</p>
<h1>{title}</h1>
{lead}
</header>
<main>
{main}
</main>
{footer}
{script}</body>
</html>
"""

_LIGHT = (
    "--page: #fbfbfa; --card: #fff; --line: #e5e7e6; --ink: #1c2024; --soft: #5c666e; --accent: #0c766d; --shade: 1"
)
_DARK = "--page: #131517; --card: #1b1e21; --line: #2c3135; --ink: #eceeef; --soft: #a0a9b0; --accent: #5fd4c4"
_DARK += "; --shade: .92"
STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
:root[data-theme=light] {{ color-scheme: light; {_LIGHT} }}
:root[data-theme=dark] {{ color-scheme: dark; {_DARK} }}
"""
STYLE += """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 68rem; padding: clamp(2rem, 6vw, 5rem) clamp(1.125rem, 5vw, 3rem);
  background: var(--page); color: var(--ink); overflow-wrap: break-word;
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
h1, h2, p, dl, dd, figure, pre { margin: 0; }
.brand {
  display: flex; align-items: center; gap: .6rem; margin-bottom: 1.75rem;
  color: var(--accent); font-weight: 600; letter-spacing: .01em;
}
h1 { max-width: 22em; font-size: clamp(1.75rem, 1.2rem + 2.4vw, 2.75rem); line-height: 1.15; letter-spacing: -.022em;
  font-weight: 680; text-wrap: balance; }
.lead { max-width: 42em; margin-top: 1.1rem; color: var(--soft); font-size: 1.125rem; text-wrap: pretty; }
main { display: grid; grid-template-columns: minmax(0, 1fr); gap: clamp(2.25rem, 5vw, 3.75rem);
  margin-top: clamp(2.25rem, 5vw, 3.5rem); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(10.5rem, 44%), 1fr)); gap: 1rem; }
.cards div { display: flex; flex-direction: column-reverse; justify-content: flex-end; gap: .3rem;
  padding: 1.35rem 1.4rem 1.25rem; background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.cards dd { font-size: clamp(1.6rem, 1.3rem + 1.2vw, 2.2rem); line-height: 1.1; font-weight: 660;
  letter-spacing: -.025em; font-variant-numeric: tabular-nums; }
.cards div:first-child dd { color: var(--accent); }
.cards dt { color: var(--soft); font-size: .9rem; line-height: 1.4; }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 14px; overflow: hidden; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, pre:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: .85rem 1.4rem; text-align: left; white-space: nowrap; }
thead th { color: var(--soft); font-size: .875rem; font-weight: 500; }
tbody th { font-weight: 600; }
tr > :first-child { position: sticky; left: 0; background: var(--card); }
tbody tr > * { border-top: 1px solid var(--line); }
.n { text-align: right; }
.frame { padding: clamp(.25rem, 1vw, .75rem); background: #fff; border: 1px solid var(--line); border-radius: 14px;
  filter: brightness(var(--shade)); }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { max-width: 46em; margin-top: .9rem; color: var(--soft); font-size: .9375rem; text-wrap: pretty; }
.panel figcaption { max-width: none; margin: 0; padding: 1.1rem 1.4rem .2rem; font-size: .9rem; }
h2 { margin-bottom: .75rem; font-size: 1.125rem; line-height: 1.3; font-weight: 650; letter-spacing: -.01em; }
.notes p { max-width: 44em; }
.notes p + p { margin-top: .85rem; }
footer { margin-top: clamp(2.5rem, 6vw, 4rem); padding-top: clamp(1.75rem, 4vw, 2.5rem);
  border-top: 1px solid var(--line); }
footer h2 { color: var(--soft); font-size: .875rem; font-weight: 600; letter-spacing: 0; }
pre { margin-bottom: 2rem; padding: .95rem 1.2rem; overflow-x: auto; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px;
  font: .875rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font: inherit; }
.facts { display: flex; flex-wrap: wrap; gap: .9rem 2.5rem; font-size: .875rem; }
.facts dt { color: var(--soft); }
@media (max-width: 40rem) {
  .cards { gap: .7rem; }
  .cards div { padding: 1rem 1.05rem; }
  th, td { padding: .75rem 1rem; }
  .panel figcaption { padding: 1rem 1rem .2rem; }
  tr > :first-child { box-shadow: 1px 0 var(--line); }
  tbody th { white-space: normal; min-width: 8rem; }
}
@media print {
  body { max-width: none; padding: 0; }
  figure, .cards div, tr { break-inside: avoid; }
}
"""
