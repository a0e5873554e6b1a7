"""A user's options for an audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FORMATS = ("text", "json", "sarif", "github")
NOTEBOOK = (
    "lockstep-audit observes scripts, and this is a notebook. Save the notebook as a script "
    "(jupyter nbconvert --to script NOTEBOOK.ipynb), and run: lockstep-audit --nproc 2 NOTEBOOK.py"
)
JUDGED_OUTSIDE = "LOCKSTEP_AUDIT_JUDGED_OUTSIDE"
"""Set for ranks whose launcher writes the report: `lockstep-audit`."""


@dataclass(frozen=True)
class Settings:
    """Options of `lockstep-audit` for the report."""

    format: str = "text"
    output: Path | None = None
    """A file for the report; None: standard output."""
    previous: Path | None = None
    """The folder of events of an earlier run that this run resumes."""
    baseline: Path | None = None
    """Findings of this file are not reported."""
    write_baseline: Path | None = None
    strict: bool = False
    """Whether warnings count as findings for the exit code."""
    verbose: bool = False
    """Show for each rule why the script did not exercise it."""
