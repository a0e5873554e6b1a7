"""Tables of every kind are read alike, and what is wrong with one is said with file and line."""

import csv
import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.readers.cache import digest_of
from lockstep_recipes.tasks.readers.table import Source

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=20)
COLUMNS = {"text": ['one, "two"', "drei\nvier \N{SNOWMAN}", "\N{BYTE ORDER MARK}five"], "label": ["a", "b", "a"]}
TABLE = [tuple(COLUMNS), *zip(*COLUMNS.values(), strict=True)]
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in TABLE[1:]]
LINES = [":2", ":3", ":5"]  # of the rows of TABLE in a file


def put(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path, **options):
    return Source(str(path), **options).read()


def as_csv(rows, **options):
    class Text(list):
        write = list.append

    text = Text()
    csv.writer(text, **options).writerows(rows)
    return "".join(text)


def saved(folder, labels, kind=None):
    """A folder that `datasets` saved."""
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": kind or datasets.ClassLabel(names=["zebra", "ape"])}
    )
    datasets.Dataset.from_dict(
        {"text": [f"text {number}" for number in range(len(labels))], "label": labels}, features
    ).save_to_disk(str(folder))
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")


# ---- kinds of files


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.csv", as_csv(TABLE), LINES),
        ("a.CSV", as_csv(TABLE, lineterminator="\n"), LINES),
        (
            "mark.csv",
            "\ufeff" + as_csv(TABLE, quoting=csv.QUOTE_ALL),
            LINES,
        ),
        (
            "returns.csv",
            as_csv(TABLE, lineterminator="\r", quoting=csv.QUOTE_ALL),
            LINES,
        ),
        (
            "utf16.csv",
            ("\ufeff" + as_csv(TABLE)).encode("utf-16-le"),
            LINES,
        ),
        (
            "utf16be.csv",
            ("\ufeff" + as_csv(TABLE)).encode("utf-16-be"),
            LINES,
        ),
        (
            "utf32.csv",
            ("\ufeff" + as_csv(TABLE)).encode("utf-32-le"),
            LINES,
        ),
        (
            "utf32be.jsonl",
            ("\ufeff" + "".join(json.dumps(row) + "\n" for row in ROWS)).encode("utf-32-be"),
            [":1", ":2", ":3"],
        ),
        (
            "gaps.csv",
            as_csv(TABLE).replace("\r\n", "\r\n\r\n"),
            [":3", ":5", ":8"],
        ),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS), [":1", ":2", ":3"]),
        (
            "mark.ndjson",
            "\ufeff" + "".join("\n" + json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS),
            [":2", ":4", ":6"],
        ),
        ("a.json", json.dumps(ROWS, indent=1), [", row 0", ", row 1", ", row 2"]),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS), [":1", ":2", ":3"]),
    ],
)
def test_texts_are_the_same_from_every_kind_of_file(tmp_path, name, content, lines):
    path = put(tmp_path, name, content)
    table = read(path)
    assert table.columns == COLUMNS
    assert [table.where(row).removeprefix(str(path)) for row in range(len(table))] == lines
    assert len(table) == 3
    assert table.classes == {}


def test_quotes_in_tsv_are_letters_unless_it_is_said_otherwise(tmp_path):
    text = 'text\tlabel\n"Stop" she said\ta\n12" pizza\tb\n"unclosed\ta\n'
    path = put(tmp_path, "a.tsv", text)
    assert read(path).columns == {"text": ['"Stop" she said', '12" pizza', '"unclosed'], "label": ["a", "b", "a"]}
    assert read(path).notes == ()
    assert read(put(tmp_path, "a.csv", text.replace("\t", ",")), quoting="none").columns["text"][2] == '"unclosed'
    with pytest.raises(DataError, match="not CSV") as caught:
        read(path, quoting="minimal")
    assert "task.quoting=none" in caught.value.remedy


