"""The reference of all keys, which docs/keys.py makes of the source."""

import re
import runpy

from lockstep.configs import registry
from lockstep.core.config.sections import RunConfig
from tests.processes import ROOT


def test_every_key_has_a_row_with_its_meaning():
    text = runpy.run_path(str(ROOT / "docs" / "keys.py"))["text"]()
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", text, re.MULTILINE))
    assert [key for key, meaning in rows.items() if not meaning.strip()] == []
    assert {"seed", "optim.lr", "train.stop_when.patience", "task.scratch.vocab_size"} <= rows.keys()
    for name, field in RunConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"`{name}.{key}".removesuffix("_") in text, key
    assert all(f"## task, with kind: {kind}\n" in text for kind in registry.kinds())
