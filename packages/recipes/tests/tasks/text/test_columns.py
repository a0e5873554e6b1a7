"""Which columns of a table hold the texts and the labels."""

import pytest

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.readers.table import Source, Table
from lockstep_recipes.tasks.text.columns import Columns, choose, read
from lockstep_recipes.tasks.text.options import TextColumnsOptions


def chosen(names, text=None, pair=None, label=None, needs_label=True):
    table = Table({name: [] for name in names.split()}, "a.csv")
    return choose(table, TextColumnsOptions(text=text, pair=pair, label=label), needs_label=needs_label)


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
            "several columns could be the text: review, comment",
            "set task.columns.text to one of: review, comment, label",
        ),
        (
            "text topic class",
            {},
            "several columns could be the label: topic, class",
            "set task.columns.label to one of: text, topic, class",
        ),
        ("a b label", {}, "no column has a usual name for the text", "set task.columns.text to one of: a, b, label"),
        ("text a b", {}, "no column has a usual name for the label", "set task.columns.label to one of: text, a, b"),
        ("a", {}, "no column has a usual name for the label", "set task.columns.label to one of: a"),
        (
            "a b",
            {"needs_label": False},
            "no column has a usual name for the text",
            "set task.columns.text to one of: a, b",
        ),
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
        choose(table, TextColumnsOptions())
    assert "It was a good film, and long enough to b...," in caught.value.remedy
    assert caught.value.remedy.endswith("if these are the first row rather than names, set task.header=false")


ROWS = [
    ("spam", "win a prize today"),
    ("ham", "see you at noon"),
    ("ham", "thanks, got it"),
    ("spam", "cheap pills"),
    ("ham", "ok"),
]
ROWS += [("ham", "call me"), ("ham", "on my way")]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("header", [None, ("v1", "v2")])
def test_two_columns_without_usual_names_are_told_apart_by_their_values(tmp_path, header, turned):
    lines = [*([header] if header else []), *ROWS]
    path = tmp_path / "a.csv"
    path.write_text("".join(f'"{line[turned]}","{line[not turned]}"\n' for line in lines))
    for needs_label in (True, False):
        table, columns = read(Source(str(path)), TextColumnsOptions(), needs_label=needs_label)
        assert table.columns[columns.label] == [label for label, _ in ROWS]
        assert table.columns[columns.text[0]] == [text for _, text in ROWS]
        assert (len(columns.text), columns.pair) == (1, None)
        (note,) = table.notes
        assert ("column 'v1' is used as the label" if header else "the first row is used as a sample") in note
        assert table.where(0).endswith(":2" if header else ":1")


def test_columns_that_the_values_do_not_tell_apart_stay_an_error(tmp_path):
    path = tmp_path / "a.csv"
    for rows in (
        [("a", "b", "one"), ("a", "b", "two"), ("a", "b", "three"), ("a", "b", "four")],  # three columns
        [("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")],  # both repeat
        [("a", "long text 1"), ("b", "long text 2"), ("c", "long text 3"), ("d", "long text 4")],  # neither repeats
        [("a long label of a text", "1"), ("a long label of a text", "2"), ("a long label of a text", "3")],
    ):
        path.write_text("".join(",".join(row) + "\n" for row in [tuple("pqr"[: len(rows[0])]), *rows]))
        with pytest.raises(DataError, match="no column has a usual name for the label"):
            read(Source(str(path)), TextColumnsOptions())
    path.write_text("p,q\n" + "".join(f"{label},{text}\n" for label, text in ROWS[:2] * 2))
    with pytest.raises(DataError, match="there is no column 'label'"):
        read(Source(str(path)), TextColumnsOptions(label="label"))


def test_a_header_that_is_a_row_and_a_row_that_is_a_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("good,pos\nbad,neg\nfine,pos\n")
    given = TextColumnsOptions(text=0, label=1)
    with pytest.raises(DataError, match="the header is a row of the data: column 1 is called 'pos'") as caught:
        read(Source(str(path)), given)
    assert caught.value.remedy == "set task.header=false"
    assert len(read(Source(str(path), header=False), given)[0]) == 3
    path.write_text("text,label\nbad,neg\nfine,pos\n")
    with pytest.raises(DataError, match="the first row is a header: its label is 'label'"):
        read(Source(str(path), header=False), given)
    assert len(read(Source(str(path)), given)[0]) == 2


def test_a_column_of_groups_is_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label,Patient_ID\n" + "".join(f"text {row},{row % 2},{row // 2}\n" for row in range(8)))
    (note,) = read(Source(str(path)), TextColumnsOptions())[0].notes
    assert "task.columns.group=Patient_ID keeps them together" in note
    table, columns = read(Source(str(path)), TextColumnsOptions(group="Patient_ID"))
    assert (table.notes, columns.group) == ((), "Patient_ID")
