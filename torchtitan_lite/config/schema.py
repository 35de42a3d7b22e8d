"""The keys as a flat list, and the texts that walk it: the saved TOML and the help.

    all_keys()["training.seq_len"]    Key("training.seq_len", Annotated[int, ...], 2048, Training)
    get_value(config, "training.dataloader.num_workers")

All that treats keys alike goes through this list, so none of it can know a key that the dataclasses
do not have. `to_toml` writes every key, so that a run's config.toml says what was in force even
where the defaults of another version differ. None has no TOML: the key is left out, and every key
that may be None is None by default. Proven in tests/config/test_schema.py.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import textwrap
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchtitan_lite.config import keys, quantizing, watching
from torchtitan_lite.config.keys import Config, ConfigError

WRAP = textwrap.TextWrapper(96, " " * 6, " " * 6, break_on_hyphens=False)
USAGE = """\
Every option. Values come from the defaults below, then from the TOML file of --job.config_file,
then from the command line, each replacing the one before:

  --section.key VALUE  or  --section.key=VALUE    dash and underscore alike
  --section.flag, --section.flag true|false, --section.no_flag
  --section.list a,b,c                            lists of lists, and tables, as TOML
  --model.overrides.NAME VALUE                    one entry of a table

--help SECTION shows one section: """


class Key(NamedTuple):
    """One option: dotted name, type as annotated (bounds included), default, its dataclass."""

    name: str
    kind: Any
    default: Any
    owner: type


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the dataclasses."""
    found: dict[str, Key] = {}

    def collect(owner: type, prefix: str) -> None:
        for name, kind in typing.get_type_hints(owner, include_extras=True).items():
            if dataclasses.is_dataclass(kind):
                collect(typing.cast(type, kind), f"{prefix}{name}.")
            elif owner is not Config:
                dotted = prefix + name
                found[dotted] = Key(dotted, kind, getattr(owner(), name), owner)

    collect(Config, "")
    return found


def sections() -> list[str]:
    """The names of the sections, in their order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in all_keys()))


def keys_in(table: str) -> list[str]:
    """Dotted names of the keys of a section or a table within one; none if there is no such."""
    return [name for name in all_keys() if name.startswith(f"{table}.")]


def get_value(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def set_value(config: Config, name: str, value: Any) -> None:
    """Set the value of a dotted name."""
    table, _, attribute = name.rpartition(".")
    setattr(get_value(config, table), attribute, value)


def to_dict(config: Config) -> dict[str, Any]:
    """All sections as plain dictionaries, for printing as JSON."""
    return {name: dataclasses.asdict(getattr(config, name)) for name in sections()}


def to_toml(config: Config) -> str:
    """All keys of a Config as a TOML document that loads to an equal Config."""
    lines: list[str] = []
    for name in all_keys():
        table, _, last = name.rpartition(".")
        if f"[{table}]" not in lines:
            lines += [""] * bool(lines) + [f"[{table}]"]
        if get_value(config, name) is not None:
            lines.append(f"{last} = {toml_value(get_value(config, name))}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML on one line; None, which TOML lacks, as the command line has it."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_value(k)} = {toml_value(v)}' for k, v in value.items())}}}"
    # JSON is TOML here, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")


def problem_line(name: str, value: Any, source: str, *, reason: str, fix: str) -> str:
    """The one form of a problem: key, value, where it came from, why not, what to do."""
    shown = toml_value(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{name} = {shown} (from {source}): {' '.join(reason.split())}; {fix}"


class Problem(NamedTuple):
    """One line for the user, and the keys it is about."""

    keys: Sequence[str]
    line: str


def told(config: Config, keys: Sequence[str], reason: str, fix: str) -> Problem:
    """A problem of a value that was read, told at the first of its keys that the user set."""
    name = next((key for key in keys if key in config.user_set), keys[0])
    source = config.user_set.get(name) or config.sources.get(name) or "the defaults"
    value = get_value(config, name)
    return Problem(keys, problem_line(name, value, source, reason=reason, fix=fix))


def nearest(word: str, candidates: Iterable[str]) -> list[str]:
    """The candidate that `word` was most likely meant for, if one is near."""
    return difflib.get_close_matches(word, list(candidates), n=1)


def one_of(options: Iterable[Any]) -> str:
    """`a, b or c`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def help_text(section: str | None = None) -> str:
    """Key, type, default and meaning of every key, or of those of one section.

    Raises ConfigError for a section that does not exist.
    """
    every = sections()
    chosen = every if section is None else [section.replace("-", "_")]
    if chosen[0] not in every:
        near = "".join(f"did you mean {name}? " for name in nearest(chosen[0], every))
        fix = f"{near}sections are {', '.join(every)}"
        raise ConfigError(f"--help {section}: no such section; {fix}")
    lines = [] if section else [f"{USAGE}{', '.join(every)}"]
    for name in chosen:
        lines.append(f"\n[{name}] {getattr(Config(), name).__doc__}")
        for key in (all_keys()[dotted] for dotted in keys_in(name)):
            lines.append(f"  --{key.name}  {_type_name(key.kind)} = {toml_value(key.default)}")
            lines.append(WRAP.fill(meanings()[f"{key.owner.__name__}.{key.name.split('.')[-1]}"]))
    return "\n".join(lines).lstrip() + "\n"


@functools.cache
def meanings() -> dict[str, str]:
    """The string under each field of the files that declare keys, by "Class.field"."""
    found: dict[str, str] = {}
    bodies = [ast.parse(inspect.getsource(module)).body for module in (keys, quantizing, watching)]
    classes = [node for body in bodies for node in body if isinstance(node, ast.ClassDef)]
    for node in classes:
        for declared, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(declared, ast.AnnAssign) and isinstance(below, ast.Expr):
                name = f"{node.name}.{ast.unparse(declared.target)}"
                found[name] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def _type_name(kind: Any) -> str:
    """A type as the help shows it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin is typing.Literal:
        return "|".join(parts)
    if origin in (list, dict):
        return f"{'list' if origin is list else 'table'} of {_type_name(parts[-1])}"
    if type(None) in parts:
        return f"{_type_name(parts[0])} or none"
    return {str: "text", bool: "true|false", int: "int", float: "float", Any: "any value"}[kind]
