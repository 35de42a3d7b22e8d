"""Where values come from: defaults < the TOML file of job.config_file < the command line.

    argv, file  --settings-->  Setting(name, raw, source)  --apply-->  Config
                                                           `------->  problems, one line each

Both sources become the same list of settings, applied in order, so the last one wins. A setting
that does not fit leaves its key as it was and adds one line to the problems; reading goes on, and
all lines are raised together. A problem names the keys that it may be about, so that the checks
across sections (checks.py) stay silent about a value that was never read.

Nothing is guessed: 1.5 is no int, "3" is no int, true is no int. The liberties are that an int may
stand for a float, and that a choice matches whatever its case and dashes.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.config.foreign import foreign_row
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.schema import (
    Key,
    Problem,
    all_keys,
    get_value,
    help_text,
    keys_in,
    nearest,
    one_of,
    problem_line,
    set_value,
    to_toml,
    toml_value,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_FILE = "job.config_file"
# The mesh and what is written when: a resumed run computes the same with other values.
HARMLESS = (
    "job.",
    "parallelism.",
    "checkpoint.",
    "activation_checkpoint.",
    "metrics.",
    "profiling.",
    "comm.",
    "validation.",
    "training.steps",
    "training.local_batch_size",
    "training.dataloader.",
    "training.token_cache",
)
NOT_AN_OPTION = "not an option; options are --section.key VALUE, and lists are a,b,c"
WRONG_TYPE: dict[Any, tuple[str, str]] = {
    bool: ("not a boolean", "give true or false"),
    int: ("not an integer", "give an integer"),
    float: ("not a number", "give a number, without quotes"),
    str: ("not a text", "put it in quotes"),
    list: ("not a list", 'give a list, such as ["a", "b"]'),
    dict: ("not a table", "give a table of name = value"),
}


class Refused(Exception):
    """A value that does not fit: the reason, and what would fit."""


class Setting(NamedTuple):
    """One value that the user gave: a TOML value, or text of the command line (`is_text`)."""

    name: str
    raw: Any
    source: str
    is_text: bool = False


def load_config(argv: list[str]) -> Config:
    """The Config that a command line asks for.

    Raises ConfigError with one line a problem. Checks across sections, and against the world and
    the model, are not made: see checks.load_and_check.
    """
    config, problems = read_sources(argv)
    if problems:
        raise ConfigError("\n".join(problem.line for problem in problems))
    return config


def save_config(config: Config, path: Path, *, resumed: bool) -> list[str]:
    """Write the resolved configuration to `path`.

    Returns, for a resumed run, a line for each key whose value is another than `path` said.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    changes = changed_settings(path, config) if resumed and path.exists() else []
    path.write_text(to_toml(config), encoding="utf-8")
    return changes


def changed_settings(path: Path, config: Config) -> list[str]:
    """One line for each key whose value is another than the TOML file of an earlier run says.

    Keys that cannot change what a step computes are left out.
    """
    try:
        before = load_config([f"--{CONFIG_FILE}={path}"])
    except ConfigError as error:  # of another version
        return [f"what {path} says cannot be compared: {str(error).splitlines()[0]}"]
    return [
        f"{name} was {toml_value(old)}, is {toml_value(new)}"
        for name in all_keys()
        for old, new in [(get_value(before, name), get_value(config, name))]
        if old != new and not name.startswith(HARMLESS)
    ]


def help_for(argv: list[str]) -> str | None:
    """The help that a command line asks for: all of it, a section's, or None if it asks for none.

    Raises ConfigError for a section that does not exist.
    """
    for position, word in enumerate(argv):
        if word in ("--help", "-h"):
            following = argv[position + 1 : position + 2]
            return help_text(*(section for section in following if section[:1] != "-"))
    return None


def read_sources(argv: list[str]) -> tuple[Config, list[Problem]]:
    """What `argv` and the TOML file that it names say, as far as it can be read; what cannot."""
    config, problems = Config(), []
    given = list(_command_line(argv))
    named = [item for item in given if isinstance(item, Setting) and item.name == CONFIG_FILE]
    for item in [*(each for setting in named[-1:] for each in _file(setting)), *given]:
        problem = item if isinstance(item, Problem) else _apply(item, config)
        if problem is not None:
            problems.append(problem)
    return config, problems


