"""The classes of all commands: what they say of options of other programs, and the groups of `lockstep --help`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

from lockstep.cli.reporting import reporting
from lockstep.core.config import other_words
from lockstep.core.errors import UsageError

WORDS = "lockstep.words"
"""Key of a context's `meta`: all words after the command, also the `--` that click takes out."""


class Command(TyperCommand):
    """A command that names the keys and options that are meant by unknown ones: `--epochs 3` is `train.epochs=3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = ctx.meta[WORDS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # of click, or of the click in typer: versions differ
                raise
            found = dict(self._meant(ctx, given))
            if not found:
                raise
            with reporting(debug=False):
                what = f"{ctx.command_path} has no such option{'s' * (len(found) > 1)}"
                raise UsageError(what, where=", ".join(found), remedy=_remedy(list(found.values()))) from None

    def _meant(self, ctx: Any, args: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Each unknown option, and what to write for it. Options without a suggestion are left out."""
        takes = {name: not getattr(one, "is_flag", False) for one in self.get_params(ctx) for name in one.opts}
        takes |= {name: False for one in self.get_params(ctx) for name in one.secondary_opts}
        keys = ctx.obj if "overrides" in takes else ()
        is_script = ctx.info_name == "verify" and any(word.endswith(".py") for word in args)
        number = 0
        while number < len(args) and args[number] != "--":
            word, equals, value = args[number].partition("=")
            after = args[number + 1] if number + 1 < len(args) else ""
            number += 1
            if not word.startswith("-"):
                continue
            if takes.get(word, False) and not equals:
                number += 1
            if word in takes:
                continue
            given = value if equals else after if after and not after.startswith("-") else None
            if found := other_words.meant(word, given, options=takes, keys=() if is_script else keys):
                yield word, found
            elif is_script:
                yield word, f"give it after `--`, if it belongs to the script: -- {word} {given or ''}".rstrip()
            elif found := other_words.meant(word, given):
                yield word, f"give `lockstep train` this: {found}"


def _remedy(found: Sequence[str]) -> str:
    written = " ".join(one for one in found if not other_words.is_advice(one))
    advice = [one for one in found if other_words.is_advice(one)]
    return "; ".join([f"write {written}"] * bool(written) + list(dict.fromkeys(advice)))


class CommandGroup(TyperGroup):
    """Commands below headings."""

    headings: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The names of the commands by heading. Others, which distributions declare, follow below a last heading."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in self._by_heading().values() for name in names]

    def _by_heading(self) -> dict[str, list[str]]:
        """The commands that there are, by heading."""
        found = {heading: [name for name in names if name in self.commands] for heading, names in self.headings.items()}
        rest = [name for name in self.commands if not any(name in names for names in found.values())]
        return {heading: names for heading, names in (found | {"More" if found else "Commands": rest}).items() if names}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":
                raise
            known = self.list_commands(ctx)
            word = next((one for one in given if one in known), known[0])
            with reporting(debug=False):
                what, remedy = f"{ctx.command_path} has no such option", "options come after the command: "
                option = next(one for one in given if one.startswith("-"))
                raise UsageError(what, where=option, remedy=f"{remedy}{ctx.command_path} {word} ...") from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = {name: one for name in self.list_commands(ctx) if not (one := self.get_command(ctx, name)).hidden}
        wide = max(map(len, rows))
        for heading, names in self._by_heading().items():
            with formatter.section(heading):
                shown = [name for name in names if name in rows]
                formatter.write_dl([(f"{name:<{wide}}", _first_sentence(rows[name])) for name in shown])


def _first_sentence(command: Any) -> str:
    """The first sentence of a command's help, without its period."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".")
