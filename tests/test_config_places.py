"""A wrong key and a wrong value are refused by their path wherever they stand: found from the sections' own
annotations."""

from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from lockstep.configs import registry
from lockstep.configs.config_file import parse
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from tests.selection import mainly

OPTIONS = {kind: registry.options_class(kind) for kind in registry.kinds()}


def is_section(annotation):
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def places(annotation):
    """(keys, section): each place where a value may stand; the section is None where none does. A list counts by
    its first item."""
    if is_section(annotation):
        yield (), annotation
        for name, field in annotation.model_fields.items():
            for keys, section in places(field.annotation):
                yield (field.alias or name, *keys), section
        return
    yield (), None
    is_list = get_origin(annotation) is list
    for member in get_args(annotation):
        if is_list or is_section(member) or get_origin(member) is list:
            for keys, section in places(member):
                yield (0, *keys) if is_list else keys, section


PLACES = {((), *found): None for found in places(RunConfig)} | {
    ((kind,), *found): None for kind, model in OPTIONS.items() for found in places(model)
}
SECTIONS = [(kind, keys) for kind, keys, section in PLACES if section]
FREE = {"args", "sizes"}  # take anything
TABLE = ("segmentation",), ("classes",)  # a table of classes is written in several ways, which its reader checks
CONFIG = ("lm",), ("config",)  # a name, or keys of a config of transformers, which checks them
VALUES = [
    (kind, keys)
    for kind, keys, section in PLACES
    if keys and not FREE & {*keys} and (kind or keys != ("task",)) and (kind, keys) not in (TABLE, CONFIG)
]


def refusal(kind, keys, value):
    """What is said of a config in which only `value` stands, at `keys`; of a task of that kind, where one is given."""
    for key in reversed(keys):
        value = [value] if isinstance(key, int) else {key: value}
    values = {"task": {"kind": kind[0]} | value} if kind else {"task": {"kind": "toy"}} | value
    with pytest.raises(UsageError) as caught:
        parse(values, "file.yaml")
    return str(caught.value)


def path(kind, keys):
    return ".".join(map(str, ("task", *keys) if kind else keys))


def test_sections_in_lists_and_in_optional_places_are_found():
    assert {
        ((), ("optim", "groups", 0)),
        ((), ("train", "unfreeze", 0)),
        (("text",), ("columns",)),
        (("text",), ("scratch",)),
    } <= {*SECTIONS}
    assert len(VALUES) > 100


@pytest.mark.parametrize(("kind", "keys"), SECTIONS, ids=str)
def test_an_unknown_key_is_refused_by_its_path_with_those_that_are_known(kind, keys):
    text = refusal(kind, (*keys, "zzz"), 1)
    assert f"file.yaml: {path(kind, (*keys, 'zzz'))}: unknown key; known here: " in text


@pytest.mark.parametrize(("kind", "keys"), VALUES, ids=str)
@pytest.mark.parametrize("wrong", mainly(["mapping"], ["mapping", "list"]))
def test_a_value_of_another_type_is_refused_by_its_path(kind, keys, wrong):
    value = {"mapping": {"zzz": {"yyy": []}}, "list": [[{"zzz": 1}]]}[wrong]
    assert f"file.yaml: {path(kind, keys)}" in refusal(kind, keys, value)
