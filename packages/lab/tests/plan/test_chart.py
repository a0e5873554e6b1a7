"""The chart of a plan, as a reader of SVG sees it."""

from xml.etree import ElementTree

import pytest

from lockstep_lab.plan.chart import MemoryBar, gb, svg

SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9


def bar(name="ddp, fp32", fits=True, **parts):
    return MemoryBar(name=name, parts={part: int(size * GB) for part, size in parts.items()}, fits=fits, detail="of 4")


def drawn(bars, limit=80 * GB, **options):
    return ElementTree.fromstring(svg(bars, limit, title=options.pop("title", "a plan"), **options))


def texts(tree):
    return [text.text for text in tree.iter(f"{SVG}text")]


def widths(tree):
    """Widths of the parts by their tool tip."""
    found = {}
    for shape in tree.iter(f"{SVG}rect"):
        about = shape.find(f"{SVG}title")
        if about is not None:
            found[about.text] = float(shape.get("width"))
    return found


def limit_line(tree):
    (line,) = (line for line in tree.iter(f"{SVG}line") if line.get("class") == "limit")
    return float(line.get("x1"))


def test_parts_are_as_long_as_they_are_large():
    tree = drawn([bar(parameters=10, activations=30), bar("fsdp, bf16", parameters=2.5)])
    found = widths(tree)
    assert found["activations: 30.0 GB"] == pytest.approx(3 * found["parameters: 10.0 GB"], rel=0.01)
    assert found["parameters: 10.0 GB"] == pytest.approx(4 * found["parameters: 2.5 GB"], rel=0.01)
    assert {"ddp, fp32", "fsdp, bf16", "40.0 GB", "2.5 GB"} <= set(texts(tree))


def test_bars_that_fit_end_before_the_limit_and_others_behind_it():
    tree = drawn([bar(parameters=79), bar("large", fits=False, parameters=90)])
    ends = {
        shape.find(f"{SVG}title").text: float(shape.get("x")) + float(shape.get("width"))
        for shape in tree.iter(f"{SVG}rect")
        if shape.find(f"{SVG}title") is not None
    }
    assert ends["parameters: 79.0 GB"] < limit_line(tree) < ends["parameters: 90.0 GB"]
    assert texts(tree).count("does not fit") == 1


def test_a_bar_that_is_far_too_long_is_cut():
    tree = drawn([bar(fits=False, parameters=500, gradients=500)])
    size = float(tree.get("width"))
    for shape in tree.iter(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width")) <= size
    assert any(text.startswith("» 1,000.0 GB") for text in texts(tree))


def test_activations_that_are_not_known_are_said():
    tree = drawn([bar(parameters=5)._replace(is_complete=False, fits=None)])
    assert "5.0 GB + ?" in texts(tree)
    assert "activations are unknown" in widths(tree)


def test_the_chosen_bar_the_reserve_and_the_legend():
    tree = drawn([bar(parameters=50, optimizer=1)._replace(is_chosen=True)], reserve=0.1)
    assert "★ ddp, fp32" in texts(tree)
    assert {"parameters", "optimizer"} <= set(texts(tree))
    assert "gradients" not in texts(tree)
    assert any("10% reserved" in text for text in texts(tree))


def test_bars_that_are_far_below_the_limit_have_a_scale_of_their_own():
    tree = drawn([bar(parameters=0.002)])
    assert widths(tree)["parameters: 2.0 MB"] > 300
    assert any("80.0 GB, 40,000 times the longest bar" in text for text in texts(tree))


@pytest.mark.parametrize("bars", [[], [bar()], [bar(parameters=0.00001)]])
def test_small_and_empty_plans(bars):
    assert drawn(bars, limit=None) is not None
    assert drawn(bars) is not None


def test_names_are_escaped():
    assert "<script>" in texts(drawn([bar("<script>")], title="a & b"))


def test_sizes_for_people():
    assert [gb(size) for size in (80e9, 1.234e9, 5e6)] == ["80.0 GB", "1.2 GB", "5.0 MB"]