def test_tsv_with_quoted_fields_is_read_with_the_option_that_is_named_without_it(tmp_path):
    path = put(tmp_path, "a.tsv", as_csv(TABLE, delimiter="\t"))
    assert read(path, quoting="minimal").columns == COLUMNS
    assert [read(path, quoting="minimal").where(row).removeprefix(str(path)) for row in range(3)] == LINES
    with pytest.raises(DataError, match="1 field, but the header has 2") as caught:
        read(path)
    assert caught.value.where == f"{path}:3"
    assert "task.quoting=minimal" in caught.value.remedy
    quoted = read(put(tmp_path, "b.tsv", 'text\tlabel\n"one ""two"""\ta\n"three"\tb\nfour\ta\n'))
    assert quoted.columns["text"] == ['"one ""two"""', '"three"', "four"]
    assert "2 fields in" in quoted.notes[0]
    assert "task.quoting=minimal" in quoted.notes[0]


def test_parquet_is_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({**COLUMNS, "tags": [["x", "y"], [], ["x"]]}), path)
    table = read(path)
    assert table.columns == {**COLUMNS, "tags": [["x", "y"], [], ["x"]]}
    assert table.where(2) == f"{path}, row 2"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not readable as Parquet") as caught:
        read(path)
    assert caught.value.where == str(path)
    assert "damaged" in caught.value.remedy


def test_lines_of_text_are_texts(tmp_path):
    path = put(tmp_path, "a.txt", "\ufeffone, 1\r\n\r\nthree")
    table = read(path)
    assert table.columns == {"text": ["one, 1", "", "three"]}
    assert table.where(2) == f"{path}:3"


def test_csv_without_header_has_numbered_columns(tmp_path):
    path = put(tmp_path, "a.csv", "a,b\nc,d\n")
    assert read(path, header=False).columns == {"0": ["a", "c"], "1": ["b", "d"]}
    assert read(path, header=False).where(1) == f"{path}:2"
    assert read(path).columns == {"a": ["c"], "b": ["d"]}


def test_the_delimiter_may_be_any(tmp_path):
    assert read(put(tmp_path, "a.csv", "text;label\na,b;c\n"), delimiter=";").columns == {
        "text": ["a,b"],
        "label": ["c"],
    }
    assert read(put(tmp_path, "a.tsv", "text|label\na\tb|c\n"), delimiter="|").columns == {
        "text": ["a\tb"],
        "label": ["c"],
    }


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        (
            "a.csv",
            b"text;label\na;1,5\n",
            "the delimiter of a.csv is ';', according to its header; task.delimiter overrides it",
        ),
        ("a.csv", b"\ntext\tlabel\na\t1,5\n", "the delimiter of a.csv is a tab"),
        ("a.tsv", b'text,label\na,"1,5"\n', "the delimiter of a.tsv is ','"),
        ("a.csv", 'text,label\na,"1,5"\n'.encode("utf-16-le"), "no byte order mark and is read as UTF-16-LE"),
        ("a.csv", 'text,label\na,"1,5"\n'.encode("utf-32-be"), "no byte order mark and is read as UTF-32-BE"),
        ("a.csv", "\ufefftext\tlabel\na\t1,5\n".encode("utf-16-le"), "is a tab"),  # as Excel saves "Unicode text"
        ("a.csv", b'text,la;bel\na,"1,5"\n', None),
        ("a.csv", b"text\na;b\n", None),
    ],
)
def test_the_delimiter_and_the_encoding_are_found_and_told(tmp_path, name, content, note):
    table = Source.parse(str(put(tmp_path, name, content)), quoting="minimal").read()
    assert [column[0] for column in table.columns.values()] in (["a", "1,5"], ["a;b"])
    assert [note in told for told in table.notes] == [True] if note else table.notes == ()


