"""The options of `lockstep plan` besides the plan itself: --advise, --chart, and the rates of GPUs."""

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from packages.lab.tests.plan import test_measure
from packages.lab.tests.plan.test_advise import made_up

SMALL = f"{test_measure.__file__}:Mlp"


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_advice(call, tmp_path):
    made_up(tmp_path / "run", figures={"train/wait_share": 0.5})
    done = call("--advise", "run")
    assert done.exit_code == 0
    assert "1. Training waits for data 50%" in done.stdout
    assert "change: data.workers=2" in done.stdout
    content = json.loads(call("--advise", "run", "--json", "-").stdout)
    assert content["advice"][0]["changes"] == ["data.workers=2"]
    assert call("--advise", "run", "--json", "out.json").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--advise", "nowhere"], "no such folder"),
        (["--advise", "nowhere", "--gpu", "H100"], "--advise with --gpu"),
        (["--advise", "nowhere", "--json", "none/advice.json"], "none/advice.json"),
        (["digits", "--measure", "plan.link_bandwidth=5GB/s"], "--measure with plan.link_bandwidth"),
        (["digits", "--advise", "nowhere"], "takes no target"),
        ([], "neither what would be trained nor which run"),
        (["digits", "--gpu", "H100", "--chart", "plan.png"], "is not the name of an SVG file"),
        (["digits", "--gpu", "H100", "plan.watts=0"], "is not above 0"),
        (["digits", "--measure", "--nproc", "none"], "--nproc"),
        (["digits", "--measure", "--gpu", "H100"], "measures on this machine"),
        (["digits", "--measure", "--precision", "bf16"], "write precision=bf16"),
        (["digits", "--measure", "--gpus", "2"], "--measure with --gpus"),
        (["digits", "--gpu", "H100", "--chart", "none/plan.svg"], "there is no such folder"),
        (["digits", "--gpu", "H100", "--json", "none/plan.json"], "there is no such folder"),
        (["digits", "--gpu-memory", "80"], "80 bytes"),
        (
            ["digits", "--gpu", "H100", "plan.failures_per_gpu_year=nan", "plan.save_seconds=3"],
            "should be a finite number",
        ),
        (["digits", "--gpu", "H100", "--nproc", "2"], "has no meaning without --measure"),
    ],
)
def test_wrong_usage(call, arguments, said):
    done = call(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_chart_energy_and_price(call, tmp_path):
    options = ["--gpus", 2, "--gpu", "H100", "--chart", "plan.svg", "plan.watts=700", "plan.price_per_gpu_hour=2"]
    done = call(SMALL, *options, "--json", "plan.json")
    assert done.exit_code == 0, done.output
    assert "energy and price" in done.stdout
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")
    for option in json.loads((tmp_path / "plan.json").read_text())["options"]:
        if option["estimate"]:
            epoch, hours = option["cost"]["epoch"], option["estimate"]["epoch_seconds"] / 3600 * 2
            assert epoch["gpu_hours"] == pytest.approx(hours)
            assert epoch["kilowatt_hours"] == pytest.approx(0.7 * hours)
            assert epoch["price"] == pytest.approx(2 * hours)
    # Without the GPU's name the time is not known.
    assert "are unknown, because the time is" in call(SMALL, "--gpu-memory", "80GB", "plan.watts=700").stdout
