"""All commands: their help, their exit codes, and the pages that their messages name."""

import ast
import itertools
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli import pages
from lockstep.cli.application import app
from tests.processes import HANG_S, ROOT
from tests.test_house import SOURCES

WIDE = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}
MOST = 20
"""The most commands that `lockstep --help` may list."""
NO_BEGINNING = re.compile(
    "(About|Also|And|As|At|Before|Between|By|Default|For|From|How|If|In|It|On|Only|Of|Or|Over|Than|Then|That|This|To|"
    "What|When|Where|Which|Who|Whose|With|Without)"
)
CODES = {0, 1, 2, 3, 75, 130}


def walked(command, words=()):
    yield words, command
    for name, one in (getattr(command, "commands", None) or {}).items():
        yield from walked(one, (*words, name))


ALL = list(walked(typer.main.get_command(app)))
COMMANDS = [words for words, command in ALL if not hasattr(command, "commands")]


def call(*words):
    return CliRunner(env=WIDE).invoke(app, list(words), prog_name="lockstep")


@pytest.mark.parametrize("words", [words for words, one in ALL if hasattr(one, "commands")], ids=" ".join)
def test_the_help_of_a_group_has_a_line_of_80_columns_for_each_command(words):
    text = call(*words, "--help").stdout
    names = {
        name: one for name, one in next(one for each, one in ALL if each == words).commands.items() if not one.hidden
    }
    assert len(names) <= MOST
    rows = {line.split()[0]: line for line in text.splitlines() if re.match(r"  [a-z][a-z-]* {2,}\S", line)}
    assert rows.keys() == names.keys()
    assert all(len(row) <= 80 and "..." not in row for row in rows.values())


def test_each_help_begins_with_a_verb_or_a_noun_and_is_a_sentence():
    texts = {}
    for words, command in ALL:
        texts[" ".join(words)] = command.help
        for one in command.params:
            if text := getattr(one, "help", None):
                texts[f"{' '.join(words)} {one.opts[0]}"] = text
            else:
                assert not one.opts[0].startswith("-"), f"{words} {one.opts[0]} has no help"
    assert len(texts) > 150
    for name, text in texts.items():
        first = re.match(r"[\w-]+", text)
        assert first, f"{name}: {text}"
        assert not NO_BEGINNING.fullmatch(first[0]), f"{name}: {text}"
        assert first[0][0].isupper(), f"{name}: {text}"
        assert re.search(r"[.:)]$", text.split("\n\n")[0].strip()), f"{name}: {text}"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_0_and_an_unknown_option_with_2(words):
    assert call(*words, "--help").exit_code == 0
    assert call(*words, "--no-such-option").exit_code == 2


def exits(path):
    """The numbers with which a module ends a command."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Exit", "sys.exit") and node.args:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, int))
        if isinstance(node, ast.Assign) and "exit_code" in ast.unparse(node.targets[0]):
            yield from [node.value.value] if isinstance(node.value, ast.Constant) else []


def test_exit_codes_follow_one_rule():
    found = {(path.name, code) for root in SOURCES.values() for path in root.rglob("*.py") for code in exits(path)}
    assert ("errors.py", 75) in found
    assert {code for _, code in found} <= CODES
    table = (ROOT / "docs" / "commands.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == CODES
    for page in ("audit", "cluster"):
        section = (
            (ROOT / "docs" / f"{page}.md").read_text().partition("commands.md#exit-codes")[2].partition("\n## ")[0]
        )
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} <= CODES


def said(path):
    """What a module that names pages or folders says to people: no docstrings of modules, classes and functions."""
    text = path.read_text()
    if not re.search(r"--explain|\.md\b|\b(docs|benchmarks|tests|examples)/", text):
        return  # parsing takes long
    tree = ast.parse(text)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (*owners, ast.Constant))]
    bodies = [node.body for node in nodes if isinstance(node, owners) and node.body]
    hidden = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for body in bodies:  # a text below a constant; below a key of a config, `lockstep config` shows it
        hidden |= {id(b.value) for a, b in itertools.pairwise(body) if is_text(b) and isinstance(a, ast.Assign)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node.value


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


WRITTEN = ("README.md", "first_hour.md")
"""Files that commands write."""


def test_no_message_names_a_path_of_the_repository_and_every_page_is_there():
    named, told = set(), []
    for root in SOURCES.values():
        for path in root.rglob("*.py"):
            for text in said(path):
                told += [(path.name, one) for one in re.findall(r"\b(?:docs|benchmarks|tests|examples)/[\w./]+", text)]
                told += [(path.name, one) for one in re.findall(r"\b[\w-]+\.md\b", text) if one not in WRITTEN]
                named |= set(re.findall(r"lockstep --explain ([a-z_]+)", text))
    assert told == []
    assert len(named) > 10
    assert named <= set(pages.names())


def test_the_help_loads_neither_torch_nor_pydantic():
    code = (
        "import sys, lockstep.cli.application; print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[]\n"


def test_pages_are_printed():
    done = call("--explain", "sampling")
    assert (done.exit_code, done.stdout) == (0, (ROOT / "docs" / "sampling.md").read_text())
    wrong = call("--explain", "samplin")
    assert wrong.exit_code == 2
    assert "did you mean sampling?" in wrong.stderr
    assert set(pages.names()) == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README", "keys", "style"}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"a": "hello = no_such:x", "b": "hello = other:y"}, "'hello' is declared twice"),
        ({"a": "train = no_such:train"}, "the command 'train' of distribution a 1 is left out"),
        ({"a": "nothing\nlike = this\n["}, "entry_points.txt: cannot be read"),
        ({"a": "hello = no_such:x"}, None),
    ],
)
def test_a_distribution_breaks_only_its_own_commands(tmp_path, declared, said):
    for name, line in declared.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "entry_points.txt").write_text(f"[lockstep.commands]\n{line}\n")
    command = [sys.executable, "-m", "lockstep", "train", "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "lockstep train digits" in done.stdout
    assert said is None or said in done.stderr, done.stderr
    assert (done.stderr == "") == (said is None), done.stderr
