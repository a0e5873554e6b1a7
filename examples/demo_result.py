"""The result of `make demo`, in five lines: python examples/demo_result.py RUN_DIR."""

import json
import sys
from pathlib import Path


def lines(run: Path) -> list[str]:
    """The content of the run directory's files, as text.

    Args:
        run: contains metrics.jsonl of the training, and evaluation.json and predictions.jsonl of later commands.
    """
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = json.loads((run / "evaluation.json").read_text())
    predictions = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    images, right = evaluation["eval/samples"], round(evaluation["eval/accuracy"] * evaluation["eval/samples"])
    read, truth = (" ".join(row[name] for row in predictions) for name in ("prediction", "truth"))
    return [
        "",
        f"Two processes trained one model on images of handwritten digits, in {entries[-1]['time_s']:.0f} seconds.",
        f"It reads {right} of {images} new images correctly ({right / images:.1%}). Each of them was counted once.",
        f"It reads the first five as {read}. People wrote {truth}.",
        f"Its curves as a page:                       .venv/bin/lockstep report {run}",
        "The same training on one process, compared: .venv/bin/lockstep verify digits",
    ]


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))
