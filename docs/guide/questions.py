"""Collect the questions at the end of the guide's pages: `python docs/guide/questions.py` writes questions.md."""

import re
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Questions

For an interview, a review, or yourself: the question at the end of each page, with its answer. Cover the answers first.
[One-line answers](../answers.md) has shorter questions.
"""
END = "\nRead next: [From one process to a cluster](README.md).\n"


def pages():
    """The pages of the guide in their order."""
    names = re.findall(r"^\| \[\d+\. [^]]*\]\((\w+\.md)\)", (HERE / "README.md").read_text(), re.MULTILINE)
    return [HERE / name for name in names]


def question(page):
    """The question and the answer at the end of a page, as one paragraph."""
    return page.read_text().split("\n## Question\n\n")[1].split("\n\nRead next:")[0].strip()


def text():
    """questions.md."""
    parts = [HEAD]
    for page in pages():
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        parts.append(f"## [{title}]({page.name})\n\n{question(page)}\n")
    return "\n".join(parts) + END


if __name__ == "__main__":
    (HERE / "questions.md").write_text(text())
