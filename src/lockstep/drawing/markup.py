"""HTML elements as text, with all other text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already, and is not escaped again."""


def element(name: str, *content: str | Iterable[str], **attributes: object) -> Markup:
    """An HTML element.

    Args:
        content: texts and elements, or lists of them. Everything except `Markup` is escaped.
        attributes: by name; `class_` means `class`, and an underscore within a name means a hyphen.
    """
    parts = [part for item in content for part in ([item] if isinstance(item, str) else item)]
    inner = "".join(part if isinstance(part, Markup) else _escaped(part) for part in parts)
    pairs = {key.rstrip("_").replace("_", "-"): _escaped(str(value)) for key, value in attributes.items()}
    names = "".join(f' {key}="{value}"' for key, value in pairs.items())
    return Markup(f"<{name}{names}>{inner}</{name}>")


def _escaped(text: str) -> str:
    """Escaped, and in ASCII, so that the page can be written and read in any encoding."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def shortened(text: str, length: int) -> str:
    """At most `length` characters of a text."""
    return text if len(text) <= length else text[: length - 1] + "…"
