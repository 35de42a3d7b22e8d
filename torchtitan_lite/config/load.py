"""Where values come from: defaults < the TOML file of job.config_file < the command line.

    argv, file  --settings-->  Setting(name, raw, source)  --apply-->  Config
                                                           `------->  problems, one line each

Both sources become the same list of settings, applied in order, so the last one wins. A setting
that does not fit leaves its key as it was and adds one line to the problems; reading goes on, and
all lines are raised together. `failed` holds the keys that such a line may have been about, so
that the checks across sections (checks.py) stay silent about a value that was never read.

Proven in tests/config/test_load.py and test_mistakes.py.
"""

from __future__ import annotations

import copy
import os
import re
import typing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_lite.config.bounds import check_bounds
from torchtitan_lite.config.foreign import RENAMED, absent, asks_for_nothing, is_absent_table
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.schema import (
    all_keys,
    get_value,
    keys_in,
    sections,
    set_value,
    tables,
)
from torchtitan_lite.config.text import help_text, toml_value
from torchtitan_lite.config.values import (
    Refused,
    convert,
    literal,
    load_tomllib,
    nearest,
    one_of,
    parse_text,
)


class Setting(NamedTuple):
    """One value that the user gave: a TOML value, or text of the command line (`is_text`)."""

    name: str
    raw: Any
    source: str
    is_text: bool


@dataclass
class Reading:
    """A Config as far as it could be read, what could not be, and the keys that concerns."""

    config: Config = field(default_factory=Config)
    problems: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def refuse(self, setting: Setting, reason: str, fix: str) -> None:
        """Add the line about a setting that cannot be taken."""
        self.problems.append(
            problem_line(setting.name, setting.raw, setting.source, reason=reason, fix=fix)
        )


def load_config(argv: list[str]) -> Config:
    """The Config that a command line asks for.

    Raises ConfigError with one line a problem. Checks across sections, and against the world and
    the model, are not made: see checks.load_and_check.
    """
    reading = read_sources(argv)
    if reading.problems:
        raise ConfigError("\n".join(reading.problems))
    return reading.config


def help_for(argv: list[str]) -> str | None:
    """The help that a command line asks for: all of it, a section's, or None if it asks for none.

    Raises ConfigError for a section that does not exist.
    """
    for position, argument in enumerate(argv):
        flag, has_value, section = argument.partition("=")
        if flag in ("--help", "-h"):
            following = argv[position + 1 : position + 2]
            if has_value:
                return help_text(section)
            return help_text(following[0] if following and following[0][:1] != "-" else None)
        if flag.startswith("--") and flag.endswith(".help"):
            return help_text(flag[2:].removesuffix(".help"))
    return None


def read_sources(argv: list[str]) -> Reading:
    """Read the TOML file that `argv` names and `argv` itself; collect every problem."""
    reading = Reading()
    from_command_line = _command_line_settings(argv, reading)
    for setting in from_command_line:
        if setting.name == "job.config_file":
            for from_file in _file_settings(setting, reading):
                _apply(from_file, reading)
    for setting in from_command_line:
        _apply(setting, reading)
    return reading


