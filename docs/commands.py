"""Fills the page docs/commands.md when the site is built (`hooks` of mkdocs.yml): the help of every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from lockstep.cli.application import app

MARK = "<!-- all commands -->"
WIDTH = 110


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return markdown.replace(MARK, text()) if MARK in markdown else markdown


def text() -> str:
    """All commands in Markdown, in the order of `lockstep --help`."""
    return "\n\n".join(f"## lockstep {' '.join(words)}\n\n```\n{_help(words)}\n```" for words in commands())


def commands() -> Iterator[tuple[str, ...]]:
    """The words of each command. A group gives its commands."""
    return _below(typer.main.get_command(app), ())


def _below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words
    for name, one in (inner or {}).items():
        yield from _below(one, (*words, name))


def _help(words: tuple[str, ...]) -> str:
    environment = {"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH), "NO_COLOR": "1"}
    done = CliRunner(env=environment).invoke(app, [*words, "--help"], prog_name="lockstep", color=False)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()