def test_a_delimiter_that_is_set_is_not_replaced(tmp_path):
    with pytest.raises(DataError, match="there is only one column, 'text;label'"):
        Source.parse(str(put(tmp_path, "a.csv", "text;label\na;b\n")), delimiter=",").read()
    table = Source.parse(str(put(tmp_path, "b.csv", "a;b\n")), header=False).read()
    assert table.columns == {"0": ["a;b"]}  # without a header, a text may hold any letter


def test_names_of_columns_are_stripped_and_cells_are_not(tmp_path):
    assert read(put(tmp_path, "a.csv", "text , label\n a , b\n")).columns == {"text": [" a "], "label": [" b"]}


def test_long_fields_are_read(tmp_path):
    csv.field_size_limit(131072)
    assert read(put(tmp_path, "a.csv", f"text,label\n{'x' * 200_000},b\n")).columns["text"] == ["x" * 200_000]


def test_only_a_line_feed_ends_a_json_line(tmp_path):
    path = put(tmp_path, "a.jsonl", '{"text": "one\u2028two\x85"}\n{"text": "three"}\n')
    assert read(path).columns == {"text": ["one\u2028two\x85", "three"]}
    assert read(path).where(1) == f"{path}:2"


def test_keys_that_an_object_lacks_are_none(tmp_path):
    table = read(put(tmp_path, "a.jsonl", '{"text": "a"}\n{"label": 3, "text": "b"}\n'))
    assert table.columns == {"text": ["a", "b"], "label": [None, 3]}


def test_embedded_docstrings_are_read():
    source = Source.parse("docstrings")
    table = source.read()
    assert set(table.columns) == {"text", "label"}
    assert len(table) > 2000
    assert all(text.strip() for text in table.columns["text"])
    assert [path.name for path in source.files()] == ["docstrings.csv"]


CELLS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",;\n\r\t \ufeff\u2028'), max_size=6)


@FIXED
@given(data=st.data(), width=st.integers(1, 3), delimiter=st.sampled_from(",;\t|"), every=st.booleans())
def test_cells_that_csv_writes_are_read_back(tmp_path_factory, data, width, delimiter, every):
    rows = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=4))
    text = as_csv(
        [[f"column {number}" for number in range(width)], *rows],
        delimiter=delimiter,
        quoting=csv.QUOTE_ALL if every else csv.QUOTE_MINIMAL,
    )
    table = read(put(tmp_path_factory.getbasetemp(), "round.csv", text), delimiter=delimiter)
    assert [list(row) for row in zip(*table.columns.values(), strict=True)] == rows


@FIXED
@given(rows=st.lists(st.tuples(st.text('a",\n', max_size=4), st.text("b\n", max_size=3)), min_size=1, max_size=6))
def test_a_row_is_named_by_its_first_line(tmp_path_factory, rows):
    path = put(
        tmp_path_factory.getbasetemp(),
        "lines.csv",
        as_csv([("text", "label"), *rows], lineterminator="\n", quoting=csv.QUOTE_ALL),
    )
    table = read(path)
    first = [
        1 + as_csv([("text", "label"), *rows[:number]], lineterminator="\n").count("\n") for number in range(len(rows))
    ]
    assert [table.where(row) for row in range(len(rows))] == [f"{path}:{line}" for line in first]


# ---- folders that `datasets` saved, and the hub


def test_a_saved_data_set_is_read_with_the_names_of_its_classes(tmp_path):
    folder = saved(tmp_path / "one", [1, 0, 1])
    table = read(folder)
    assert table.columns == {"text": ["text 0", "text 1", "text 2"], "label": [1, 0, 1]}
    assert table.classes == {"label": ["zebra", "ape"]}
    assert table.where(2) == f"{folder}:train, row 2"


def test_lists_of_classes_keep_the_names(tmp_path):
    import datasets

    table = read(saved(tmp_path / "lists", [[0, 1], []], datasets.List(datasets.ClassLabel(names=["zebra", "ape"]))))
    assert table.columns["label"] == [[0, 1], []]
    assert table.classes == {"label": ["zebra", "ape"]}