def problem_line(name: str, value: Any, source: str, *, reason: str, fix: str) -> str:
    """The one form of a problem: key, value, where it came from, why not, what to do."""
    shown = "none" if value is None else toml_value(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{name} = {shown} (from {source}): {reason}; {fix}"


def similar_file(path: str) -> str:
    """Advice about a path that does not exist: its nearest neighbour, if one is near."""
    folder, name = os.path.split(path.rstrip("/"))
    neighbours = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = nearest(name, neighbours)
    return f"did you mean {os.path.join(folder, close[0])}?" if close else "correct the path"


def _command_line_settings(argv: list[str], reading: Reading) -> list[Setting]:
    """The settings of a command line; of a flag given twice, the last."""
    settings: dict[str, Setting] = {}
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if not _is_flag(argument):
            reading.problems.append(
                f"{toml_value(argument)} (from the command line): not an option; "
                "options are --section.key VALUE, and lists are a,b,c"
            )
            continue
        flag, has_value, text = argument.partition("=")
        value: str | None = text if has_value else None
        if not has_value and position < len(argv) and not _is_flag(argv[position]):
            value = argv[position]
            position += 1
        setting = _flag_setting(flag, value, reading)
        if setting is not None:
            settings.pop(setting.name, None)  # so that the last one also is last in order
            settings[setting.name] = setting
    return list(settings.values())


def _flag_setting(flag: str, value: str | None, reading: Reading) -> Setting | None:
    name = flag[2:].replace("-", "_")
    table, _, last = name.rpartition(".")
    positive = f"{table}.{last.removeprefix('no_')}"
    negated = name not in all_keys() and last.startswith("no_") and _is_switch(positive)
    if value is not None:
        setting = Setting(name, value, flag, is_text=True)
        if negated:
            reading.failed.add(positive)
            reading.refuse(setting, "takes no value", f"give {flag} alone, or --{positive} {value}")
            return None
        return setting
    if negated:
        return Setting(positive, False, flag, is_text=False)
    key = all_keys().get(name)
    if key is None or key.kind is bool:
        return Setting(name, True, flag, is_text=False)
    reading.failed.add(name)
    reading.problems.append(f"{name} (from {flag}): no value given; give {flag} VALUE")
    return None


def _is_flag(argument: str) -> bool:
    # A negative number is a value; so is anything else that no letter follows.
    return re.match(r"--[A-Za-z]", argument) is not None


def _is_switch(name: str) -> bool:
    key = all_keys().get(name)
    row = absent(name)
    return (key is not None and key.kind is bool) or (row is not None and False in row.neutral)


def _file_settings(config_file: Setting, reading: Reading) -> list[Setting]:
    """The settings of the TOML file that job.config_file names; none if it cannot be read."""
    path = config_file.raw
    toml = load_tomllib()
    text = ""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        document = toml.loads(text)
    except FileNotFoundError:
        reason, fix = "no such file", similar_file(path)
    except UnicodeError:
        reason, fix = "not UTF-8 text", "save it as UTF-8"
    except OSError as error:
        reason, fix = f"cannot be read ({error.strerror})", "give a readable TOML file"
    except ValueError as error:
        last = f"(at line {len(text.splitlines())}, the last)"
        reason = f"not valid TOML: {error}".replace("(at end of document)", last)
        fix = "correct the file there"
    else:
        settings: list[Setting] = []
        _flatten(document, "", path, settings)
        return settings
    reading.refuse(config_file, " ".join(reason.split()), fix)
    reading.failed.update(all_keys())
    return []


def _flatten(table: dict[str, Any], prefix: str, source: str, settings: list[Setting]) -> None:
    for name, value in table.items():
        name = prefix + name
        is_table = name in tables() or (name not in all_keys() and is_absent_table(name))
        if isinstance(value, dict) and is_table:
            _flatten(value, f"{name}.", source, settings)
        else:
            settings.append(Setting(name, value, source, is_text=False))


def _apply(setting: Setting, reading: Reading) -> None:
    """Take one setting into the Config, or add a line to the problems."""
    name = setting.name
    key = all_keys().get(name)
    table = _table_key(name) if key is None else None
    if key is None and table is None:
        _refuse_unknown(setting, reading)
        return
    target = name if key is not None else str(table)
    kind = all_keys()[target].kind
    try:
        if key is not None:
            raw = parse_text(kind, setting.raw) if setting.is_text else setting.raw
        else:
            raw = _with_entry(get_value(reading.config, target), kind, setting, target)
        value = convert(kind, raw)
        check_bounds(target, value)
    except Refused as refused:
        reading.failed.add(target)
        reading.refuse(setting, refused.reason, refused.fix)
        return
    set_value(reading.config, target, value)
    reading.config.sources[target] = setting.source
    if setting.source.startswith("--") or value != all_keys()[target].default:
        reading.config.user_set[target] = setting.source


def _table_key(name: str) -> str | None:
    """The key that is a free table and holds `name` as an entry."""
    for key in all_keys().values():
        if typing.get_origin(key.kind) is dict and name.startswith(f"{key.name}."):
            return key.name
    return None


def _with_entry(table: dict[str, Any], kind: Any, setting: Setting, key: str) -> dict[str, Any]:
    """A copy of a free table with one entry of the command line in it."""
    table = copy.deepcopy(table)
    entry = setting.name.removeprefix(f"{key}.")
    (_, value_kind) = typing.get_args(kind)
    # Names of a table of anything nest at their dots; patterns of parameter names contain dots.
    *path, last = entry.split(".") if value_kind is Any else [entry]
    inner = table
    for part in path:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise Refused(f"{part} is not a table", "name the whole entry")
    inner[last] = parse_text(value_kind, setting.raw) if setting.is_text else setting.raw
    return table


def _refuse_unknown(setting: Setting, reading: Reading) -> None:
    name = setting.name
    row = absent(name)
    if row is not None:
        if not any(asks_for_nothing(row, reading_of) for reading_of in _readings(setting)):
            reading.refuse(setting, "not in this project", row.instead)
        return
    if name in RENAMED:
        reading.failed.add(RENAMED[name])
        reading.refuse(setting, "renamed", f"use {RENAMED[name]}")
    elif name in tables():
        reading.failed.update(keys_in(name))
        reading.refuse(setting, "a section, not a key", f"write [{name}] with keys below it")
    elif isinstance(setting.raw, dict) and "." not in name:
        _refuse_section(setting, reading)
    else:
        meant = _meant(name)
        reading.failed.update(meant)
        reading.refuse(setting, "unknown key", _advice(name, meant))


def _refuse_section(setting: Setting, reading: Reading) -> None:
    close = nearest(setting.name, sections())
    if close:
        reading.failed.update(keys_in(close[0]))
        fix = f"did you mean [{close[0]}]?"
    else:
        fix = f"sections are {', '.join(sections())}"
    reading.problems.append(f"[{setting.name}] (from {setting.source}): unknown section; {fix}")


def _readings(setting: Setting) -> list[Any]:
    """What a value of a key whose type nobody declares may stand for."""
    if not setting.is_text:
        return [setting.raw]
    text = setting.raw
    none = [None] if text.lower() == "none" else []
    return [text, literal(text), literal(text.lower()), text.split(","), *none]


def _meant(name: str) -> list[str]:
    """The keys that an unknown name was most likely meant for, best first, three at most."""
    table, _, last = name.rpartition(".")
    here = {key.rpartition(".")[2]: key for key in keys_in(table)} if table else {}
    close = nearest(last, here)
    if close:
        return [here[close[0]]]
    elsewhere = [key for key in all_keys() if key.endswith(f".{last}")]
    # In a section that exists, the likeness of whole names would be that of the section alone.
    return elsewhere[:3] if elsewhere or here else nearest(name, all_keys())


def _advice(name: str, meant: list[str]) -> str:
    if meant:
        return f"did you mean {one_of(meant)}?"
    section = name.partition(".")[0]
    if section in sections():
        return f"--help {section} lists the keys of this section"
    return f"sections are {', '.join(sections())}"
