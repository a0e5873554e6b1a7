"""Command lines in two parts: the options of the audit, then a script, or -m and a module, with its own arguments."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from lockstep_audit.errors import AuditUsageError


def split(parser: argparse.ArgumentParser, given: list[str]) -> tuple[list[str], list[str]]:
    """The words of the audit's own options, and the rest: from the script or from -m on.

    Args:
        parser: defines which options take a value.

    Raises:
        AuditUsageError: an option of the audit follows a script that does not have it; `--` before it allows this.
    """
    takes_value = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    number = 0
    while number < len(given) and given[number].startswith("-") and given[number] != "-m":
        if given[number] == "--":
            return given[:number], given[number + 1 :]
        number += 2 if takes_value.get(given[number]) else 1
    own, target = given[:number], given[number:]
    late = next((word for word in target[1:] if word.startswith("--") and word.partition("=")[0] in takes_value), None)
    if late is not None and _lacks(target[0], late.partition("=")[0]):
        place = target.index(late)
        end = place + (2 if takes_value.get(late) else 1)
        moved = [*own, *target[place:end], *target[:place], *target[end:]]
        what = f"it comes after {target[0]}, which does not have this option"
        remedy = f"write {_shown(parser, moved)}; if the script has it: {_shown(parser, [*own, '--', *target])}"
        raise AuditUsageError(what, where=late.partition("=")[0], remedy=remedy)
    return own, target


def _lacks(script: str, option: str) -> bool:
    """True if the text of a script does not name an option."""
    if not script.endswith(".py") or not Path(script).is_file():
        return False
    text, plain = Path(script).read_text(encoding="utf-8", errors="replace"), option.strip("-")
    return plain not in text and plain.replace("-", "_") not in text


def _shown(parser: argparse.ArgumentParser, words: list[str]) -> str:
    return f"{parser.prog} {shlex.join(words)}"
