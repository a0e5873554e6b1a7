"""Check the English of documentation, docstrings, comments, messages and help texts: `python docs/plain_english.py`.

It knows the habits that docs/style.md names. It prints FILE:LINE, the words, and what to write instead, and ends with
exit code 1 if it finds any. Code in backticks and code blocks is not read.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HABITS = {
    r"\b(go|goes|went|going|gone) on\b(?! (to|an?|the|one|each|every|rank|device)\b)": "resume, or continue",
    r"\bof (its|their|your|our|one's|his|her|my|whose) own\b|\bown's\b": "its own X, your own X",
    r"\b(of|for|from|by|with) whose\b|\b(of|for|without) which\b": "two sentences, or `whose`",
    r"(?<!\bthere )\b(is|are|was|were) no\b(?! (longer|more|doubt|wonder))": "is not a X, has no X",
    r"\bpictures?\b": "image; figure for a drawing",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\b(is|are|was|were|be) told\b|\btold that\b": "is logged, is reported",
    r"\b(it|that|which|this|line|log|page|error|message|command|test|file) tells\b": "reports, prints, shows",
    r"\bby heart\b": "overfits, memorises",
    r"\bhears\b|\bspeaks (of|for|to)\b": "receives; names, mentions",
    r"\bin the way of\b|\bin place of\b|\bin the place of\b": "instead of",
    r"\b(knows|know) nothing (of|about)\b": "does not depend on, does not handle",
    r"\bnot any more\b": "no longer",
    r"\b(as|what) it stands\b|\bstands (in|for|at|behind|beside)\b": "is in, means",
    r"\b(lies|lie) (in|on|at|below|between|beside|behind|outside|there|next)\b": "is in, is on",
    r"\bat (its|their) (beginning|end)\b": "when it starts, when it ends",
}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in HABITS.items()]
_SKIPPED = ("tests/", "CHANGELOG.md", "docs/style.md", "docs/plain_english.py", "src/lockstep/pages/")
_SKIPPED += ("docs/audit.md", "benchmarks/MUTANTS.md")  # written by programs
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]+>")


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file, line by line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _of_python(text)
        return
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif path.suffix in (".yaml", ".yml"):
            yield number, line.partition("#")[2]
        elif not in_code and not line.startswith("    "):
            yield number, line


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    string = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type in string and " " in token.string):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the words and the advice of each habit in a file."""
    for number, line in passages(path):
        prose = _CODE.sub("``", line)
        for pattern, advice in _PATTERNS:
            for found in pattern.finditer(prose):
                yield number, found[0], advice


def files(chosen: list[str]) -> list[Path]:
    """The files of the repository that are read: all, or those below `chosen`."""
    listed = subprocess.run(["git", "ls-files", *chosen], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if not name.startswith(_SKIPPED) and "/tests/" not in name]
    return [ROOT / name for name in names if name.endswith((".md", ".py", ".yaml", ".yml")) and (ROOT / name).is_file()]


def main() -> int:
    count = 0
    for path in files(sys.argv[1:]):
        for number, words, advice in findings(path):
            count += 1
            print(f"{path.relative_to(ROOT)}:{number}: {words!r}: {advice}")
    if count:
        print(f"{count} phrases to rewrite; docs/style.md says how")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
