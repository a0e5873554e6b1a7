"""The findings for people: look.html, one self-contained page with the worst examples as images."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lockstep.drawing.document import MARK, document, inline_image, table
from lockstep.drawing.markup import Markup, element
from lockstep_recipes.look.look import Fault

__all__ = ["MARK", "to_html"]

_IMAGES = 12
"""Images of a fault."""
_ROWS = 50
_SIDE = 320
"""Longer side of an image on the page, in pixels."""


def to_html(name: str, found: Sequence[Fault], facts: Iterable[str]) -> str:
    """The page.

    Args:
        facts: what was looked at, for the line below the title.
    """
    errors = sum(fault.is_error for fault in found)
    state = "fault" if errors else "not-shown" if found else "passed"
    said = f"{errors} errors, {len(found) - errors} warnings" if found else "nothing was found"
    body = [
        element("h1", name),
        element("p", said, class_=f"state {state}"),
        element("p", " · ".join(facts), class_="soft"),
    ]
    return document(f"{name}: lockstep look", [*body, *map(_section, found)])


def _section(fault: Fault) -> Markup:
    kind = "error" if fault.is_error else "warning"
    title = element("h2", f"{fault.first.code} ", element("span", kind, class_="fault" if fault.is_error else "open"))
    figures = []
    for finding in (one for one in fault.findings if one.image is not None):
        if len(figures) == _IMAGES:
            break
        content = _png(finding.image)
        if content is not None:
            caption = element("figcaption", finding.file)
            figures.append(element("figure", caption, inline_image(content, finding.what)))
    rows = [[finding.file, finding.what] for finding in fault.findings[:_ROWS]]
    more = fault.count - sum(one.count for one in fault.findings[:_ROWS])
    parts = [title, element("p", element("b", "Remedy: "), fault.first.remedy)]
    parts += [element("div", figures, class_="pictures")] * bool(figures)
    parts += [table(("where", "what"), rows, "paths", label=f"Findings: {fault.first.code}")]
    parts += [element("p", f"and {more:,} more", class_="soft")] * (more > 0)
    return element("section", parts, id=fault.first.code)


def _png(image: Any) -> bytes | None:
    """A small PNG. None: the image cannot be made, such as that of a damaged file."""
    from PIL import Image

    try:
        pixels = np.asarray(image() if callable(image) else image)
        picture = Image.fromarray(pixels)
    except Exception:  # of a file that is at fault
        return None
    if max(picture.size) < _SIDE // 2:
        factor = max(1, _SIDE // 2 // max(picture.size))
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.convert("RGB").quantize(128).save(file, "PNG", optimize=True)
    return file.getvalue()