def test_splits_of_a_saved_data_set_are_read_by_name(tmp_path):
    import datasets

    parts = {
        split: datasets.Dataset.from_dict({"text": [f"in {split}"], "label": [split]}) for split in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    sources = [Source.parse(f"{tmp_path}/both"), Source.parse(f"{tmp_path}/both:test")]
    assert [source.read().columns["text"] for source in sources] == [["in train"], ["in test"]]
    assert sources[1].read().where(0) == f"{tmp_path}/both:test, row 0"
    assert digest_of(files=sources[0].files()) != digest_of(files=sources[1].files())
    with pytest.raises(DataError, match="there is no split 'val'") as caught:
        Source.parse(f"{tmp_path}/both:val").read()
    assert "train, test" in caught.value.remedy


def test_a_folder_that_is_no_data_set_names_its_files(tmp_path):
    with pytest.raises(DataError, match="not a folder that `datasets` saved") as caught:
        read(tmp_path)
    assert "save_to_disk" in caught.value.remedy
    put(tmp_path, "inside.csv", "text,label\na,b\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert caught.value.remedy.endswith("inside.csv")


@pytest.mark.usefixtures("offline")
def test_a_name_that_the_hub_does_not_give_says_so(tmp_path):
    with pytest.raises(DataError, match="no data set that the Hugging Face hub provides now") as caught:
        Source.parse("nobody/nothing:test").files()
    assert caught.value.where == "nobody/nothing:test"
    assert "offline, give a file" in caught.value.remedy
    assert str(tmp_path / "hub") in caught.value.remedy
    assert "\n" not in caught.value.what


def test_the_hub_is_asked_for_subset_and_split(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_dict({"text": ["from the hub"], "label": [1]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = Source.parse("someone/something:validation", subset="de").read()
    assert asked == [(("someone/something", "de"), {"split": "validation"})]
    assert table.columns["text"] == ["from the hub"]


@pytest.mark.parametrize(("library", "name"), [("datasets", "some/name"), ("pyarrow.parquet", "a.parquet")])
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, library, name):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "a.parquet", b"")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match="is needed to read") as caught:
        Source(name).read()
    assert f"pip install {library.partition('.')[0]}" in caught.value.remedy


# ---- names of sources


@pytest.mark.parametrize(
    ("text", "name", "split"),
    [
        ("docstrings", "docstrings", "train"),
        ("imdb:test", "imdb", "test"),
        ("some/name:validation", "some/name", "validation"),
        ("here:there/a.csv", "here:there/a.csv", "train"),
        ("a:b.jsonl", "a:b.jsonl", "train"),
        ("odd:name", "odd:name", "train"),  # is there
        ("folder:b", "folder", "b"),
    ],
)
def test_what_follows_the_last_colon_is_the_split_of_a_data_set(tmp_path, monkeypatch, text, name, split):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "odd:name", "")
    (tmp_path / "folder").mkdir()
    assert Source.parse(text, subset="x", header=False, delimiter=";", quoting="none") == Source(
        name, split, "x", False, ";", "none"
    )


def test_a_file_that_is_missing_is_named_with_one_that_is_near(tmp_path):
    put(tmp_path, "train.csv", "")
    with pytest.raises(DataError, match="no such file") as caught:
        read(tmp_path / "trian.csv")
    assert caught.value.where == str(tmp_path / "trian.csv")
    assert caught.value.remedy.startswith("did you mean train.csv? Give a file")
    with pytest.raises(DataError, match="no such file") as caught:
        Source(str(tmp_path / "nowhere" / "a.jsonl")).files()
    assert caught.value.remedy.startswith("Give a file")


def test_a_file_of_unknown_kind_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"unknown suffix '\.xlsx'") as caught:
        read(put(tmp_path, "a.xlsx", "text"))
    assert ".csv, .tsv" in caught.value.remedy


