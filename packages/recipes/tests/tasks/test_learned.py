"""What tasks learn from their data before they train is the same in every process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packages.lab.tests.verify import recipe_cases
from tests import lm_cases
from tests.learned_cases import BACKWARDS
from tests.processes import HANG_S, ROOT, environment
from tests.selection import mainly

QUICK = ["new bag", "packed", "pictures", "shards"]
"""No models of transformers: a process needs seconds to import these."""
ALL = [*QUICK, "new bert", "byte pairs", "characters", "boxes", "masks", "volumes"]


def cases(root):
    """[recipe, overrides] by name: all that is learned from data before a training, each at least once."""
    folders = iter(range(100))

    def of(recipe, *more):
        folder = Path(root, f"{recipe}-{next(folders)}")
        folder.mkdir(parents=True)
        return [recipe, [*recipe_cases.overrides(recipe, folder), *more]]

    texts = lm_cases.json_lines(root / "texts.jsonl", [{"text": text} for text in lm_cases.texts(count=200)])
    lm = ["lm", [f"data.train={texts}", "task.small={layers: 1, width: 16, heads: 2}", "task.length=32"]]
    text = of("text", "task.class_weights=balanced", "data.balance=label", "data.eval=null")
    bag = ["text", [text[1][0], "task.scratch.vocab_size=300", "data.eval=null"]]
    return {
        "new bag": bag,
        "new bert": text,
        "byte pairs": [lm[0], [*lm[1], "task.vocab_size=400"]],
        "characters": [lm[0], [*lm[1], "task.tokenizer=characters"]],
        "packed": [lm[0], [*lm[1], "task.vocab_size=300", "task.packing=true"]],
        "pictures": of("image_folder", "task.class_weights=balanced", "data.balance=label"),
        "boxes": of("detection"),
        "masks": of("segmentation", "task.class_weights=balanced"),
        "volumes": of("ct_small"),
        "shards": ["shards", [str(root / "image_folder-1" / "train")]],
    }


@pytest.mark.parametrize("names", mainly([QUICK], [QUICK, ALL]), ids=len)
def test_all_that_is_learned_from_data_is_the_same_in_two_processes_with_empty_caches(tmp_path, names):
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({name: case for name, case in cases(tmp_path).items() if name in names}))
    processes = []
    for number in (1, 2):
        more = {"PYTHONHASHSEED": str(number), "LOCKSTEP_CACHE": str(tmp_path / f"cache{number}")}
        more[BACKWARDS] = "1" if number == 2 else ""
        command = [sys.executable, "-m", "tests.learned_cases", str(file)]
        processes.append(subprocess.Popen(command, env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE))
    outputs = [process.communicate(timeout=HANG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    one, other = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert {kind.partition("-")[0] for kind in one["cache"]} >= {"texts", "tokens", "tokenizer", "lm"}
    for name, learned in one.items():
        assert learned, name
        assert learned.keys() == other[name].keys(), name
        differ = [what for what, digest in learned.items() if other[name][what] != digest]
        assert not differ, f"{name}: two processes have learned different {', '.join(differ)}"
