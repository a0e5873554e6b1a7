"""The error messages of docs/troubleshooting.md are those of the code."""

import ast
import functools
import re

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


@functools.cache
def texts():
    """All texts of the source, in order, with `...` for what is filled in."""
    found = []
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]:
        tree = ast.parse(path.read_text())
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(getattr(part, "value", "") if is_text(part) else "..." for part in node.values))
            elif is_text(node) and id(node) not in inner:
                found.append(node.value)
    return "\n".join(found)


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_messages_of_the_page_are_in_the_code():
    ours = PAGE.partition("### From torch")[0]
    messages = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", ours, re.MULTILINE)
    assert len(messages) > 35
    missing = []
    for message in messages:
        parts = [part for part in re.split(r"\.\.\.|data\.train", message) if len(part.strip()) > 3]
        missing += [message for part in parts if part.strip() not in texts()]
    assert not missing
