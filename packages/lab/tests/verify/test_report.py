"""What verify writes and prints: strict JSON, a page that loads no other file, lines for a terminal."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from lockstep_lab.verify.html_report import to_html
from lockstep_lab.verify.report import HEAD, line, summary, to_json
from lockstep_lab.verify.result import CheckResult, VerifyResult

NASTY = "<script>alert('&\"')</script>"


def check(name="ranks", status="passed", reason="the same model", **more):
    return CheckResult(name=name, status=status, reason=reason, **more)


def result(*checks, **more):
    fields = {
        "name": "digits",
        "nproc": 2,
        "device": "cpu",
        "quick": True,
        "config": {"seed": 0},
        "versions": {"torch": "2.11"},
        "seconds": 61.2,
    }
    return VerifyResult(**fields | more, checks=list(checks))


class Page(HTMLParser):
    """The tags of a page, its text, and whether each tag is closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.wrong = [], [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page(*checks, **more):
    read = Page(to_html(result(*checks, **more)))
    assert not read.open
    assert not read.wrong
    return read


def lines_drawn(read):
    """The points of each polyline."""
    return [[tuple(map(float, point.split(","))) for point in one["points"].split()] for one in read.all("polyline")]


def test_json_is_strict_and_has_the_keys_that_are_promised():
    rows = [
        {
            "truth": (1, "cat"),
            "p": np.float32("nan"),
            "score": torch.tensor([0.5, math.inf]),
            "n": np.int64(3),
            "ok": np.bool_(True),
            7: {"deep": -math.inf},
        }
    ]
    one = check(status="fault", value=math.nan, bound=1e-11, notes=["a note"], curves={"a": [1.0, math.inf]}, rows=rows)
    written = to_json(result(one, check("metric"), check("probe", "not shown")))
    read = json.loads(json.dumps(written, allow_nan=False))
    assert read == written
    keys = ["schema", "name", "passed", "nproc", "device", "quick", "seconds", "versions", "counts", "checks", "config"]
    assert list(read) == keys
    assert read["schema"] == 1
    assert read["passed"] is False
    assert read["counts"] == {"passed": 1, "fault": 1, "not shown": 1}
    first = read["checks"][0]
    assert list(first) == ["name", "status", "reason", "value", "bound", "what", "notes", "curves", "rows", "seconds"]
    assert (first["value"], first["bound"], first["curves"]) == (None, 1e-11, {"a": [1.0, None]})
    assert first["rows"] == [
        {"truth": [1, "cat"], "p": None, "score": [0.5, None], "n": 3, "ok": True, "7": {"deep": None}}
    ]


def test_json_holds_anything_that_a_task_may_return():
    odd = [
        np.longdouble(1.5),
        torch.empty(2, device="meta"),
        {"b"},
        np.array(["x"]),
        np.float64(2.0),
        1j,
        object,
        np.arange(4).reshape(2, 2),
        True,
    ]
    read = json.loads(
        json.dumps(to_json(result(check(rows=[{"odd": odd}]), config={"nan": math.nan})), allow_nan=False)
    )
    values = read["checks"][0]["rows"][0]["odd"]
    assert values[0] == "1.5"
    assert "meta" in values[1]
    assert values[2:] == [["b"], ["x"], 2.0, "1j", "<class 'object'>", [[0, 1], [2, 3]], True]
    assert read["config"] == {"nan": None}


def test_without_a_fault_the_training_passed():
    assert to_json(result(check(), check(status="not shown")))["passed"] is True


def test_nothing_that_a_user_wrote_is_markup():
    one = check(
        NASTY,
        "fault",
        NASTY,
        what=NASTY,
        value=1.0,
        notes=[NASTY],
        curves={NASTY: [1.0, 2.0], NASTY + "2": [1.0, 2.5]},
        rows=[{NASTY: NASTY}],
    )
    read = page(one, name=NASTY, device=NASTY, versions={NASTY: NASTY})
    assert not read.all("script")
    text = to_html(result(one, name=NASTY, device=NASTY, versions={NASTY: NASTY}))
    assert "<script" not in text
    assert read.text.count(NASTY) >= 12


def test_the_page_needs_nothing_from_elsewhere_and_no_encoding():
    read = page(check(reason="größer \ud800 ≤", curves={"a": [1.0, 2.0]}))
    assert {tag for tag, _ in read.tags} & {"link", "script", "img", "iframe"} == set()
    assert not [
        value
        for _, attributes in read.tags
        for key, value in attributes.items()
        if key in ("src", "href") and not value.startswith("#")
    ]
    text = to_html(result(check(reason="größer \ud800 ≤")))
    assert text.isascii()
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "größer" in read.text


def test_the_header_says_it_in_one_sentence():
    checks = [*[check(seconds=2.0)] * 14, check(status="fault"), check(status="not shown")]
    text = page(*checks).text
    assert "14 of 16 checks passed, 1 fault, 1 could not be decided" in text
    for fact in ("digits", "2 ranks", "cpu", "quick", "torch 2.11", "61 s"):
        assert fact in text
    assert "2 of 2 checks passed 1 rank · cpu ·" in page(check(), check(), nproc=1).text
    assert "0 of 0 checks passed" in page().text


def test_the_table_has_each_check_with_its_status_in_words_and_in_colour():
    read = page(
        check("ranks", value=3.1e-14, bound=1e-11, seconds=2.34),
        check("probe", "fault", "why"),
        check("metric", "not shown"),
    )
    assert "ranks passed 3.1e-14 ≤ 1.0e-11 the same model 2.3" in read.text
    assert "probe FAULT why 0.0" in read.text
    looks = [one["class"].split()[-1] for one in read.all("span") if "class" in one and one["class"] != "fixed"]
    assert looks == ["passed", "fault", "not-shown"]
    assert not read.all("section")


def test_each_curve_is_a_line_in_its_own_dashes():
    curves = {"one process": [3.0, 2.0, 1.0], "2 ranks": [3.0, 2.0, 1.0], "3 ranks": [3.0, 2.0]}
    read = page(check(curves=curves))
    drawn = read.all("polyline")
    assert len(drawn) == 3
    assert len({one["stroke"] for one in drawn}) == len({one["stroke-dasharray"] for one in drawn}) == 3
    points = lines_drawn(read)
    assert points[0] == points[1]
    assert [len(one) for one in points] == [3, 3, 2]
    assert [x for x, _ in points[0]] == sorted(x for x, _ in points[0])
    assert [y for _, y in points[0]] == sorted(y for _, y in points[0]), "a lower loss is further down"
    for label in ("step", "loss", *curves):
        assert label in read.text
    assert "difference from one process: identical" in read.text
    assert len(read.all("svg")) == 1


def test_differences_are_drawn_over_a_logarithmic_axis():
    first = [1.0 - 0.01 * step for step in range(20)]
    second = [value + 10.0 ** (step - 20) for step, value in enumerate(first)]
    read = page(check(curves={"one process": first, "same": first, "2 ranks": second, "short": [1.0]}))
    assert len(read.all("svg")) == 2
    assert "difference from one process; no line where it is zero" in read.text
    assert "same (identical)" in read.text
    points = lines_drawn(read)
    assert len(points) == 4, "three curves and a difference; what is identical has no line, a single step is a dot"
    assert len(read.all("circle")) == 1
    heights = [before - after for (_, before), (_, after) in zip(points[3][6:], points[3][7:], strict=False)]
    assert max(heights) - min(heights) < 0.5, "a decade has the same height everywhere"
    assert re.search(r"1e-\d+", read.text)


def test_what_is_not_finite_interrupts_a_line_and_is_said():
    curve = [3.0, 2.0, math.nan, 1.5, math.inf, 1.0, 0.5, -math.inf]
    read = page(check(curves={"loss": curve}))
    assert [len(one) for one in lines_drawn(read)] == [2, 2]
    assert len(read.all("circle")) == 1
    assert "loss (3 of 8 values not finite, first at step 3)" in read.text


@pytest.mark.parametrize(
    "curve",
    [
        [2.5] * 9,
        [0.0] * 3,
        [-3.0, -5.0, -4.0],
        [7.0, 7.0 + 1e-15],
        [1e-310, 2e-310],
        [1e299, -1e299],
        [1e-30, 1e30],
        [2.3025, 2.3026],
        [0.001, 0.002],
    ],
    ids=str,
)
def test_any_finite_curve_is_drawn_within_its_frame_with_ticks(curve):
    read = page(check(curves={"loss": curve}))
    (points,) = lines_drawn(read)
    width, height = map(float, read.all("svg")[0]["viewbox"].split()[2:])
    assert len(points) == len(curve)
    assert all(0 <= x <= width and 0 <= y <= height - 40 for x, y in points)
    labels = [one for one in read.all("text") if one["text-anchor"] == "end"]
    assert 2 <= len(labels) <= 9
    assert len({one["y"] for one in labels}) == len(labels)


def test_nearby_ticks_are_told_apart():
    read = page(check(curves={"loss": [2.30258, 2.30259]}))
    ticks = re.findall(r"2\.3025\d+", read.text)
    assert len(ticks) == len(set(ticks)) >= 3


@pytest.mark.parametrize(
    "curves", [{"a": []}, {"a": [math.nan] * 3}, {"a": [], "b": []}, {"a": [math.inf], "b": [1e308]}]
)
def test_where_nothing_can_be_drawn_it_is_said(curves):
    read = page(check(curves=curves))
    assert not read.all("svg")
    assert "nothing to draw" in read.text


def test_an_empty_curve_among_others_is_named():
    read = page(check(curves={"a": [], "b": [1.0, 2.0]}))
    assert len(read.all("polyline")) == 1
    assert "a (no steps)" in read.text


def test_long_curves_are_thinned_and_keep_their_ends_and_their_peaks():
    curve = [1.0 + 0.1 * math.sin(step) for step in range(10_000)]
    curve[6789] = 50.0
    (points,) = lines_drawn(page(check(curves={"loss": curve})))
    assert 200 < len(points) <= 400
    (whole,) = lines_drawn(page(check(curves={"loss": [1.0] * 400})))
    assert len(whole) == 400
    (fewer,) = lines_drawn(page(check(curves={"loss": curve[:450]})))
    assert 200 < len(fewer) <= 400
    peak, rest = min(points, key=lambda point: point[1]), sorted(y for _, y in points)
    assert rest[1] - peak[1] > 100
    left, right = points[0][0], points[-1][0]
    assert peak[0] == pytest.approx(left + (right - left) * 6789 / 9999, abs=0.1)
    assert right == 736
    curve[1234] = math.nan
    assert len(lines_drawn(page(check(curves={"loss": curve})))) == 2


def test_notes_and_rows_are_shown():
    rows = [
        {"sample": "a.png", "truth": [1, "cat"], "p": 0.123456789},
        {"sample": "x" * 900, "loss": math.nan, "p": torch.tensor(0.5)},
    ]
    read = page(check(notes=["no dropout", "a part"], rows=rows))
    assert len(read.all("li")) == 2
    assert "sample truth p loss" in read.text
    assert 'a.png [1, "cat"] 0.123457 -' in read.text
    assert "x" * 199 + "… - 0.5 nan" in read.text
    assert [one["href"] for one in read.all("a")] == ["#" + one["id"] for one in read.all("section")]


def test_the_heads_are_above_the_columns():
    said = line(check(reason="why", value=3.1e-14, bound=1e-11, seconds=2.3))
    head = HEAD.replace("value and bound", "value_and_bound")
    assert head.split() == ["check", "result", "value_and_bound", "reason", "(time)"]
    for name, text in zip(head.split(), ("ranks", "passed", "3.1e-14", "why"), strict=False):
        assert head.index(name) == said.index(text)


def test_a_line_has_aligned_columns():
    ours = check(reason="2 ranks and one process train the same model", value=3.1e-14, bound=1e-11, seconds=2.3)
    assert (
        line(ours)
        == "ranks          passed     3.1e-14 <= 1.0e-11   2 ranks and one process train the same model  (2.3 s)"
    )
    assert line(check("accumulation", "not shown", "why")) == f"accumulation   not shown  {'':21}why  (0.0 s)"
    assert (
        line(check("metric", "fault", "worse", value=0.5, bound=0.25))
        == "metric         FAULT      0.5 > 0.25           worse  (0.0 s)"
    )


def test_a_long_reason_is_whole_and_in_one_line():
    text = line(check(reason="long " * 100 + "\n\x1b[31mend"))
    assert "long " * 99 in text
    assert text.isprintable()
    assert text.endswith("end (0.0 s)".replace(" (", "  ("))


@pytest.mark.parametrize(
    ("value", "bound", "text"),
    [
        (0.0, 0.0, "0 <= 0"),
        (12.0, None, "12"),
        (-23.41, -2.6, "-23.41 <= -2.6"),
        (math.nan, 1e-11, "nan against 1.0e-11"),
        (math.inf, 1.0, "inf > 1"),
        (1.04e-11, 1.0e-11, "1.040e-11 > 1.000e-11"),
        (None, 1.0, ""),
    ],
)
def test_numbers_are_compared_as_they_are(value, bound, text):
    assert line(check("x", reason="|", value=value, bound=bound))[26:].split("|")[0].strip() == text


def test_the_summary_counts_and_names_each_fault():
    good, bad, open_ = check(), check("probe", "fault", "it\ndiffers"), check(status="not shown")
    assert (
        summary(result(*[good] * 14, bad, open_)) == "14 passed, 1 fault, 1 not shown in 61 s\nFAULT probe: it differs"
    )
    assert summary(result(good)) == "1 passed in 61 s"
    assert summary(result(bad, bad)).splitlines()[0] == "0 passed, 2 faults in 61 s"
    assert len(summary(result(bad, bad)).splitlines()) == 3
