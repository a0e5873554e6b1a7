"""The examples of docs/sampling.md run as they stand."""

import re

import numpy as np
import pytest

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "sampling.md").read_text()


@pytest.mark.exhaustive
def test_the_examples_learn_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(first + second, names)
    told = re.search(r"# plain ([\d.]+), balanced ([\d.]+)", PAGE)
    assert abs(names["plain"] - float(told[1])) < 0.03
    assert abs(names["balanced"] - float(told[2])) < 0.05
    assert names["easy_first"] > 0.7
    log = (tmp_path / "runs" / "balanced" / "train.log").read_text()
    for line in re.findall(r"^    (weighted.*|epoch 1 .*)$", PAGE, re.MULTILINE):
        assert line in log
    data = names["Curriculum"]().train_data()
    rank = data.order.rank
    for epoch, share in ((0, 0.2), (3, 0.8), (9, 1.0)):
        drawn = data.order(np.arange(2000), seed=0, epoch=epoch)
        assert share * 0.95 < rank[drawn].max() / 2000 < share