def convert(kind: Any, raw: Any, *, is_text: bool = False) -> Any:
    """`raw`, a TOML value or text of the command line, as a value of `kind`; raises Refused."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in parts:
        is_none = is_text and raw.lower() == "none"
        return None if is_none else convert(parts[0], raw, is_text=is_text)
    if origin is typing.Annotated:
        value, bound = convert(parts[0], raw, is_text=is_text), parts[1]
        if not bound.holds(value):
            raise Refused("out of bounds", f"must be {bound.sentence}")
        return value
    if origin is typing.Literal:
        return _choice(parts, raw)
    if is_text and kind is not str:
        raw = _from_text(origin or kind, raw)
    if origin is list and isinstance(raw, list):
        return [convert(parts[0], item) for item in raw]
    if origin is dict and isinstance(raw, dict):
        return {name: convert(parts[1], value) for name, value in raw.items()}
    if kind is float and type(raw) in (int, float) and not math.isnan(raw):
        with contextlib.suppress(OverflowError):
            return float(raw)
    if kind is Any or (kind is not float and type(raw) is kind):
        return raw
    raise Refused(*WRONG_TYPE[origin or kind])


def _from_text(kind: Any, text: str) -> Any:
    """The TOML value that a command-line `text` stands for, given the key's type."""
    if kind is float:
        with contextlib.suppress(ValueError):
            return float(text)
    value = _literal(text.lower() if kind is bool else text)
    if kind is list and not isinstance(value, list):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def _literal(text: str) -> Any:
    """A text read as a TOML value, or itself if it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return document["value"] if len(document) == 1 else text


def _choice(options: tuple[str, ...], raw: Any) -> str:
    def fold(word: Any) -> str:
        return str(word).lower().replace("_", "-")

    by_folded = {fold(option): option for option in options}
    if fold(raw) in by_folded:
        return by_folded[fold(raw)]
    close = [by_folded[folded] for folded in nearest(fold(raw), by_folded)]
    fix = f"did you mean {close[0]}?" if close else "choose one of them"
    listed = ", ".join(option or '"" (off)' for option in options)
    raise Refused(f"not one of {listed}", fix)


def _command_line(argv: list[str]) -> Iterator[Setting | Problem]:
    """The settings of a command line, in its order."""
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, has_value, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        table, _, last = name.rpartition(".")
        switch = all_keys().get(f"{table}.{last.removeprefix('no_')}")
        if not _is_flag(word):
            yield Problem((), f"{toml_value(word)} (from the command line): {NOT_AN_OPTION}")
        elif has_value or (words and not _is_flag(words[0])):
            yield Setting(name, text if has_value else words.pop(0), flag, is_text=True)
        elif switch is not None and switch.kind is bool:
            yield Setting(switch.name, switch.name == name, flag)
        elif name in all_keys():
            yield _refusal(Setting(name, "", flag), "no value given", f"give {flag} VALUE", name)
        else:
            yield Setting(name, True, flag)


def _is_flag(word: str) -> bool:
    # A negative number is a value; so is anything else that no letter follows.
    return re.match(r"--[A-Za-z]", word) is not None


def _file(config_file: Setting) -> Iterator[Setting | Problem]:
    """The settings of the TOML file that job.config_file names; one problem if it is none."""
    try:
        with open(config_file.raw, encoding="utf-8-sig") as file:
            document = tomllib.loads(file.read())
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        yield _refusal(config_file, reason, "give a TOML file that exists", *all_keys())
    except ValueError as error:
        yield _refusal(config_file, f"not valid TOML: {error}", "correct it there", *all_keys())
    else:
        yield from _flatten(document, "", config_file.raw)


def _flatten(table: dict[str, Any], prefix: str, source: str) -> Iterator[Setting]:
    """One setting a leaf; an empty table that is no section is a leaf too."""
    for last, value in table.items():
        name = prefix + last
        if isinstance(value, dict) and (value or keys_in(name)):
            yield from _flatten(value, f"{name}.", source)
        else:
            yield Setting(name, value, source)


def _apply(setting: Setting, config: Config) -> Problem | None:
    """Take one setting into the Config, or say why not."""
    key = _key_of(setting.name)
    if key is None:
        return _unknown(setting)
    is_entry = setting.name != key.name
    kind = typing.get_args(key.kind)[1] if is_entry else key.kind
    try:
        value = convert(kind, setting.raw, is_text=setting.is_text)
    except Refused as refused:
        return _refusal(setting, *refused.args, key.name)
    if is_entry:
        entry = setting.name[len(key.name) + 1 :]
        # Names of a table of anything nest at their dots; patterns of parameter names contain dots.
        path = entry.split(".") if kind is Any else [entry]
        value = _with_entry(get_value(config, key.name), path, value)
    set_value(config, key.name, value)
    config.sources[key.name] = setting.source
    if setting.source.startswith("--") or value != key.default:
        config.user_set[key.name] = setting.source
    return None


def _key_of(name: str) -> Key | None:
    """The key of that name, or the free table that the name is an entry of."""
    tables = (key for key in all_keys().values() if typing.get_origin(key.kind) is dict)
    holding = (key for key in tables if name.startswith(f"{key.name}."))
    return all_keys().get(name) or next(holding, None)


def _with_entry(table: Any, path: list[str], value: Any) -> dict[str, Any]:
    """A copy of a table with `value` at `path`; what stands in the way is replaced."""
    (first, *rest), table = path, table if isinstance(table, dict) else {}
    return {**table, first: _with_entry(table.get(first), rest, value) if rest else value}


def _unknown(setting: Setting) -> Problem | None:
    """What to do instead of a key that does not exist, unless it asks for nothing."""
    name, raw, row = setting.name, setting.raw, foreign_row(setting.name)
    if row is not None:
        # The type that this key had is not known here, so text may stand for either.
        readings = [repr(raw), repr(_literal(raw.lower()))] if setting.is_text else [repr(raw)]
        if set(readings) & set(map(repr, row.neutral)):  # by repr, as 1 == True
            return None
        successors = [key for key in all_keys() if key in row.instead]
        return _refusal(setting, "not in this project", row.instead, *successors)
    if keys_in(name):
        fix = f"write [{name}] with keys below it"
        return _refusal(setting, "a section, not a key", fix, *keys_in(name))
    meant = _meant(name)
    fix = f"did you mean {one_of(meant)}?" if meant else "--help lists all keys"
    return _refusal(setting, "unknown key", fix, *meant)


def _meant(name: str) -> list[str]:
    """The keys that an unknown name was most likely meant for, three at most."""
    table, _, last = name.rpartition(".")
    elsewhere = [key for key in all_keys() if key.endswith(f".{last}")]
    here = {key[len(table) + 1 :]: key for key in keys_in(table)}
    # In a section that exists, the likeness of whole names would be that of the section alone.
    close = [here[key] for key in nearest(last, here)] if here else nearest(name, all_keys())
    return elsewhere[:3] or close


def _refusal(setting: Setting, reason: str, fix: str, *concerned: str) -> Problem:
    """The line about a setting that cannot be taken, and the keys it may be about."""
    return Problem(concerned, problem_line(*setting[:3], reason=reason, fix=fix))
