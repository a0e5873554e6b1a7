"""The example of docs/streams.md runs as it stands, and goes on where it was stopped."""

import re

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "streams.md").read_text()


def test_the_example_learns_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names: dict = {}
    exec(example, names)
    assert names["loss"] < 0.01
    log = (tmp_path / "runs" / "readings" / "train.log").read_text()
    assert "reads from the last state before its position" in log
    read = names["Lines"].__iter__
    places = []

    def seen(self):
        places.append(self.place)
        return read(self)

    names["Lines"].__iter__ = seen
    longer = names["config"] | {"train": {"steps": 160}}
    names["lockstep"].Trainer(longer, run_dir="runs/readings", quiet=True, allow_change=["train.steps"]).fit(
        names["Readings"]()
    )
    place_of = {place for place in places if place}
    assert len(place_of) == 1, "it seeks to the state"
