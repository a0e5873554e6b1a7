"""The command `lockstep-audit`: names what is silently wrong in a distributed training script of any framework."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep_audit import __version__, this_process, words
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.findings import Rule
from lockstep_audit.judge import CLEAN, USAGE, judge
from lockstep_audit.report.formats import page
from lockstep_audit.rules.catalogue import BY_ID
from lockstep_audit.run import run
from lockstep_audit.settings import FORMATS, Settings

_INTERRUPTED = 130
_RANKS = ("nproc_per_node", "num_processes", "gpus", "devices", "num_gpus", "world_size")
"""Options of torchrun, Accelerate and Lightning that mean --nproc."""
_ABOUT = "Run SCRIPT ARGS, or -m MODULE ARGS, on several ranks, and name what is silently wrong. Options come first."
_END = """\
exit codes: 0 clean, 1 the script failed or made no optimizer step, 2 usage, 3 a fault was found, also a hang

Example: {name} --nproc 2 train.py --lr 1e-3"""


def main(arguments: Sequence[str] | None = None, *, name: str = "lockstep-audit") -> int:
    """Run the command.

    Args:
        arguments: the words behind the command. None: those of this process.
        name: the words that called it, for its help.

    Returns:
        the exit code.

    Raises:
        SystemExit: after --help, for a wrong option, and with the code of a script that ran in this process.
    """
    parser = _parser(name)
    own: list[str] = []
    try:
        own, target = words.split(parser, list(sys.argv[1:] if arguments is None else arguments))
        options, unknown = parser.parse_known_args(own)
        if options.explain is not None:
            print(page(_rule(options.explain)), end="")
            return CLEAN
        if unknown:
            raise _no_such_option(unknown[0], target, name)
        return _run(options, target)
    except AuditUsageError as error:
        print(traceback.format_exc() if "--debug" in own else f"error: {error}", file=sys.stderr, flush=True)
        return USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _rule(id: str) -> Rule:
    if id.upper() not in BY_ID:
        raise AuditUsageError(f"there is no rule {id}", where="--explain", remedy=f"there are: {', '.join(BY_ID)}")
    return BY_ID[id.upper()]


def _no_such_option(word: str, target: Sequence[str], name: str) -> AuditUsageError:
    option, _, value = word.partition("=")
    given = value or next(iter(target), "")
    is_nproc = option.strip("-").replace("-", "_") in _RANKS
    remedy = f"write --nproc {given}" if is_nproc else f"give it after the script: {name} train.py {option} {given}"
    return AuditUsageError(f"{name} has no such option", where=option, remedy=remedy.rstrip())


def _run(options: argparse.Namespace, target: list[str]) -> int:
    settings = Settings(
        options.format,
        options.output,
        options.previous,
        options.baseline,
        options.write_baseline,
        options.strict,
        options.verbose,
    )
    _check(settings, force=options.force)
    if options.read is not None:
        return judge(options.read, settings).exit_code
    how = {"folder": options.folder, "every": options.every, "patience": options.patience, "probe": options.probe}
    if this_process.is_rank():  # under a launcher of the user's
        from lockstep_audit.__main__ import main as run_here

        given = [f"--every={options.every}", f"--patience={options.patience}", *["--no-probe"] * (not options.probe)]
        run_here([*given, *([] if options.folder is None else [f"--folder={options.folder}"]), "--", *target], settings)
        return 0
    return run(target, settings, nproc=options.nproc, **how)


def _check(settings: Settings, *, force: bool) -> None:
    """Look at files before the script runs.

    Raises:
        AuditUsageError: a file to write is there or has no folder, or one to read is not there.
    """
    for path in (settings.output, settings.write_baseline):
        if path is not None and path.is_dir():
            raise AuditUsageError("is a folder", where=str(path), remedy="give a file")
        if path is not None and not path.absolute().parent.is_dir():
            remedy = f"make {path.parent}, or give another place"
            raise AuditUsageError("cannot be written: there is no such folder", where=str(path), remedy=remedy)
        if path is not None and path.exists() and not force:
            remedy = "give --force to replace the file, or another place"
            raise AuditUsageError("exists: it is not overwritten", where=str(path), remedy=remedy)
    for path in (settings.baseline, settings.previous):
        if path is not None and not path.exists():
            remedy = "--write-baseline FILE writes a baseline, and --folder DIR keeps the events of a run"
            raise AuditUsageError("is not there", where=str(path), remedy=remedy)


def _at_least_one(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        if (value := kind(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text} must be at least 1")
        return value

    read.__name__ = kind.__name__  # for argparse's own words
    return read


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        usage=f"{name} [OPTIONS] SCRIPT|-m MODULE [ARGS]...",
        description=_ABOUT,
        epilog=_END.format(name=name),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, whole = parser.add_argument, _at_least_one(int)
    add("--nproc", type=whole, default=2, metavar="N", help="ranks on this machine (default: 2)")
    add("--every", type=whole, default=50, metavar="K", help="look closely at every K-th step (default: 50)")
    patience = _at_least_one(float)
    what = "seconds without progress that count as a hang (default: 60)"
    add("--patience", type=patience, default=60.0, metavar="S", help=what)
    probe = argparse.BooleanOptionalAction
    add("--probe", action=probe, default=True, help="read a few samples at the end (default: --probe)")
    add("--format", choices=FORMATS, default="text", help="format of the report (default: text)")
    add("--output", type=Path, metavar="PATH", help="a file for the report")
    add("--folder", type=Path, metavar="PATH", help="keep the events in this new folder")
    add("--previous", type=Path, metavar="PATH", help="events of the run that this run resumes")
    add("--read", type=Path, metavar="PATH", help="judge the events of a folder; run no script")
    add("--baseline", type=Path, metavar="PATH", help="a file of known findings to leave out")
    add("--write-baseline", type=Path, metavar="PATH", help="write the findings of this run into such a file")
    add("--force", action="store_true", help="replace the files of --output and --write-baseline")
    add("--strict", action="store_true", help="exit code 3 for warnings, too")
    add("--explain", metavar="RULE", help="print the page of a rule, such as LS101; run no script")
    add("-v", "--verbose", action="store_true", help="print why rules were not exercised")
    add("--debug", action="store_true", help="show tracebacks of all errors")
    add("--version", action="version", version=f"lockstep-audit {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
