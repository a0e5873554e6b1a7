"""The commands of the guide (docs/guide) with their quoted output, and what they print on warm ranks.

A page quotes commands in blocks like this. A line `...` stands for any number of lines that are not
quoted, and `...` at the end of a line for the rest of the line:

    ```console
    $ torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py
    epoch 1: loss 1.2345
    ...
    ```
"""

import contextlib
import functools
import gc
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from tests import rank_cases
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def quoted(page):
    """Pairs of a command and the text that a page quotes as its output."""
    pairs = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            pairs.append((command.partition("  #")[0].strip(), output))
    return pairs


@functools.cache
def output_of(command):
    """What a command of the guide prints, on warm ranks: standard output of rank 0, then of the others."""
    program, *words = shlex.split(command)
    with tempfile.TemporaryDirectory(prefix="lockstep-guide-") as folder:
        if program == "torchrun":
            option, world, *words = words
            assert option == "--nproc-per-node", command
            return "".join(run_ranks(int(world), run_script, folder, *words))
        if program == "python":
            return run_ranks(1, run_script, folder, *words)[0]
        assert program == "lockstep", command
        world = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 1
        if words[0] == "train":
            place = words.index("--nproc")
            return run_ranks(world, run_lockstep, folder, *words[:place], *words[place + 2 :])[0]
        return run_lockstep(folder, *words)


def run_script(folder, script, *arguments):
    """What a script prints on this rank, which torchrun might have started in `folder`."""
    world, printed = int(os.environ["WORLD_SIZE"]), io.StringIO()
    join, before = dist.init_process_group, (sys.argv, sys.path[:], os.getcwd())

    def join_by_file(backend, timeout=None, **_):
        place = {"rank": int(os.environ["RANK"]), "world_size": world}
        join(backend, init_method=f"file://{os.environ['LOCKSTEP_STORE']}.script", timeout=timeout, **place)

    path = str(ROOT / script)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).parent)]
    os.environ["TORCHELASTIC_RUN_ID"] = "guide"
    dist.init_process_group = join_by_file
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        dist.init_process_group = join
        sys.argv, sys.path[:] = before[:2]
        os.chdir(before[2])
        del os.environ["TORCHELASTIC_RUN_ID"]
        if dist.is_initialized():
            gc.collect()  # to destroy the group before the script's models can hang; see examples/tricks/toy.py
            dist.destroy_process_group()
    return printed.getvalue()


def run_lockstep(folder, *words):
    """What the command line prints on this rank. Files of the repository are found from `folder`."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        printed = rank_cases.command(*(str(ROOT / word) if word.startswith("examples/") else word for word in words))
        return re.sub(r" +\([\d.]+ s\)$", "", printed, flags=re.MULTILINE)  # how long a check took
    finally:
        os.chdir(before)


def numbers(text):
    return [float(number) for number in NUMBER.findall(text)]


def differences(quote, output):
    """The quoted lines that an output does not have, numbers compared loosely. Empty where the quote is right."""
    lines, missing, loose = output.splitlines(), [], False
    for line in quote.rstrip().splitlines():
        if line == "...":
            loose = True
            continue
        places = range(len(lines)) if loose else range(min(1, len(lines)))
        found = next((place for place in places if _is_like(line, lines[place])), None)
        if found is None:
            missing.append(f"{line!r} is not {lines[:1]}" if not loose else f"{line!r} is missing")
        else:
            lines, loose = lines[found + 1 :], False
    if lines and not loose:
        missing.append(f"not quoted: {lines}")
    return missing


def _is_like(line, other):
    """Whether two lines have the same words, and numbers within a tenth. Below 1e-5, numbers are rounding errors."""
    if line.endswith(" ..."):
        line = " ".join(line.split()[:-1])
        other = " ".join(other.split()[: len(line.split())])
    if " ".join(NUMBER.sub("#", line).split()) != " ".join(NUMBER.sub("#", other).split()):
        return False
    pairs = zip(numbers(line), numbers(other), strict=True)
    return all(abs(a - b) <= 0.1 * max(abs(a), abs(b)) or max(abs(a), abs(b)) < 1e-5 for a, b in pairs)


def write_outputs(page):
    """Replace the quoted outputs of a page by what its commands print. Quotes with a line `...` stay."""
    text = page.read_text()
    for command, quote in quoted(text):
        if "..." not in quote.splitlines():
            text = text.replace(f"$ {command}\n{quote}", f"$ {command}\n{output_of(command).rstrip()}\n", 1)
    page.write_text(text)


if __name__ == "__main__":  # python -m tests.guide_commands docs/guide/ranks.md
    for name in sys.argv[1:]:
        write_outputs(Path(name))