def test_the_content_of_a_file_tells_whether_it_has_changed(tmp_path):
    path = put(tmp_path, "a.csv", "text,label\na,b\n")
    source = Source(str(path))
    assert source.files() == (path,)
    before = digest_of(files=source.files())
    os.utime(path, (0, 0))
    assert digest_of(files=source.files()) == before
    put(tmp_path, "a.csv", "text,label\na,c\n")
    assert digest_of(files=source.files()) != before


# ---- what is wrong with a file


LISTS = 'write [{"text": ..., "label": ...}, ...]'


@pytest.mark.parametrize(
    ("name", "content", "place", "what", "remedy"),
    [
        ("a.csv", "text,label\na,b\nc,d,e\nf\n", ":3", "3 fields, but the header has 2 (text, label)", "quotes"),
        (
            "a.csv",
            'text,label\r\n"a\r\nb\r\nc",x\r\nd\r\n',
            ":5",
            "1 field, but the header has 2 (text, label)",
            "quotes",
        ),
        ("a.csv", 'text,label\n"a\nb",x,y\n', ":2", "3 fields, but", "quotes"),
        ("a.csv", "\ntext,label\n\n\na\n", ":5", "1 field, but", "quotes"),
        (
            "a.csv",
            'text,label\n"a\n\nb",c\n"d,e\nf,g\n',
            ":5",
            "not CSV: unexpected end of data",
            "quoted field must end",
        ),
        ("a.csv", 'text,label\na,b\n"c"d,e\n', ":3", "not CSV: ',' expected after '\"'", "quoted field must end"),
        ("a.csv", 'text,label\na,b\n"c,d\ne,f"\n', ":3", "1 field, but the header has 2", "task.quoting=none"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", ":2", "3 fields, but the header has 2", "task.quoting=minimal"),
        (
            "a.csv",
            b"text,label\na,b\ncaf\xe9,c\n",
            "",
            "not UTF-8: byte 0xe9 at byte 18 (line 3)",
            "it may be Latin-1; if so, convert it: iconv -f latin1",
        ),
        (
            "a.csv",
            b"text,label\nit\x92s,b\n",
            "",
            "byte 0x92 at byte 13 (line 2)",
            "it may be Windows-1252; if so, convert it: iconv -f windows-1252",
        ),
        (
            "a.csv",
            "text,label\n机,b\n椅子,c\n".encode() + b"\xff,d\n",
            "",
            "byte 0xff at byte 26 (line 4)",
            "the rest of it is UTF-8",
        ),
        (
            "a.csv",
            "text,label\n机器学习很有意思的一个领域,b\n".encode("gbk"),
            "",
            "not UTF-8",
            "from the encoding that it was written in: iconv -f ENCODING",
        ),
        ("a.csv", b"text\x81\x00\x07\xff", "", "not UTF-8: byte 0x81", "control characters"),
        (
            "a.csv",
            "text,label\na,b\n".encode("utf-16-le")[:-1],
            "",
            "as in UTF-16-LE",
            "iconv -c -f utf-16-le -t utf-8 a.csv",
        ),
        (
            "a.csv",
            "\ufefftext,label\na,b\n".encode("utf-16-be")[:-1],
            "",
            "not UTF-16-BE, although its byte order mark says so: byte 30",
            "truncated",
        ),
        ("a.csv", b"\x1f\x8b\x08\x00\xff\xff", "", "gzip-compressed, not text", "gunzip"),
        ("a.csv", b"PK\x03\x04\xff", "", "a ZIP archive", "save the sheet as CSV"),
        ("a.jsonl", b'{"text": "\xff"}', "", "not UTF-8: byte 0xff at byte 10 (line 1)", "iconv"),
        ("a.txt", b"one\n\ntwo \x80", "", "not UTF-8: byte 0x80 at byte 9 (line 3)", "iconv"),
        ("a.json", b'[{"text":\n"\xc3"}]', "", "not UTF-8: byte 0xc3 at byte 11 (line 2)", "iconv"),
        (
            "a.csv",
            "text,label,text,other,label\n",
            ":1",
            "the header contains 'label', 'text' more than once",
            "task.header=false",
        ),
        ("a.csv", "", "", "no rows", "one row per sample after its header"),
        ("a.csv", "text,label\n\n", "", "no rows", "one row per sample after its header"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"\n', ":3", "not JSON", "one JSON object per line"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', ":2", "a JSON list, not an object", "write objects such as"),
        ("a.jsonl", " \n", "", "no rows", "one object per sample"),
        ("a.json", '[{"text": "a"},\n {"text": }]', ":2", "not JSON", "write a list of objects"),
        ("a.json", '[{"text": "a"}, 3]', ", row 1", "a JSON int, not an object", "write objects such as"),
        ("a.json", '"text"', "", "a JSON str, not a list of objects", LISTS),
        ("a.json", '{"text": ["a"], "label": ["b"]}', "", "a JSON dict, not a list of objects", LISTS),
        ("a.json", '{"data": [{"text": "a"}]}', "", "a JSON dict, not a list of objects", LISTS),
        ("a.json", "[]", "", "no rows", "one object per sample"),
        ("a.json", "", ":1", "not JSON", "write a list of objects"),
        ("a.json", '{"text": "a"}\n{"text"\n', ":2", "not JSON", "one JSON object per line"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name, content, place, what, remedy):
    path = put(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.where == f"{path}{place}"
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_rows_are_compared_with_the_first_where_there_is_no_header(tmp_path):
    path = put(tmp_path, "a.csv", "a,b\nc,d\ne\n")
    with pytest.raises(DataError) as caught:
        read(path, header=False)
    assert caught.value.where == f"{path}:3"
    assert caught.value.what == "1 field, but the first line has 2 (0, 1)"
    assert read(put(tmp_path, "b.csv", "a,a\n"), header=False).columns == {"0": ["a"], "1": ["a"]}
    with pytest.raises(DataError, match="no rows") as caught:
        read(put(tmp_path, "c.csv", "\n"), header=False)
    assert caught.value.remedy == "the file needs one row per sample"


@pytest.mark.parametrize(
    ("text", "name", "split"),
    [
        ("ag_news", "ag_news", "test"),
        ("ag_news:train", "ag_news", "train"),
        ("a/b:train[:10%]", "a/b", "train[:10%]"),
        ("data/a.csv", "data/a.csv", "test"),
    ],
)
def test_a_split_stands_behind_the_first_colon(text, name, split):
    found = Source.parse(text, "test")
    assert (found.name, found.split) == (name, split)


@pytest.mark.parametrize("name", ["here.csv", "absent.tsv", "notes.dat", "docstrings"])
def test_a_split_behind_the_name_of_a_file_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for there in ("here.csv", "notes.dat", "odd.csv:train"):
        put(tmp_path, there, "text,label\na,1\n")
    with pytest.raises(DataError, match=f"{name}:trian: .* has no splits, so there is no 'trian'") as caught:
        Source.parse(f"{name}:trian")
    assert f"write {name}, " in caught.value.remedy
    assert Source.parse("odd.csv:train").name == "odd.csv:train"


def test_without_a_network_the_hub_is_not_tried_again_and_again(tmp_path, monkeypatch):
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells").mkdir()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    modes = []

    def load(*_, **__):
        modes.append((hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("not there")

    def no_network():
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "get_session", no_network)
    with pytest.raises(DataError, match="did you mean cells") as caught:
        Source("celsl").data_set()
    assert str(tmp_path / "celsl") in str(caught.value)
    assert modes == [(True, True)]
    assert not hub.constants.HF_HUB_OFFLINE


# ---- files of spreadsheets


def test_the_first_line_of_excel_names_the_delimiter(tmp_path):
    path = put(tmp_path, "a.csv", "sep=;\r\ntext;label\r\nIt costs 1,50;a\r\nb;b\r\n")
    table = read(path)
    assert table.columns == {"text": ["It costs 1,50", "b"], "label": ["a", "b"]}
    assert [table.where(row) for row in (0, 1)] == [f"{path}:3", f"{path}:4"]
    assert table.notes[0] == "the first line of a.csv only names the delimiter, and is not a row"
    path = put(tmp_path, "b.csv", "\ufeffsep=|\ntext|label\na|b|c\n")
    with pytest.raises(DataError, match="3 fields, but the header has 2") as caught:
        read(path)
    assert caught.value.where == f"{path}:3"
    assert read(put(tmp_path, "c.csv", "sep=;,label\na,b\n")).columns == {"sep=;": ["a"], "label": ["b"]}


def test_delimiters_at_the_end_of_rows_are_ignored_and_reported(tmp_path):
    table = read(put(tmp_path, "a.csv", "text,label\na,b,\nc,d,,\n"))
    assert table.columns == {"text": ["a", "c"], "label": ["b", "d"]}
    assert table.notes == ("a.csv: 2 rows end in delimiters without a value, which are ignored, the first in line 2",)
    table = read(put(tmp_path, "b.csv", "text,label,,\na,b,,\nc,d,,\n"))
    assert table.columns == {"text": ["a", "c"], "label": ["b", "d"]}
    with pytest.raises(DataError, match="3 fields, but the header has 2"):
        read(put(tmp_path, "c.csv", "text,label\na,b,c\n"))


def test_a_header_in_the_middle_is_left_out_and_reported(tmp_path):
    table = read(put(tmp_path, "a.csv", "text,label\na,b\ntext,label\nc,d\n"))
    assert table.columns == {"text": ["a", "c"], "label": ["b", "d"]}
    assert table.notes == ("a.csv: 1 rows repeat the header and are left out, the first in line 3",)


def test_a_quoted_field_that_swallows_rows_is_reported(tmp_path):
    rows = "".join(f"text {row},{row % 2}\n" for row in range(5))
    table = read(put(tmp_path, "a.csv", f'text,label\n"a\n{rows}b",1\nc,0\n'))
    (note,) = table.notes
    assert (
        note
        == 'a.csv: 1 rows have a quoted field that contains lines like rows: a " may be missing, the first in line 2'
    )
    assert read(put(tmp_path, "b.csv", 'text,label\n"a\nb\nc, d\ne\nf",1\nc,0\n')).notes == ()


def test_fields_that_mean_missing_are_none(tmp_path):
    text = "text,label\na,NA\nnan,None\nNAN ,x\nnaN,null\n"
    table = read(put(tmp_path, "a.csv", text))
    assert table.columns == {"text": ["a", None, None, "naN"], "label": [None, None, "x", None]}
    assert table.notes == (
        "read as missing: column 'text': 'nan' (1 times) and 'NAN' (1 times); column 'label': 'NA' (1 times) and "
        "'None' (1 times) and 'null' (1 times); task.missing=[] keeps them as values",
    )
    assert read(tmp_path / "a.csv", missing=()).columns["label"] == ["NA", "None", "x", "null"]
    assert read(tmp_path / "a.csv", missing=("x",)).columns["label"] == ["NA", "None", None, "null"]


def test_names_of_classes_in_parquet_are_those_that_datasets_wrote(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["negative", "positive"]),
            "topics": datasets.List(datasets.ClassLabel(names=["sport", "art"])),
        }
    )
    rows = {"text": ["good", "bad"], "label": [1, 0], "topics": [[0, 1], []]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "table.parquet")
    table = Source.parse(str(tmp_path / "table.parquet")).read()
    assert table.columns == rows
    assert table.classes == {"label": ["negative", "positive"], "topics": ["sport", "art"]}
