"""Command lines in two parts: the options of the audit, then a script, or -m and a module, with its own arguments."""

from __future__ import annotations

import argparse


def split(parser: argparse.ArgumentParser, given: list[str]) -> tuple[list[str], list[str]]:
    """The words of the audit's own options, and the rest: from the script or from -m on.

    Args:
        parser: defines which options take a value.
    """
    takes_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    number = 0
    while number < len(given) and given[number].startswith("-") and given[number] != "-m":
        if given[number] == "--":
            return given[:number], given[number + 1 :]
        number += 2 if given[number] in takes_value else 1
    return given[:number], given[number:]
