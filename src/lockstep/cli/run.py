"""`lockstep run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.commands import WORDS
from lockstep.cli.options import Cold, Debug, as_arguments
from lockstep.cli.reporting import reporting
from lockstep.core import this_process
from lockstep.core.config import other_words
from lockstep.core.errors import UsageError

OPTIONS = {"--nproc": True, "--fresh": False, "--max-restarts": True, "--cold": False, "--debug": False}
"""The options of this command, and whether they take a value."""
_MODULES = ("lockstep.trainer.user_loop", "lockstep.trainer.local_ranks")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT [ARGS]...", help="Your script, then its own arguments.")],
    nproc: Annotated[str, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU.")] = "1",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again: delete the earlier run of each Loop.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of killed or crashed ranks.")] = 3,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Run a script with a lockstep.Loop on several ranks. The same command resumes it."""
    with reporting(debug):
        from lockstep.core.parallel import signals
        from lockstep.trainer import local_ranks

        if script.startswith("-"):
            raise _no_such_option(script, context.args)
        if not Path(script).is_file():
            remedy = "give the path of your script, after the options: lockstep run --nproc 2 train.py --lr 0.1"
            raise UsageError("there is no such file", where=script, remedy=remedy)
        arguments = [script, *context.args]
        _check_order(context.meta[WORDS], script, context.args)
        local_ranks.check_nproc(nproc)
        if this_process.is_rank() or nproc == "1":
            run_script(arguments, fresh=fresh)
            return
        with signals.listening():
            from lockstep.launch import launcher

            ranks = local_ranks.ranks_of(nproc)
            launcher.prepare(ranks, cold=cold, modules=_MODULES)
            given = as_arguments({"--debug": debug, "--fresh": fresh})
            launcher.launch([*given, "--", *arguments], ranks, max_restarts, main=run_rank)


def _check_order(words: Sequence[str], script: str, after: Sequence[str]) -> None:
    """Refuse an option of this command after a script that does not have it, unless `--` comes before the script.

    Args:
        words: all words of the command line after `lockstep run`.

    Raises:
        UsageError: names the command in the right order.
    """
    own = words[: len(words) - len(after) - 1]
    late = next((word for word in after if word.partition("=")[0] in OPTIONS), None)
    if late is None or own[-1:] == ["--"]:
        return
    name, plain = late.partition("=")[0], late.partition("=")[0].strip("-")
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    if plain in text or plain.replace("-", "_") in text:
        return
    place = after.index(late)
    end = place + (2 if OPTIONS[name] and late == name else 1)
    moved = shlex.join([*own, *after[place:end], script, *after[:place], *after[end:]])
    what = f"it comes after {script}, which does not have this option"
    kept = shlex.join([*own, "--", script, *after])
    raise UsageError(what, where=name, remedy=f"write lockstep run {moved}; if the script has it: lockstep run {kept}")


def _no_such_option(word: str, after: Sequence[str]) -> UsageError:
    """The error on a word before the script: an option of other programs, or of the script."""
    name, _, value = word.partition("=")
    given = value or (after[0] if after else "")
    meant = other_words.meant(name, given, options=("--nproc", "--fresh", "--max-restarts"), keys=())
    remedy = f"give it after the script: lockstep run train.py {name} {given}".rstrip()
    return UsageError("lockstep run has no such option", where=name, remedy=other_words.to_write(meant) or remedy)


def run_rank(arguments: Sequence[str]) -> None:
    """The main function of a rank: the script, after the options of this command and `--`."""
    place = arguments.index("--")
    options = arguments[:place]
    try:
        with reporting("--debug" in options):
            run_script(arguments[place + 1 :], fresh="--fresh" in options)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def run_script(arguments: Sequence[str], *, fresh: bool) -> None:
    """Run a script as `python SCRIPT ARGS` does. An error of it ends its loops, so that other ranks learn of it."""
    from lockstep.trainer import user_exit

    try:
        user_exit.run_script(arguments, fresh=fresh)
    except SystemExit as ended:
        raise typer.Exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None)) from None
