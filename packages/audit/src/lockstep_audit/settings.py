"""What a user asks of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FORMATS = ("text", "json", "sarif", "github")
NOTEBOOK = (
    "lockstep-audit observes scripts, and this is a notebook. Save the notebook as a script "
    "(jupyter nbconvert --to script NOTEBOOK.ipynb), and run: lockstep-audit --nproc 2 NOTEBOOK.py"
)
JUDGED_OUTSIDE = "LOCKSTEP_AUDIT_JUDGED_OUTSIDE"
"""Set for ranks whose launcher reports: `lockstep-audit`."""


@dataclass(frozen=True)
class Settings:
    """Options of `lockstep-audit` that concern the report."""

    format: str = "text"
    output: Path | None = None
    """A file for the report; None: standard output."""
    previous: Path | None = None
    """The folder of events of an earlier run, which this run goes on from."""
    baseline: Path | None = None
    """Findings of this file are not reported."""
    write_baseline: Path | None = None
    strict: bool = False
    """Warnings count as findings for the exit code."""
    verbose: bool = False
    """Tell for each rule why the script did not exercise it."""
