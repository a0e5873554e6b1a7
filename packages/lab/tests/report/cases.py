"""Made-up run directories, and what a browser would see of a page."""

import json
import shutil
from html.parser import HTMLParser

from lockstep.core.checkpoint import manifest

TIME = "2026-03-04T05:06:{:02d}+00:00"
PNG = b"\x89PNG\r\n\x1a\n" + b"picture"
NASTY = "</script><script>alert(1)</script><img src=http://example.org/x onerror=\"alert('2')\">&amp; \x1b[31m"
REPORT = "class  IoU\n  Sky  0.5\n  Car  0.25"


def entry(step, **values):
    return {"step": step, "epoch": step / 10, "time_s": step / 2, **values}


def entries(last=20):
    """What a run of `last` steps logs: a line at every step, and an evaluation every 10 steps."""
    for step in range(1, last + 1):
        yield entry(step, **{"train/loss": 2 / step, "train/lr": 0.1, "train/wait_share": 0.0, "train/skipped": 0})
        if step % 10 == 0:
            yield entry(step, **{"eval/loss": 1 / step, "eval/accuracy": step / 100, "eval/iou/Sky": 0.5})


def write_run(folder, *, rows=None, log=None, name="made", **config):
    """A complete run of two starts in `folder`. Its best checkpoint is of step 10 by `min eval/accuracy`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"name": name, "task": {"kind": "toy"}, "data": {"train": "rows.csv"}, "optim": {"lr": 0.1}}
    settings |= {"checkpoint": {"keep_best": "min eval/accuracy", "keep_last": 1}} | config
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["/bin/lockstep", "train", "toy", "optim.lr=0.1", "--fresh", "--run-dir", "runs/made"]
    about = {"lockstep": "0.1.0", "torch": "2.13.0", "world": 2, "device": "x86_64", "command": command}
    about |= {"git": {"commit": "abc123", "dirty": True}}
    (folder / "environment.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or entries()))
    (folder / "train.log").write_text("\n".join(log or LOG) + "\n")
    for step in (10, 20):
        write_checkpoint(folder, step, {"eval/accuracy": step / 100})
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / "step-00000020.png").write_bytes(PNG)
    return folder


def write_checkpoint(folder, step, metrics):
    path = folder / "checkpoints" / f"step-{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    content = {"step": step, "metrics": metrics, "files": {"a": {"bytes": 2**20, "crc32": 1}}}
    content |= {"data": {"samples": 277, "digest": "feed" * 16}, "saved_at": TIME.format(step)}
    (path / manifest.MANIFEST).write_text(manifest.signed(content))


LOG = [
    f"{TIME.format(0)}  lockstep 0.1.0, torch 2.13.0, 2 ranks on cpu, from step 0",
    f"{TIME.format(0)}  ConvNet: 98,026 parameters",
    f"{TIME.format(1)}  step 5/20  epoch 0.50  loss 0.4",
    f"{TIME.format(3)}  step 12/20  epoch 1.20  loss 0.3",
    f"{TIME.format(9)}  lockstep 0.1.0, torch 2.13.0, 2 ranks on cpu, from step 10",
    f"{TIME.format(10)}  warning: the disk is slow",
    f"{TIME.format(11)}  warning: the disk is slow",
    f"{TIME.format(19)}  {REPORT}",
    f"{TIME.format(20)}  step 20/20  epoch 2.00  eval/loss 0.05  eval/accuracy 0.2",
]


class Page(HTMLParser):
    """A page as a browser reads it."""

    EMPTY = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.scripts = [], [], [], []
        self.open, self.cells, self.rows = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.texts.append(data)
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(self.texts)

    @property
    def data(self):
        """What the charts show."""
        return json.loads(self.scripts[0])

    def row(self, first):
        """The first row of any table whose first cell begins with `first`."""
        return next(row for row in self.rows if row and row[0].startswith(first))
