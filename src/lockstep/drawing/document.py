"""The frame of a self-contained HTML page: its style, and the policy that it loads nothing and runs no other script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib import resources

from lockstep.drawing.markup import Markup, element

MARK = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
"""A part of every page, in its first bytes: what browsers may load."""


def document(
    title: str, body: Iterable[Markup], *, style: str = "", scripts: Sequence[str] = (), end: Sequence[Markup] = ()
) -> str:
    """A page as text.

    Args:
        style: further CSS, before that of all pages.
        scripts: the scripts that may run.
        end: elements below the content, before the scripts.
    """
    style += resources.files("lockstep.drawing").joinpath("page.css").read_text(encoding="utf-8")
    # No address and no other script is allowed: a user's name or text can neither load nor run anything.
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    rule = f"{MARK} {allowed}; base-uri 'none'; form-action 'none'"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{rule}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    ]
    last = [*end, *(Markup(f"<script>{script}</script>") for script in scripts)]
    parts = element("head", head), element("body", element("main", body), last)
    return "<!doctype html>\n" + element("html", *parts, lang="en") + "\n"


def inline_image(png: bytes, about: str) -> Markup:
    """An image in the page itself."""
    return element("img", src=f"data:image/png;base64,{base64.b64encode(png).decode()}", alt=about, loading="lazy")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], style: str = "", *, label: str = "Table") -> Markup:
    """A table that scrolls sideways, also with the keyboard. The first cell of a row is its header."""
    head = element("tr", [element("th", title, scope="col") for title in titles])
    body = [
        element("tr", element("th", row[0], scope="row"), [element("td", cell) for cell in row[1:]]) for row in rows
    ]
    content = element("table", element("thead", head), element("tbody", body), class_=style)
    return element("div", content, class_="wide", tabindex=0, role="region", aria_label=label)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
