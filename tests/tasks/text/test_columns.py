"""Which columns of a table hold the texts and the labels."""

import pytest

from lockstep.core.errors import DataError
from lockstep.tasks.readers.table import Table
from lockstep.tasks.text.columns import Columns, choose
from lockstep.tasks.text.options import ColumnsOptions


def chosen(names, text=None, pair=None, label=None, needs_label=True):
    table = Table({name: [] for name in names.split()}, "a.csv")
    return choose(table, ColumnsOptions(text=text, pair=pair, label=label), needs_label=needs_label)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("id text label", Columns(("text",), None, "label")),
        ("Category TWEET id", Columns(("TWEET",), None, "Category")),
        ("text label label_text", Columns(("text",), None, "label")),
        ("label category Text sentence", Columns(("Text",), None, "label")),
        ("whatever intent", Columns(("whatever",), None, "intent")),
        ("idx sentence1 sentence2 label", Columns(("sentence1",), "sentence2", "label")),
        ("Hypothesis Premise uid label", Columns(("Premise",), "Hypothesis", "label")),
        ("text_pair text labels", Columns(("text",), "text_pair", "labels")),
        ("premise text label", Columns(("text",), None, "label")),
    ],
)
def test_columns_with_usual_names_are_found(names, wanted):
    assert chosen(names) == wanted


@pytest.mark.parametrize(
    ("names", "options", "wanted"),
    [
        ("a b c", {"text": "c", "label": "a"}, Columns(("c",), None, "a")),
        ("a b c", {"text": 0, "label": 2}, Columns(("a",), None, "c")),
        ("0 1 2", {"text": 2, "label": 0}, Columns(("2",), None, "0")),
        ("2 1 0", {"text": 2, "label": 0}, Columns(("2",), None, "0")),  # a name comes before a place
        ("title text label", {"text": ["title", 1]}, Columns(("title", "text"), None, "label")),
        ("a b label", {"text": "a", "pair": "b"}, Columns(("a",), "b", "label")),
        ("text other label", {"pair": "other"}, Columns(("text",), "other", "label")),
        ("text text_pair other label", {"pair": "other"}, Columns(("text",), "other", "label")),
        ("label kind", {"label": "kind", "text": "label"}, Columns(("label",), None, "kind")),
        ("label class", {"text": "label"}, Columns(("label",), None, "class")),
        ("text label topic", {"label": "topic"}, Columns(("text",), None, "topic")),
        ("text id", {"needs_label": False}, Columns(("text",), None, None)),
        ("anything", {"needs_label": False}, Columns(("anything",), None, None)),
        ("text id", {"label": "kind", "needs_label": False}, Columns(("text",), None, None)),
        ("text kind", {"label": "kind", "needs_label": False}, Columns(("text",), None, "kind")),
        ("text label", {"label": "kind", "needs_label": False}, Columns(("text",), None, None)),
    ],
)
def test_columns_are_taken_as_given_by_name_or_place(names, options, wanted):
    assert chosen(names, **options) == wanted


@pytest.mark.parametrize(
    ("names", "options", "what", "remedy"),
    [
        (
            "review comment label",
            {},
            "which column is the text? review, comment all might be",
            "set task.columns.text to one of: review, comment, label",
        ),
        (
            "text topic class",
            {},
            "which column is the label? topic, class all might be",
            "set task.columns.label to one of: text, topic, class",
        ),
        ("a b label", {}, "no column looks like the text", "set task.columns.text to one of: a, b, label"),
        ("text a b", {}, "no column looks like the label", "set task.columns.label to one of: text, a, b"),
        ("a", {}, "no column looks like the label", "set task.columns.label to one of: a"),
        ("a b", {"needs_label": False}, "no column looks like the text", "set task.columns.text to one of: a, b"),
        (
            "text label",
            {"text": "txet"},
            "there is no column 'txet'",
            "did you mean text? set task.columns.text to one of: text, label",
        ),
        ("text label", {"label": 2}, "there is no column 2", "set task.columns.label to one of: text, label"),
        ("text label", {"pair": "Other"}, "there is no column 'Other'", "set task.columns.pair to one of: text, label"),
        ("text label", {"text": -1}, "there is no column -1", "set task.columns.text to one of: text, label"),
    ],
)
def test_columns_that_are_not_clear_are_listed(names, options, what, remedy):
    with pytest.raises(DataError) as caught:
        chosen(names, **options)
    assert (caught.value.what, caught.value.where, caught.value.remedy) == (what, "a.csv", remedy)


def test_a_first_row_that_holds_no_names_is_suspected():
    table = Table({"It was a good film, and long enough to be seen twice": [], "pos": []}, "a.csv")
    with pytest.raises(DataError) as caught:
        choose(table, ColumnsOptions())
    assert "It was a good film, and long enough to b...," in caught.value.remedy
    assert caught.value.remedy.endswith("if these are not names but a first row, set task.header=false")
