"""Texts, labels and tokens in the cache are those of the source; what is split off is every class's share."""

import json
import os
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import DataError, UsageError
from lockstep.sampling.of_data import labels_of
from lockstep_recipes.tasks.readers.labels import count_labels, match_labels, sorted_names, split, split_groups
from lockstep_recipes.tasks.readers.table import Source
from lockstep_recipes.tasks.text import data as module
from lockstep_recipes.tasks.text.data import InputText, InputTexts, TextData, read_input_texts, tokenise
from lockstep_recipes.tasks.text.options import TextColumnsOptions, TextOptions
from lockstep_recipes.tasks.text.task import Text

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=20)
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "one",
    "more",
    "mat",
    "on",
    "which",
    "no",
    "other",
    "cat",
    "had",
    "sat",
    "before",
]
TEXTS = [
    "the cat",
    "the cat sat on the mat",
    "b" * 30,
    "\N{SNOWMAN} gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n\ntwo",
    " ".join(WORDS),
    "sat",
    "a mat: no cat!",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from lockstep_recipes.tasks.text.hugging_face import train_tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(tmp_path_factory.mktemp("tokenizer")))
        return train_tokenizer([" ".join(WORDS)] * 3, digest="digest", vocab_size=60, lowercase=True)


@pytest.fixture
def lines(tmp_path):
    """Writes JSON lines of one object per row, or of rows (text, label)."""

    def write(rows, name="a.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join(
                json.dumps(row if isinstance(row, dict) else {"text": row[0], "label": row[1]}) + "\n" for row in rows
            )
        )
        return Source(str(path))

    return write


def labelled(labels):
    return [(f"text {number}", label) for number, label in enumerate(labels)]


