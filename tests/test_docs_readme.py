"""The task that README.md shows runs as it stands."""

import re

from tests import runs
from tests.processes import ROOT


def test_the_task_of_the_readme_trains_as_plain_torch_does():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    found, _ = runs.fit(names["MyTask"](), runs.config())
    expected, _ = runs.by_hand(names["MyTask"]())
    assert runs.difference(found, expected) < 1e-6
    assert expected.keys() == {"weight", "bias"}
