"""The keys as a flat list: dotted name, type, default, and how to read and write one.

    sections()                       {"job": Job, "model": Model, ...}
    all_keys()["training.seq_len"]   Key(name="training.seq_len", kind=int, default=2048)
    get_value(config, "training.dataloader.num_workers")

Everything that treats all keys alike (the loader, the help, the saved TOML, the warnings) walks
this list, so none of them can know a key that the dataclasses do not have.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from torchtitan_lite.config.keys import Config


@dataclasses.dataclass(frozen=True)
class Key:
    """One option: its dotted name, its type as annotated, and its default."""

    name: str
    kind: Any
    default: Any


@functools.cache
def sections() -> dict[str, type]:
    """The sections of a Config in their order, by name."""
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if _is_table(kind)}


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the dataclasses."""
    keys: list[Key] = []
    for name, kind in sections().items():
        _collect(kind, name, keys)
    return {key.name: key for key in keys}


@functools.cache
def tables() -> tuple[str, ...]:
    """Dotted names of all TOML tables: sections and the dataclasses within them."""
    names = {name.rsplit(".", 1)[0] for name in all_keys()}
    return tuple(name for name in names if name not in all_keys())


def keys_in(table: str) -> list[str]:
    """Dotted names of the keys of a table and of the tables within it."""
    return [name for name in all_keys() if name.startswith(table + ".")]


def get_value(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def set_value(config: Config, name: str, value: Any) -> None:
    """Set the value of a dotted name."""
    table, _, attribute = name.rpartition(".")
    setattr(get_value(config, table), attribute, value)


def is_optional(kind: Any) -> bool:
    """Whether a type admits None."""
    return type(None) in typing.get_args(kind)


def without_none(kind: Any) -> Any:
    """`int` of `int | None`; any other type as it is."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    return kind


def to_dict(config: Config) -> dict[str, Any]:
    """All sections as plain dictionaries, for printing as JSON."""
    tree = dataclasses.asdict(config)
    return {name: tree[name] for name in sections()}


def _is_table(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _collect(kind: type, prefix: str, keys: list[Key]) -> None:
    hints = typing.get_type_hints(kind)
    defaults = kind()
    for field in dataclasses.fields(kind):
        name = f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            _collect(hints[field.name], name, keys)
        else:
            keys.append(Key(name, hints[field.name], getattr(defaults, field.name)))
