"""What verify writes and prints: strict JSON, a page that loads no other file, lines for a terminal."""

import json
import math

import numpy as np
import pytest
import torch

from lockstep_lab.verify.html_report import to_html
from lockstep_lab.verify.report import HEAD, line, summary, to_json
from lockstep_lab.verify.result import CheckResult, VerifyResult
from packages.lab.tests.report.cases import Page

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


def page(*checks, **more):
    return Page(to_html(result(*checks, **more)))


def charts_of(curves):
    """The charts of a page, and the page."""
    read = page(check(curves=curves))
    return read.data["charts"], read


def columns(chart):
    """The values of each line of a chart, by label."""
    return dict(zip(chart["labels"], [column for table in chart["tables"] for column in table[1:]], strict=True))


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
    assert len(read.scripts) == len(page(check(curves={"a": [1.0]})).scripts)
    assert "".join(read.texts).count(NASTY) >= 12


def test_the_page_needs_nothing_from_elsewhere_and_no_encoding():
    read = page(check(reason="größer \ud800 ≤", curves={"a": [1.0, 2.0]}))
    assert {"link", "img", "iframe"} & set(read.tags) == set()
    assert all(value.startswith("#") for _, name, value in read.attributes if name in ("src", "href"))
    text = to_html(result(check(reason="größer \ud800 ≤")))
    assert text.isascii()
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
    assert read.row("ranks") == ["ranks", "passed", "3.1e-14 ≤ 1.0e-11", "the same model", "2.3"]
    assert read.row("probe") == ["probe", "FAULT", "", "why", "0.0"]
    looks = [value for tag, name, value in read.attributes if (tag, name) == ("span", "class")]
    assert [look for look in looks if look != "fixed"] == ["fixed passed", "fixed fault", "fixed not-shown"]
    assert "section" not in read.tags


def test_each_curve_is_a_line():
    curves = {"one process": [3.0, 2.0, 1.0], "2 ranks": [3.0, 2.0, 1.0], "3 ranks": [3.0, 2.0]}
    (chart,), read = charts_of(curves)
    assert columns(chart) == curves
    assert chart["tables"][0][0] == [1, 2, 3]
    assert len(set(chart["colors"])) == 3
    assert "difference of 2 ranks from one process: identical" in read.text


def test_differences_are_drawn_over_a_logarithmic_axis():
    first = [1.0 - 0.01 * step for step in range(20)]
    second = [first[0], *(value + 10.0 ** (step - 20) for step, value in enumerate(first[1:]))]
    (losses, differences), read = charts_of({"one process": first, "same": first, "2 ranks": second, "short": [1.0]})
    assert "startsLog" not in losses
    assert differences["startsLog"]
    (shown,) = columns(differences).values()
    assert shown[0] is None
    assert shown[10:] == pytest.approx([10.0 ** (step - 20) for step in range(9, 19)], rel=0.01)
    assert "difference of same from one process: identical" in read.text
    assert losses["colors"][losses["labels"].index("2 ranks")] == differences["colors"][0]


def test_what_is_not_finite_interrupts_a_line_and_is_said():
    curve = [3.0, 2.0, math.nan, 1.5, math.inf, 1.0, 0.5, -math.inf]
    (chart,), read = charts_of({"loss": curve})
    assert columns(chart)["loss"] == [value if math.isfinite(value) else None for value in curve]
    assert "loss: 3 of 8 values are not finite, the first at step 3" in read.text


@pytest.mark.parametrize(
    "curves", [{"a": []}, {"a": [math.nan] * 3}, {"a": [], "b": []}, {"a": [math.inf], "b": [-math.inf]}]
)
def test_where_nothing_can_be_drawn_it_is_said(curves):
    charts, read = charts_of(curves)
    assert not charts
    assert "no steps" in read.text or "not finite" in read.text


def test_the_charts_of_several_checks_are_numbered():
    read = page(check(curves={"a": [1.0, 2.0]}), check(curves={"b": [1.0], "c": [2.0]}))
    assert [value for _, name, value in read.attributes if name == "data-chart"] == ["0", "1", "2"]
    assert [chart["labels"] for chart in read.data["charts"]] == [["a"], ["b", "c"], ["c"]]


def test_notes_and_rows_are_shown():
    rows = [
        {"sample": "a.png", "truth": [1, "cat"], "p": 0.123456789},
        {"sample": "x" * 900, "loss": math.nan, "p": torch.tensor(0.5)},
    ]
    read = page(check(notes=["no dropout", "a part"], rows=rows))
    assert read.tags.count("li") == 2
    assert read.row("sample") == ["sample", "truth", "p", "loss"]
    assert read.row("a.png") == ["a.png", '[1, "cat"]', "0.123457", "-"]
    assert ["x" * 199 + "…", "-", "0.5", "nan"] in read.rows
    links = [value for tag, name, value in read.attributes if (tag, name) == ("a", "href")]
    assert links == ["#" + value for tag, name, value in read.attributes if (tag, name) == ("section", "id")]


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
