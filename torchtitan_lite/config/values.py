"""From what the user wrote to a value of the right type, or a reason why not.

A TOML file gives typed values, the command line gives text. Text is first read as the TOML value
it stands for (`parse_text`); from there both take the one path `convert`, so a rule about types
exists once. Nothing is guessed: 1.5 is no int, "3" is no int, true is no int. The liberties are
that an int may stand for a float, and that a choice matches whatever its case and dashes.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import sys
import typing
from collections.abc import Iterable
from typing import Any

from torchtitan_lite.config.schema import is_optional, without_none


class Refused(Exception):
    """A value that does not fit: the reason, and what would fit."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)
        self.reason = reason
        self.fix = fix


def convert(kind: Any, raw: Any) -> Any:
    """`raw`, a TOML value or None, as a value of type `kind`; raises Refused."""
    if raw is None and is_optional(kind):
        return None
    kind = without_none(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return _choice(parts, raw)
    if origin is list:
        if not isinstance(raw, list):
            raise Refused("not a list", f"give a list, such as {example(kind)}")
        return [convert(parts[0], item) for item in raw]
    if origin is dict:
        if not isinstance(raw, dict):
            raise Refused("not a table", "give a table of name = value")
        return {name: _table_value(parts[1], name, value) for name, value in raw.items()}
    if kind is Any:
        return _plain(raw)
    return _scalar(kind, raw)


def parse_text(kind: Any, text: str) -> Any:
    """The TOML value that a command-line `text` stands for, given the key's type."""
    if not _is_utf8(text):
        raise Refused("not UTF-8 text", "give it in UTF-8")
    if is_optional(kind) and text.lower() == "none":
        return None
    kind = without_none(kind)
    if typing.get_origin(kind) is list:
        return _list_of_text(kind, text)
    if typing.get_origin(kind) is dict or kind is Any:
        return literal(text)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is int and len(text) < 100 and re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def literal(text: str) -> Any:
    """A text read as a TOML value, or itself if it is none."""
    toml = load_tomllib()
    try:
        document = toml.loads(f"value = {text}")
    except ValueError:  # TOMLDecodeError is one; so is an integer of thousands of digits
        return text
    value = document["value"]
    return value if len(document) == 1 and _is_plain(value) else text


def load_tomllib() -> Any:
    """The TOML reader: the standard library's, or tomli where Python is older than 3.11."""
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def nearest(word: str, candidates: Iterable[str], *, count: int = 1) -> list[str]:
    """Up to `count` candidates that `word` may have been meant for, best first."""
    return difflib.get_close_matches(word, list(candidates), n=count, cutoff=0.6)


def one_of(options: Iterable[Any]) -> str:
    """`a, b or c`."""
    words = [str(option) for option in options]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def example(kind: Any) -> str:
    """A value of a list type as TOML."""
    (item,) = typing.get_args(kind)
    if typing.get_origin(item) is list:
        return '[["embed_tokens", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    if typing.get_origin(item) is typing.Literal:
        return f'["{typing.get_args(item)[0]}"]'
    return '["a", "b"]'


def _choice(options: tuple[Any, ...], raw: Any) -> str:
    if isinstance(raw, str):
        by_folded = {_folded(option): option for option in options}
        if _folded(raw) in by_folded:
            return str(by_folded[_folded(raw)])
        for close in nearest(_folded(raw), by_folded):
            raise Refused(
                f'"{_short(raw)}" is not one of {", ".join(options)}',
                f"did you mean {by_folded[close]}?",
            )
    raise Refused("not one of the choices", f"give {one_of(options)}")


def _scalar(kind: type, raw: Any) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        raise Refused("not a boolean", "give true or false")
    if kind is int:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        whole = isinstance(raw, float) and raw.is_integer()
        raise Refused("not an integer", f"give {int(raw)}" if whole else "give an integer")
    if kind is float:
        if isinstance(raw, int | float) and not isinstance(raw, bool) and not math.isnan(raw):
            return float(raw)
        quoted = isinstance(raw, str) and _is_number(raw)
        raise Refused("not a number", "write it without quotes" if quoted else "give a number")
    assert kind is str, f"no conversion for a field of type {kind}"
    if isinstance(raw, str):
        return raw
    raise Refused("not a text", "put it in quotes")


def _table_value(kind: Any, name: str, raw: Any) -> Any:
    if isinstance(raw, dict) and kind is float:
        raise Refused(f"{name} holds a table", "put a pattern with dots in quotes")
    try:
        return convert(kind, raw)
    except Refused as refused:
        raise Refused(f"{name}: {refused.reason}", refused.fix) from None


def _plain(raw: Any) -> Any:
    if not _is_plain(raw):
        raise Refused("a date or a time", "give a number, a text, a boolean, a list or a table")
    return raw


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, str | bool | int | float)


def _list_of_text(kind: Any, text: str) -> Any:
    # A pattern such as [ab]*.bias also begins with a bracket: only a TOML list is read as one.
    if text.startswith("["):
        value = literal(text)
        if isinstance(value, list):
            return value
    (item,) = typing.get_args(kind)
    if typing.get_origin(item) is list:
        return text
    return [part.strip() for part in text.split(",")] if text else []


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_utf8(text: str) -> bool:
    # Bytes of a command line that are not UTF-8 arrive as lone surrogates.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _short(text: str, limit: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
