"""One self-contained HTML page: everything escaped, pictures inside, nothing fetched and no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption, .note { color: #555; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #888; }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; } .bad { color: #a33; }
"""


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that is safe to put into a page; everything else goes through ``text``."""

    markup: str


def text(value: object) -> Html:
    return Html(escape(str(value)))


def join(parts: Sequence[Html]) -> Html:
    return Html("\n".join(part.markup for part in parts))


def section(title: str, *parts: Html) -> Html:
    return Html(f"<section>\n<h2>{text(title).markup}</h2>\n{join(parts).markup}\n</section>")


def paragraph(value: str, *, kind: str = "note") -> Html:
    return Html(f'<p class="{text(kind).markup}">{text(value).markup}</p>')


def code(value: str) -> Html:
    return Html(f"<pre><code>{text(value).markup}</code></pre>")


def facts(found: Mapping[str, object]) -> Html:
    """Names and values, a pair a line."""
    pairs = "\n".join(f"<dt>{text(k).markup}</dt><dd>{text(v).markup}</dd>" for k, v in found.items())
    return Html(f"<dl>\n{pairs}\n</dl>")


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    head = "".join(f'<th scope="col">{text(heading).markup}</th>' for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{text(cell).markup}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>')


def picture(png: bytes, *, alt: str, caption: str) -> Html:
    """A PNG inside the page; ``alt`` says what it shows to those who cannot see it."""
    data = base64.b64encode(png).decode("ascii")
    return Html(
        f'<figure>\n<img alt="{text(alt).markup}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{text(caption).markup}</figcaption>\n</figure>"
    )


def page(title: str, parts: Sequence[Html]) -> str:
    """The whole document. Its policy lets a browser load nothing but what is in it."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title).markup}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text(title).markup}</h1>\n{join(parts).markup}\n</body>\n</html>\n"
    )
