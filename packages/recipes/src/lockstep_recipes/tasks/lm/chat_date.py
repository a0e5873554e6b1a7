"""The date in chat templates: that of the beginning of a run, kept with the run's tokenizer."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

_NOW = "strftime_now"
_KEPT = "{#- The date is kept by Lockstep: "
_OF_DATE = ("%d", "%-d", "%e", "%m", "%-m", "%b", "%B", "%y", "%Y", "%a", "%A", "%j", "%U", "%W", "%x", "%F", "%D")


def frozen(template: Any, now: datetime) -> Any:
    """A chat template, or templates by name, that print `now` whenever they are rendered.

    A macro of the template replaces the function `strftime_now` of transformers. Templates that do not use it,
    or have the macro already, stay as they are.
    """
    if isinstance(template, dict):
        return {name: frozen(one, now) for name, one in template.items()}
    if not isinstance(template, str) or _NOW not in template or _KEPT in template:
        return template
    directives = dict.fromkeys([*_OF_DATE, *re.findall(r"%-?[A-Za-z]", template)])
    replaced = "".join(f" | replace({one!r}, {now.strftime(one)!r})" for one in directives)
    kept = f"{_KEPT}{now:%Y-%m-%d} -#}}{{%- macro {_NOW}(format) -%}}{{{{- format{replaced} -}}}}{{%- endmacro %}}"
    return kept + ("\n" if template.startswith("\n") else "") + template  # jinja removes the line break


def date_of(template: Any) -> str | None:
    """The date that a template prints, as 2026-11-29. None: it prints no date."""
    texts = template.values() if isinstance(template, dict) else [template]
    found = [text.removeprefix(_KEPT)[:10] for text in texts if isinstance(text, str) and text.startswith(_KEPT)]
    return found[0] if found else None
