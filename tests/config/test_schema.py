"""The saved TOML loads to an equal Config; the help shows every key."""

from __future__ import annotations

import math
import random
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import Config, ConfigError, load_config, to_toml
from torchtitan_lite.config.load import Refused, convert
from torchtitan_lite.config.schema import (
    all_keys,
    get_value,
    help_text,
    keys_in,
    meanings,
    sections,
    set_value,
    toml_value,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AWKWARD = [
    "", " ", "plain", 'say "hi"', "back\\slash", "two\nlines", "tab\tand\rreturn", "\x00\x1f\x7f",
    "naïve 日本 🙂", "'single'", '"""', "# no comment", "[section]", "a = 1", "none",
    "true", "\u2028",
]  # fmt: skip


def _reload(config: Config, folder: Path) -> Config:
    path = folder / "config.toml"
    config.job.config_file = str(path)
    path.write_text(to_toml(config), encoding="utf-8")
    return load_config(["--job.config_file", str(path)])


def _random_value(kind: Any, draw: random.Random) -> Any:
    """Some value of a type, which its bounds may still refuse."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in parts:
        return None if draw.random() < 0.3 else _random_value(parts[0], draw)
    if origin is typing.Annotated:
        return _random_value(parts[0], draw)
    if origin is typing.Literal:
        return draw.choice(parts)
    if origin is list:
        return [_random_value(parts[0], draw) for _ in range(draw.randrange(4))]
    if origin is dict:
        return {draw.choice(AWKWARD): _random_value(parts[1], draw) for _ in range(3)}
    if kind is Any:
        deeper = [list[str], dict[str, Any]] if draw.random() < 0.3 else [int]
        return _random_value(draw.choice([int, float, str, bool, *deeper]), draw)
    if kind is bool:
        return draw.random() < 0.5
    if kind is str:
        return draw.choice([*AWKWARD, "op", "3", "op", "3"])
    if kind is int:
        return draw.choice([-1, 0, 1, 2, 3, draw.randrange(2**63)])
    return draw.choice([0.0, 1.0, 2.0, 1e-8, 1e300, 0.1 + 0.2, math.inf, draw.random()])


def _random_config(seed: int) -> Config:
    draw, config = random.Random(seed), Config()
    for name, key in all_keys().items():
        while True:
            value = _random_value(key.kind, draw)
            try:
                set_value(config, name, None if value is None else convert(key.kind, value))
            except Refused:
                continue
            break
    return config


@pytest.mark.parametrize("seed", range(20))
def test_a_saved_configuration_loads_to_an_equal_one(seed: int, tmp_path: Path) -> None:
    config = _random_config(seed)
    loaded = _reload(config, tmp_path)
    assert loaded == config
    for name in all_keys():  # == takes 1 for 1.0 and for true
        assert repr(get_value(loaded, name)) == repr(get_value(config, name))


def test_a_changed_value_is_a_changed_configuration(tmp_path: Path) -> None:
    # The twin of the round trip: a key that the writer left out would come back as its default.
    config = _random_config(0)
    loaded = _reload(config, tmp_path)
    for name in all_keys():
        before = get_value(loaded, name)
        set_value(loaded, name, object())
        assert loaded != config, f"{name} is not compared"
        set_value(loaded, name, before)


def test_every_key_is_written_but_those_that_are_none(tmp_path: Path) -> None:
    document = tomllib.loads(to_toml(Config()))
    for name, key in all_keys().items():
        table: Any = document
        *path, last = name.split(".")
        for part in path:
            table = table[part]
        assert (last in table) == (key.default is not None), name
    assert list(document) == sections()
    config = Config()
    assert _reload(config, tmp_path) == config


@pytest.mark.parametrize(
    "value",
    [*AWKWARD, 1, -1, 1.5, 1e-8, 1e22, math.inf, -math.inf, True, False, [], [["a"], []], {},
     {"a b": {"c": [1, 2.0, "x"]}, '"': 1}],
)  # fmt: skip
def test_a_value_is_one_line_of_toml_that_reads_back(value: Any) -> None:
    text = toml_value(value)
    assert "\n" not in text
    assert repr(tomllib.loads(f"x = {text}")["x"]) == repr(value)


def test_help_shows_key_type_default_and_meaning_of_every_key() -> None:
    text = help_text()
    words = " ".join(text.split())
    for name, key in all_keys().items():
        assert text.count(f"  --{name}  ") == 1, name
        meaning = meanings()[f"{key.owner.__name__}.{name.split('.')[-1]}"]
        assert f"= {toml_value(key.default)} {meaning}" in words
    for section in sections():
        assert f"[{section}] {getattr(Config(), section).__doc__}" in text
    assert "--training.seq_len  int = 2048\n      Tokens in a row." in text
    assert '--training.dtype  float32|bfloat16 = "float32"' in text
    assert "--lr_scheduler.total_steps  int or none = none" in text
    assert "--parallelism.module_fqns_per_model_part  list of list of text or none = none" in text
    assert "--optimizer.lr_multipliers  table of float = {}" in text
    assert "--checkpoint.enable  true|false = false" in text
    assert "under a pipeline 2, since 3 gathers the parameters anew" in words


def test_help_of_a_section_shows_that_section_alone() -> None:
    for section in sections():
        lines = [line for line in help_text(section).splitlines() if line.startswith("  --")]
        assert [line.split()[0].removeprefix("--") for line in lines] == keys_in(section)


def test_help_of_no_section_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--help optimiser: no such section; did you mean opt"):
        help_text("optimiser")
    with pytest.raises(ConfigError, match="no such section; sections are job, model, "):
        help_text("zzz")
