"""The error messages of docs/troubleshooting.md are those of the code."""

import ast
import functools
import re

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


SOURCES = [path.read_text() for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]]


@functools.cache
def texts(source):
    """All texts of a file, in order, with `...` for what is filled in."""
    found, inner = [], set()
    for node in ast.walk(ast.parse(source)):  # a text comes before its parts
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
            found.append("".join(getattr(part, "value", "") if is_text(part) else "..." for part in node.values))
        elif is_text(node) and id(node) not in inner:
            found.append(node.value)
    return "\n".join(found)


def is_in_a_text(part):
    """Files that have it in a single line come first: parsing all of them takes seconds."""
    return any(part in texts(source) for source in sorted(SOURCES, key=lambda source: part not in source))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_messages_of_the_page_are_in_the_code():
    ours = PAGE.partition("### From torch")[0]
    messages = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", ours, re.MULTILINE)
    assert len(messages) > 35
    missing = []
    for message in messages:
        parts = [part for part in re.split(r"\.\.\.|data\.train", message) if len(part.strip()) > 3]
        missing += [message for part in parts if not is_in_a_text(part.strip())]
    assert not missing