def counted(monkeypatch, owner, name):
    """The calls of a method from now on."""
    calls = []
    method = getattr(owner, name)

    def call(*args, **options):
        calls.append(args)
        return method(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def read_texts(source, text=None, pair=None, label=None, separator=",", **options):
    columns = {"text": text, "pair": pair, "label": label}
    return module.read_texts(source, TextOptions(columns=columns, label_separator=separator, **options))


class Counting:
    """A tokenizer, and how many texts it was given in each call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def __call__(self, texts, pairs=None, **options):
        self.calls.append(len(texts))
        return self.tokenizer(texts, pairs, **options)


# ---- texts and labels


def test_texts_and_labels_are_those_of_the_source(lines):
    source = lines([(text, "odd" if number % 2 else "even") for number, text in enumerate(TEXTS)])
    texts = read_texts(source)
    assert [texts.text(row) for row in range(len(texts))] == TEXTS
    assert [texts.names[code] for code in texts.codes] == ["even", "odd", "even", "odd", "even", "odd", "even"]
    assert [texts.where(row) for row in (0, 6)] == [f"{source.name}:1", f"{source.name}:7"]
    assert (texts.dropped, texts.has_pairs) == (0, False)


def test_columns_may_be_joined_and_paired(lines):
    source = lines(
        [
            {"title": "a", "body": "b", "answer": "c", "kind": "x"},
            {"title": None, "body": "d", "answer": None, "kind": "x"},
        ]
    )
    texts = read_texts(source, text=["title", "body"], pair="answer", label="kind")
    assert [(texts.text(row), texts.text(row, 1)) for row in (0, 1)] == [("a b", "c"), ("d", "")]
    assert texts.has_pairs
    assert read_texts(source, text="body", label="kind").text(0) == "b"
    assert read_texts(source, text=1, pair=0, label=3).text(1, 1) == ""


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "2", "1", "2"], ["1", "2", "10"]),
        ([10, 2, 1, 2], ["1", "2", "10"]),
        ([10.0, 2.5, -1.0, 2.5], ["-1", "2.5", "10"]),
        (
            ["b", "a", "B", "\N{LATIN SMALL LETTER A WITH DIAERESIS}"],
            ["B", "a", "b", "\N{LATIN SMALL LETTER A WITH DIAERESIS}"],
        ),
        (["10", "2", "x", "2"], ["10", "2", "x"]),
        ([True, False, True], ["False", "True"]),
        (["1", "1.0", "01"], ["01", "1", "1.0"]),
    ],
)
def test_labels_have_one_order(lines, labels, names):
    for name, order in (("forth.jsonl", labels), ("back.jsonl", labels[::-1])):
        texts = read_texts(lines(labelled(order), name))
        assert texts.names == names
        assert [texts.names[code] for code in texts.codes] == [
            str(int(one)) if isinstance(one, float) and one.is_integer() else str(one) for one in order
        ]


def saved(folder, labels, kind):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    datasets.Dataset.from_dict(
        {"text": [f"text {number}" for number in range(len(labels))], "label": labels}, features
    ).save_to_disk(str(folder))
    return Source(str(folder))


def test_classes_of_a_data_set_keep_their_order(tmp_path):
    import datasets

    texts = read_texts(saved(tmp_path / "one", [2, 0, 2], datasets.ClassLabel(names=["zebra", "unused", "ape"])))
    assert texts.names == ["zebra", "unused", "ape"]
    assert texts.codes.tolist() == [2, 0, 2]
    assert texts.where(1) == f"{tmp_path}/one:train, row 1"


def test_several_labels_per_text_are_zeros_and_ones(lines, tmp_path):
    import datasets

    wanted = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
    sources = {
        "lists": lines(labelled([["2"], ["10", "1"], []]), "lists.jsonl"),
        "numbers": lines(labelled([[2], [1, 10, 1], None]), "numbers.jsonl"),
        "separated": lines(labelled(["2", " 10 ,1", ""]), "separated.jsonl"),
    }
    for source in sources.values():
        texts = read_texts(source, multi_label=True)
        assert texts.names == ["1", "2", "10"]
        assert texts.codes.tolist() == wanted
    assert (
        read_texts(lines(labelled(["2", "10;1", ""]), "other.jsonl"), multi_label=True, separator=";").codes.tolist()
        == wanted
    )
    texts = read_texts(
        saved(tmp_path / "set", [[1], [0, 2], []], datasets.List(datasets.ClassLabel(names=["z", "b", "a"]))),
        multi_label=True,
    )
    assert texts.names == ["z", "b", "a"]
    assert texts.codes.tolist() == wanted


def test_texts_without_a_letter_raise_with_file_and_line(lines):
    source = lines([("a", "x"), (" \n", "x"), ("b", "y"), (None, "y")])
    with pytest.raises(DataError, match="2 empty texts in column text") as caught:
        read_texts(source)
    assert caught.value.where == f"{source.name}:2"
    assert "task.empty=drop" in caught.value.remedy


def test_texts_without_a_letter_are_left_out_where_asked(lines):
    source = lines([("", "z"), ("a", "x"), (" \n", "x"), ("b", "y"), (None, None)])
    texts = read_texts(source, empty="drop")
    assert [texts.text(row) for row in range(len(texts))] == ["a", "b"]
    assert texts.dropped == 3
    assert texts.names == ["x", "y"]  # the label of a text that is left out is none
    assert [texts.where(row) for row in (0, 1)] == [f"{source.name}:2", f"{source.name}:4"]
    with pytest.raises(DataError, match="no texts"):
        read_texts(lines([("", "x"), (" ", "y")], "blank.jsonl"), empty="drop")


def test_rows_of_a_data_set_keep_their_number_when_others_are_left_out(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["", "a", "", "b"], "label": [0, 1, 0, 1]}).save_to_disk(str(tmp_path / "set"))
    texts = read_texts(Source(f"{tmp_path}/set"), empty="drop")
    assert [texts.where(row) for row in (0, 1)] == [f"{tmp_path}/set:train, row 1", f"{tmp_path}/set:train, row 3"]


def test_a_pair_is_empty_only_where_both_texts_are(lines):
    rows = [{"text": "a", "text_pair": "", "label": 1}, {"text": "", "text_pair": "b", "label": 1}]
    assert len(read_texts(lines(rows))) == 2
    with pytest.raises(DataError, match="1 empty text "):
        read_texts(lines([*rows, {"text": "", "text_pair": " ", "label": 1}], "b.jsonl"))


@pytest.mark.parametrize(
    ("labels", "options", "what", "remedy"),
    [
        (["a", None], {}, "no label in column 'label': None", "fill in the label"),
        (["a", ""], {}, "no label in column 'label': ''", "fill in the label"),
        (["a", ["b"]], {}, "the label is a list", "task.multi_label=true"),
        (["a", "['x', 'y']"], {}, "the label is a list as text: \"['x', 'y']\"", "task.multi_label=true"),
        (["a", "['x' 'y']"], {}, "the label is a list as text", "task.multi_label=true"),
        (["a", 3], {"multi_label": True}, "the labels are 3", "text with ',' between labels"),
    ],
)
def test_a_label_that_cannot_be_used_raises_with_file_and_line(lines, labels, options, what, remedy):
    source = lines([("", "dropped"), *labelled(labels)])
    with pytest.raises(DataError) as caught:
        read_texts(source, empty="drop", **options)
    assert caught.value.where == f"{source.name}:3"
    assert what in caught.value.what
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("['x', 'y']", ["x", "y"]),
        ("['x' 'y']", ["x", "y"]),
        ("['x'\n \"it's\"]", ["it's", "x"]),
        ('["x", "null"]', ["null", "x"]),
        ("('x',)", ["x"]),
        ("{'y', 'x'}", ["x", "y"]),
        ("[1, 2]", ["1", "2"]),
        ("[x, y]", ["x", "y"]),
        ("[]", []),
        ("x, y", ["x", "y"]),
    ],
)
def test_a_list_that_was_written_as_text_is_a_list(lines, label, names):
    texts = read_texts(lines(labelled([label, "z"])), multi_label=True)
    assert texts.names == sorted([*names, "z"])
    assert texts.codes.sum(axis=1).tolist() == [len(names), 1]
    noted = any("lists that were written as text" in note for note in texts.notes)
    assert noted == (label not in ("[x, y]", "[]", "x, y"))


def test_fields_of_a_csv_without_a_value_are_no_labels_and_no_texts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x\nb,None\nc,nan\nd,y\n")
    with pytest.raises(DataError, match="no label in column 'label': None; 2 of 4 rows have none") as caught:
        read_texts(Source(str(path)))
    assert caught.value.where == f"{path}:3"
    assert "task.missing=[]" in caught.value.remedy
    texts = read_texts(Source(str(path), missing=()))
    assert texts.names == ["None", "nan", "x", "y"]
    path.write_text("text,label\na,x\nNA,y\n")
    with pytest.raises(DataError, match="1 empty text") as caught:
        read_texts(Source(str(path)))
    assert "task.missing=[]" in caught.value.remedy
    texts = read_texts(Source(str(path)), empty="drop")
    assert (len(texts), texts.notes) == (
        1,
        ["read as missing: column 'text': 'NA' (1 times); task.missing=[] keeps them as values"],
    )
    path = tmp_path / "a.jsonl"  # JSON has null
    path.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "None"}\n')
    assert read_texts(Source(str(path))).names == ["None", "x"]


def test_a_class_that_is_not_known_is_no_label(tmp_path):
    import datasets

    with pytest.raises(DataError, match="no label in column 'label': -1") as caught:
        read_texts(saved(tmp_path / "set", [1, -1], datasets.ClassLabel(names=["a", "b"])))
    assert caught.value.where == f"{tmp_path}/set:train, row 1"


def test_a_column_that_holds_no_text_is_an_error(lines):
    source = lines([("a", "x"), (3, "x")])
    with pytest.raises(DataError, match=r"column 'text' contains 3 \(int\), not text") as caught:
        read_texts(source)
    assert caught.value.where == f"{source.name}:2"
    assert caught.value.remedy == "set task.columns.text to one of: text, label"


def test_labels_are_counted(lines):
    texts = read_texts(lines(labelled(["b", "a", "b"])))
    assert count_labels(texts.names, texts.codes) == {"a": 1, "b": 2}
    assert count_labels(["a", "b", "c"], np.array([1, 1, -1])) == {"a": 0, "b": 2, "c": 0}
    several = read_texts(lines(labelled([["b"], ["a", "b"], []]), "several.jsonl"), multi_label=True)
    assert count_labels(several.names, several.codes) == {"a": 1, "b": 2}


# ---- labels of training in evaluation


def test_labels_become_places_among_those_of_training(lines):
    texts = read_texts(lines(labelled(["b", "c", "b"])))
    assert match_labels(texts, ["c", "a", "b"]).tolist() == [2, 0, 2]
    several = read_texts(lines(labelled([["b"], ["c", "b"], []]), "several.jsonl"), multi_label=True)
    assert match_labels(several, ["c", "a", "b"]).tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("several", [False, True])
def test_the_first_text_with_a_label_unknown_to_training_is_named(lines, several):
    labels = ["b", "c", "new", "a", "new", "old"]
    source = lines([("", "x"), *labelled([["b", one] for one in labels] if several else labels)])
    texts = read_texts(source, multi_label=several, empty="drop")
    with pytest.raises(DataError) as caught:
        match_labels(texts, ["a", "b", "c"])
    assert caught.value.what == "label 'new' does not occur in the training data, and 1 other"
    assert caught.value.where == f"{source.name}:4"
    assert "the 3 labels are: a, b, c;" in caught.value.remedy
    with pytest.raises(DataError) as caught:
        match_labels(texts, ["a", "b", "c", "new"])
    assert caught.value.what == "label 'old' does not occur in the training data"


def test_classes_that_no_text_has_need_not_be_known(tmp_path):
    import datasets

    names = ["zebra", "unused", "ape"]
    texts = read_texts(saved(tmp_path / "one", [2, 0], datasets.ClassLabel(names=names)))
    assert match_labels(texts, ["ape", "zebra"]).tolist() == [0, 1]
    several = read_texts(
        saved(tmp_path / "two", [[2], [0, 2]], datasets.List(datasets.ClassLabel(names=names))), multi_label=True
    )
    assert match_labels(several, ["ape", "zebra"]).tolist() == [[1, 0], [1, 1]]


# ---- once per machine


def test_an_unchanged_source_is_read_once_and_a_changed_one_anew(lines, monkeypatch):
    source = lines([("a", "x"), ("b", "y")])
    calls = counted(monkeypatch, Source, "read")
    first = read_texts(source)
    os.utime(source.name, (0, 0))
    assert read_texts(source).folder == first.folder
    assert len(calls) == 1
    lines([("a", "x"), ("c", "y")])
    assert read_texts(source).text(1) == "c"
    assert len(calls) == 2
    assert first.text(1) == "b"


@pytest.mark.parametrize(
    "options",
    [
        {"text": "text"},
        {"pair": "text"},
        {"label": "text"},
        {"multi_label": True},
        {"empty": "drop"},
        {"separator": ";"},
    ],
)
def test_other_settings_read_anew(lines, options):
    source = lines([{"text": "a,b", "label": "x", "other": "z"}])
    assert (
        read_texts(source, text="other", label="label").folder
        != read_texts(source, **{"text": "other", "label": "label", **options}).folder
    )


def test_what_raises_is_not_kept(lines, cache):
    source = lines([("a", "x"), ("", "y")])
    with pytest.raises(DataError):
        read_texts(source)
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []
    assert len(read_texts(source, empty="drop")) == 1


def test_tokens_are_made_once_for_each_text_tokenizer_and_length(lines, tokenizer):
    texts, others = read_texts(lines(labelled("ab"))), read_texts(lines(labelled("abc"), "b.jsonl"))
    counting = Counting(tokenizer)
    tokenise(texts, counting, digest="digest", max_length=32)
    tokenise(texts, counting, digest="digest", max_length=32)
    assert counting.calls == [2]
    for arguments in (
        (others, counting, "digest", 32),
        (texts, counting, "another", 32),
        (texts, counting, "digest", 31),
    ):
        before = len(counting.calls)
        tokenise(arguments[0], counting, digest=arguments[2], max_length=arguments[3])
        assert len(counting.calls) == before + 1


# ---- tokens


@pytest.mark.parametrize("block", [3, 4096])
@pytest.mark.parametrize("longest", [5, 9, 64])
def test_tokens_are_those_of_each_text_alone(lines, tokenizer, monkeypatch, block, longest):
    monkeypatch.setattr(module, "_BLOCK", block)
    texts = read_texts(lines([(text, "x") for text in TEXTS]))
    tokens = tokenise(texts, tokenizer, digest="digest", max_length=longest)
    data = TextData(texts, tokens, labels=texts.codes)
    alone = [tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in TEXTS]
    assert [sample.ids.tolist() for sample in data] == alone
    assert tokens.lengths.tolist() == [len(one) for one in alone]
    assert all(sample.types is None for sample in data)
    whole = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert tokens.truncated == sum(length > longest for length in whole)
    assert tokens.dropped == sum(max(0, length - longest) for length in whole)


def test_truncated_texts_are_counted_by_hand(lines, tokenizer):
    """One token per word here, and two special ones."""
    texts = read_texts(lines([("the cat sat on", "x"), ("the cat sat", "x"), ("the cat sat on the mat", "x")]))
    tokens = tokenise(texts, tokenizer, digest="digest", max_length=5)
    assert (tokens.truncated, tokens.dropped) == (2, 1 + 3)
    assert tokens.lengths.tolist() == [5, 5, 5]


@pytest.mark.parametrize("longest", [7, 64])
def test_pairs_have_types_of_tokens(lines, tokenizer, longest):
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    texts = read_texts(lines([{"text": one, "text_pair": other, "label": "x"} for one, other in pairs]))
    tokens = tokenise(texts, tokenizer, digest="digest", max_length=longest)
    alone = [tokenizer(*pair, truncation=True, max_length=longest) for pair in pairs]
    data = TextData(texts, tokens, labels=texts.codes)
    assert [sample.ids.tolist() for sample in data] == [one["input_ids"] for one in alone]
    assert [sample.types.tolist() for sample in data] == [one["token_type_ids"] for one in alone]
    assert {1} < {kind for sample in data for kind in sample.types.tolist()}
    assert [(sample.text, sample.pair) for sample in data] == pairs
    whole = [len(tokenizer(*pair)["input_ids"]) for pair in pairs]
    assert tokens.truncated == sum(length > longest for length in whole)
    assert tokens.dropped == sum(max(0, length - longest) for length in whole)


def test_data_of_some_rows_are_those_rows(lines, tokenizer):
    source = lines([("", "x"), *((text, "ab"[number % 2]) for number, text in enumerate(TEXTS))])
    texts = read_texts(source, empty="drop")
    tokens = tokenise(texts, tokenizer, digest="digest", max_length=64)
    data = TextData(texts, tokens, labels=texts.codes, rows=np.array([5, 0, 3]))
    assert len(data) == len(data.lengths) == 3
    assert [sample.text for sample in data] == [TEXTS[5], TEXTS[0], TEXTS[3]]
    assert [sample.label for sample in data] == [1, 0, 1]
    assert [type(sample.label) for sample in data] == [int] * 3
    assert labels_of(data).tolist() == [1, 0, 1]
    assert [len(sample.ids) for sample in data] == data.lengths.tolist() == tokens.lengths[[5, 0, 3]].tolist()
    assert data.where(0) == f"{source.name}:7"
    everything = TextData(texts, tokens, labels=texts.codes)
    assert labels_of(everything).tolist() == [sample.label for sample in everything]
    assert len(everything) == len(everything.lengths) == 7
    assert everything.where(0) == f"{source.name}:2"


def test_samples_of_several_labels_carry_them_all(lines, tokenizer):
    texts = read_texts(lines(labelled([["b"], ["a", "b"]])), multi_label=True)
    data = TextData(texts, tokenise(texts, tokenizer, digest="digest", max_length=64), labels=texts.codes)
    assert [sample.label.tolist() for sample in data] == [[0, 1], [1, 1]]
    with pytest.raises(UsageError, match=r"data\.balance: `sample_labels` of TextData has the shape \(2, 2\)"):
        labels_of(data)


def test_a_loader_worker_gets_the_place_of_the_texts_and_not_the_texts(lines, tokenizer):
    many = [(f"{text} {number}", "ab"[number % 2]) for number in range(100) for text in TEXTS]
    texts = read_texts(lines(many))
    tokens = tokenise(texts, tokenizer, digest="digest", max_length=64)
    data = TextData(texts, tokens, labels=texts.codes, rows=np.arange(1, len(many), 70))
    assert len(pickle.dumps(texts)) < 1000
    assert len(pickle.dumps(tokens)) < 1000
    again = pickle.loads(pickle.dumps(data))
    assert [sample.text for sample in again] == [many[row][0] for row in data.rows]
    assert [sample.ids.tolist() for sample in again] == [sample.ids.tolist() for sample in data]
    assert [sample.label for sample in again] == [sample.label for sample in data]
    assert again.lengths.tolist() == data.lengths.tolist()
    assert again.where(3) == data.where(3)
    assert (again.tokens.truncated, again.texts.names) == (tokens.truncated, ["a", "b"])


# ---- texts to label


def test_texts_to_label_need_no_labels(lines, tmp_path):
    source = lines([{"text": "a", "id": 1}, {"text": "", "id": 2}])
    assert read_input_texts(source, TextColumnsOptions(label="label")) == [
        InputText(f"{source.name}:1", "a", None),
        InputText(f"{source.name}:2", "", None),
    ]
    source = lines([{"text": "a", "text_pair": "b", "label": "x"}, {"text": "c", "text_pair": None, "label": "x"}])
    assert read_input_texts(source, TextColumnsOptions()) == [
        InputText(f"{source.name}:1", "a", "b"),
        InputText(f"{source.name}:2", "c", ""),
    ]
    assert read_input_texts(source, TextColumnsOptions(text=["text", "label"]))[0] == InputText(
        f"{source.name}:1", "a x", None
    )
    (tmp_path / "a.txt").write_text("one\ntwo")
    assert read_input_texts(Source(f"{tmp_path}/a.txt"), TextColumnsOptions()) == [
        InputText(f"{tmp_path}/a.txt:1", "one", None),
        InputText(f"{tmp_path}/a.txt:2", "two", None),
    ]
    with pytest.raises(DataError, match="no column has a usual name for the text"):
        read_input_texts(lines([{"a": "x", "b": "y"}]), TextColumnsOptions())


@pytest.mark.parametrize("pairs", [False, True])
def test_texts_to_label_are_tokenised_as_those_of_training(lines, tokenizer, pairs):
    rows = [
        {"text": one, "text_pair": other, "label": "x"} if pairs else {"text": one, "label": "x"}
        for one, other in zip(TEXTS, TEXTS[::-1], strict=True)
    ]
    source = lines(rows)
    texts = read_texts(source)
    trained = TextData(texts, tokenise(texts, tokenizer, digest="digest", max_length=7), labels=texts.codes)
    data = InputTexts(read_input_texts(source, TextColumnsOptions()), tokenizer, 7)
    assert len(data) == len(trained)
    for found, wanted in zip(data, trained, strict=True):
        assert found.ids.tolist() == wanted.ids.tolist()
        assert (found.types is None) == (wanted.types is None) == (not pairs)
        assert found.types is None or found.types.tolist() == wanted.types.tolist()
        assert (found.text, found.pair, found.label) == (wanted.text, wanted.pair, -1)
    assert data.lengths.tolist() == trained.lengths.tolist()
    assert [data.where(row) for row in range(7)] == [trained.where(row) for row in range(7)]


def test_no_texts_to_label_are_no_samples(tokenizer):
    data = InputTexts([], tokenizer, 7)
    assert len(data) == len(data.lengths) == 0


# ---- what is held back

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80)
SEVERAL = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
FRACTION = st.floats(0.01, 0.99)
SEED = st.integers(0, 2**31)


@FIXED
@given(labels=LABELS | SEVERAL, fraction=FRACTION, seed=SEED)
def test_each_row_is_either_trained_with_or_held_back(labels, fraction, seed):
    codes = np.array(labels, dtype=np.int8)
    train, held = split(codes, fraction, seed)
    assert sorted([*train, *held]) == list(range(len(labels)))
    assert train.tolist() == sorted(train)
    assert held.tolist() == sorted(held)
    assert {labels[row] for row in train} == set(labels)  # one of a class of its own stays in training
    again = split(codes, fraction, seed)
    assert (again[0].tolist(), again[1].tolist()) == (train.tolist(), held.tolist())


@FIXED
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.45),
    seed=SEED,
    several=st.booleans(),
)
def test_of_every_class_a_number_next_to_its_share_is_held_back(sizes, fraction, seed, several):
    labels = np.repeat(np.arange(len(sizes)), sizes)[np.random.default_rng(seed).permutation(sum(sizes))]
    _, held = split(np.stack([labels & 1, labels >> 1 & 1, labels >> 2], axis=1) if several else labels, fraction, seed)
    counts = Counter(labels[held].tolist())
    assert all(abs(counts[number] - size * fraction) < 1 for number, size in enumerate(sizes))
    assert len(held) == round(sum(sizes) * fraction)


@FIXED
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9), fraction=st.floats(0.01, 0.99), seed=SEED)
def test_no_class_gives_a_whole_sample_more_than_its_share(sizes, fraction, seed):
    _, held = split(np.repeat(np.arange(len(sizes)), sizes), fraction, seed)
    counts = Counter(np.repeat(np.arange(len(sizes)), sizes)[held].tolist())
    assert all(counts[number] < size * fraction + 1 for number, size in enumerate(sizes))


def test_another_seed_holds_back_others():
    labels = np.arange(60) % 3
    parts = {tuple(split(labels, 0.3, seed)[1].tolist()) for seed in range(5)}
    assert len(parts) == 5
    assert {len(part) for part in parts} == {18}
    assert set().union(*(set(split(labels, 0.3, seed)[1].tolist()) for seed in range(40))) == set(range(60))


def test_what_is_held_back_is_the_same_on_every_machine():
    """As computed when this was written: the runs of then can be repeated."""
    assert split(np.arange(20) % 2, 0.25, 7)[1].tolist() == [0, 5, 11, 16, 18]


# ---- odd values


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('{"text": "a", "label": "p"}\n{"text": "b", "label": NaN}\n', {}, "no label in column 'label': nan"),
        ('{"text": "a", "label": "p"}\n{"text": "b", "label": "  "}\n', {}, "no label in column 'label': '  '"),
        (
            '{"text": "a", "label": ["p"]}\n{"text": "b", "label": ["p", null]}\n',
            {"multi_label": True},
            "None among the labels",
        ),
        ('{"text": "a", "label": "p"}\n{"text": "\\ud83d bad", "label": "q"}\n', {}, "half of a surrogate pair"),
    ],
    ids=["NaN", "blank", "null", "surrogate"],
)
def test_values_that_are_none_are_errors_with_their_line(tmp_path, content, options, words):
    path = tmp_path / "odd.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_texts(Source(str(path)), **options)
    assert words in caught.value.what
    assert caught.value.where == f"{path}:2"


def test_a_class_number_below_zero_is_no_class(tmp_path):
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.List(datasets.ClassLabel(names=["a", "b"]))}
    )
    datasets.Dataset.from_dict({"text": ["x", "y"], "label": [[0], [0, -1]]}, features=features).save_to_disk(
        str(tmp_path / "set")
    )
    with pytest.raises(DataError, match="-1 among the labels"):
        read_texts(Source(str(tmp_path / "set")), multi_label=True)


def test_names_that_are_no_finite_numbers_are_sorted_by_letter():
    assert sorted_names({"7", "nan", "0", "1", "2"}) == ["0", "1", "2", "7", "nan"]
    assert sorted_names({"10", "2", "-1", "2.5"}) == ["-1", "2", "2.5", "10"]


def test_lines_of_text_files_are_those_of_an_editor(tmp_path):
    (tmp_path / "a.txt").write_text("one\u2028still one\r\ntwo\x0c\n\nfour")
    found = read_input_texts(Source(str(tmp_path / "a.txt")), TextColumnsOptions())
    assert [one.text for one in found] == ["one\u2028still one", "two\x0c", "", "four"]
    assert found[3].where == f"{tmp_path}/a.txt:4"


def test_paths_that_could_be_shorter_keep_their_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    assert read_texts(Source("./a.csv")).where(1).endswith("a.csv:3")


# ---- groups


def test_groups_stay_on_one_side_of_the_split():
    rng = np.random.default_rng(0)
    groups = np.array([f"g{number}" for number in rng.integers(0, 60, 1000)])
    codes = rng.integers(0, 3, 1000)
    train, held = split_groups(codes, groups, 0.2, 0)
    assert not set(groups[train]) & set(groups[held])
    assert sorted([*train, *held]) == list(range(1000))
    assert 0.15 < len(held) / 1000 < 0.25
    assert np.bincount(codes[held]).min() > 40
    assert held.tolist() != split_groups(codes, groups, 0.2, 1)[1].tolist()
    train, held = split_groups(np.array([0, 0, 1, 1]), np.array(["a", "a", "b", "c"]), 0.5, 0)
    assert 0 in train  # the only group of a class stays in training


def test_texts_of_a_group_stay_together(lines, tmp_path):
    rows = [{"text": f"text {number}", "label": number % 2, "author": number // 4} for number in range(80)]
    task = Text(TextOptions(columns={"group": "author"}, eval_fraction=0.25), lines(rows).name)
    train, held = task._split
    assert {row // 4 for row in train} & {row // 4 for row in held} == set()
    assert len(held) == 20
    other = lines(rows[:8], "eval.jsonl").name
    task = Text(TextOptions(columns={"group": "author"}), lines(rows).name, other)
    with pytest.raises(DataError, match="2 groups are in both the training and the evaluation data: 0, 1") as caught:
        task.eval_data()
    assert caught.value.where == other
    rows[3]["author"] = None
    with pytest.raises(DataError, match="no group in column 'author'; 1 of 80 rows have none"):
        Text(TextOptions(columns={"group": "author"}), lines(rows).name).train_data()
