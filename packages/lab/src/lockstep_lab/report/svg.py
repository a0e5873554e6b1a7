"""Elements of SVG drawings."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.drawing.markup import Markup, element


def drawing(width: float, height: float, /, *content: str | Iterable[str], **attributes: object) -> Markup:
    """A drawing, in a page or as a file by itself."""
    view = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:.0f} {height:.0f}", "role": "img"}
    return element("svg", *content, **view, **attributes)


def rect(x: float, y: float, width: float, height: float, about: str = "", **style: object) -> Markup:
    """A rectangle; `about` is shown when the pointer is on it."""
    content = [element("title", about)] if about else []
    return element("rect", content, x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", **style)


def text(x: float, y: float, words: str, anchor: str = "start", **style: object) -> Markup:
    """A line of text from, around or up to `x`: start, middle or end."""
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **style)
