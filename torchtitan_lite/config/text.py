"""The configuration as text: the saved TOML, and the help.

`to_toml` writes every key, so that a run's config.toml says what was in force even where the
defaults of another version differ; reading it back gives an equal Config. None has no TOML: the
key is left out, and every key that may be None is None by default. The help is read from the
strings under the fields in the sources, and only when it is asked for.

Proven in tests/config/test_text.py.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from typing import Any

from torchtitan_lite.config import keys_run, keys_training
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.schema import all_keys, keys_in, sections
from torchtitan_lite.config.values import nearest, one_of

USAGE = """\
Every option. Values come from the defaults below, then from the TOML file of --job.config_file,
then from the command line, each replacing the one before:

  --section.key VALUE  or  --section.key=VALUE    dash and underscore alike
  --section.flag, --section.flag true|false, --section.no_flag
  --section.list a,b,c                            lists of lists, and tables, as TOML
  --model.overrides.NAME VALUE                    one entry of a table

--help SECTION shows one section: """


def to_toml(config: Config) -> str:
    """All keys of a Config as a TOML document that loads to an equal Config."""
    blocks: list[str] = []
    for name in sections():
        _append_table(getattr(config, name), name, blocks)
    return "\n".join(blocks)


def toml_value(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        entries = (f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {', '.join(entries)} }}" if value else "{}"
    if isinstance(value, str):
        # A JSON string is a TOML one but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value)


def help_text(section: str | None = None) -> str:
    """Key, type, default and meaning of every key, or of those of one section.

    Raises ConfigError for a section that does not exist.
    """
    if section is None:
        body = "\n\n".join(_section_help(name) for name in sections())
        return f"{USAGE}{', '.join(sections())}\n\n{body}\n"
    name = section.replace("-", "_")
    if name not in sections():
        close = nearest(name, sections())
        fix = f"did you mean {close[0]}?" if close else f"sections are {', '.join(sections())}"
        raise ConfigError(f"--help {section}: no such section; {fix}")
    return _section_help(name) + "\n"


@functools.cache
def docstrings() -> dict[str, str]:
    """The string under each field, by "Class.field", and each class's own by "Class"."""
    found: dict[str, str] = {}
    sources = inspect.getsource(keys_run), inspect.getsource(keys_training)
    for node in (node for source in sources for node in ast.parse(source).body):
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = ast.get_docstring(node) or ""
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[f"{node.name}.{field.target.id}"] = inspect.cleandoc(below.value.value)
    return found


def type_name(kind: Any) -> str:
    """A type as the help shows it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return one_of("none" if part is type(None) else type_name(part) for part in parts)
    if origin is typing.Literal:
        return "|".join(parts)
    if origin is list:
        return f"list of {type_name(parts[0])}"
    if origin is dict:
        return f"table of {type_name(parts[1])}"
    names = {str: "text", bool: "true|false", int: "int", float: "float", Any: "any value"}
    return names[kind]


def _append_table(table: Any, name: str, blocks: list[str]) -> None:
    lines, inner = [f"[{name}]"], []
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            inner.append((value, f"{name}.{field.name}"))
        elif value is not None:
            lines.append(f"{field.name} = {toml_value(value)}")
    blocks.append("\n".join(lines) + "\n")
    for value, inner_name in inner:
        _append_table(value, inner_name, blocks)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _section_help(section: str) -> str:
    meanings = docstrings()
    lines = [f"[{section}] {meanings[sections()[section].__name__]}"]
    for name in keys_in(section):
        key = all_keys()[name]
        default = "none" if key.default is None else toml_value(key.default)
        lines.append(f"  --{name}  {type_name(key.kind)} = {default}")
        meaning = meanings[f"{_owner(name)}.{name.rsplit('.', 1)[1]}"]
        lines.append(textwrap.fill(meaning, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _owner(name: str) -> str:
    table: Any = Config()
    for part in name.split(".")[:-1]:
        table = getattr(table, part)
    return type(table).__name__
