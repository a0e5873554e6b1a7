"""Count the lines of code that each trick takes by hand, and those of the same training in Lockstep.

    python examples/tricks/count_lines.py

A line of code is not empty, not a comment, and not in a docstring.
"""

import ast
import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TRICKS = {
    "01": ("ranks and DDP", "torchrun, or --nproc"),
    "02": ("shards and order", "nothing"),
    "03": ("accumulation", "batch.micro"),
    "04": ("mixed precision", "precision"),
    "05": ("loss scaling", "precision"),
    "06": ("clipping", "optim.clip_norm"),
    "07": ("learning rate and warm-up", "optim.lr_scaling, schedule.warmup_steps"),
    "08": ("global loss and metrics", "Task.metrics"),
    "09": ("exact evaluation", "nothing"),
    "10": ("checkpoint and resuming", "checkpoint.every_steps"),
    "11": ("random numbers of samples", "nothing"),
    "12": ("comparing the steps", "nothing"),
}


def code_lines(path):
    """The lines of code of a file."""
    text = path.read_text()
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return [line for number, line in lines if number not in left_out and line.strip() and line.strip()[0] != "#"]


by_hand = code_lines(HERE / "98_all_by_hand.py")
marks = Counter(match[1] for line in by_hand if (match := re.search(r"  # (\d\d)$", line)))
print(f"{'trick':<28}{'lines by hand':>13}   in Lockstep")
for number, (name, key) in TRICKS.items():
    print(f"{number} {name:<25}{marks[number]:>13}   {key}")
print(f"{'the training itself':<28}{len(by_hand) - marks.total():>13}")
print(f"{'all':<28}{len(by_hand):>13}   {len(code_lines(HERE / '99_lockstep.py'))}")
