"""Keys of one command, next to those of the config: `lockstep plan digits plan.reserve=0.2`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from lockstep.core.errors import UsageError, did_you_mean

Lines = Annotated[tuple[str, ...], BeforeValidator(tuple)]
"""A key that may be given several times. Each value stays as it is written."""


class CommandKeys(BaseModel):
    """The keys of a command. Each field has a description for `--help`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


KeysT = TypeVar("KeysT", bound=CommandKeys)


def split(overrides: Sequence[str], section: str, kind: type[KeysT]) -> tuple[list[str], KeysT]:
    """The overrides of the config, and the keys of the command.

    Args:
        overrides: `key=value` on the command line.
        section: the first part of the command's keys.

    Raises:
        UsageError: there is no such key, or it has a wrong value.
    """
    rest: list[str] = []
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        first, _, key = path.partition(".")
        if first != section:
            rest.append(override)
            continue
        if key not in kind.model_fields:
            known = f"{did_you_mean(key, kind.model_fields, f'{section}.')}There are: {', '.join(kind.model_fields)}"
            raise UsageError("unknown key", where=path, remedy=known)
        if not equals:
            raise UsageError("has no value", where=path, remedy=f"write {path}=VALUE")
        values[key] = (*values.get(key, ()), text) if _is_list(kind, key) else text
    try:
        return rest, kind.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        remedy = kind.model_fields[str(fault["loc"][0])].description
        raise UsageError(
            f"{fault['input']!r}: {fault['msg']}", where=f"{section}.{fault['loc'][0]}", remedy=remedy
        ) from None


def given(section: str, keys: CommandKeys) -> list[str]:
    """The keys that the command line sets, by path."""
    return [f"{section}.{key}" for key in type(keys).model_fields if key in keys.model_fields_set]


def described(section: str, kind: type[CommandKeys]) -> Iterator[tuple[str, str]]:
    """Each key with its description, for `--help`."""
    for key, field in kind.model_fields.items():
        default = f"  [default: {field.default}]" if field.default not in (None, ()) else ""
        yield f"{section}.{key}=VALUE", f"{field.description}{default}"


def _is_list(kind: type[CommandKeys], key: str) -> bool:
    return bool(kind.model_fields[key].default == ())
