"""The families of models: a name and a flavor, or a table of overrides, become a ModelConfig.

One file a family. Nothing here imports torch, so a wrong name is reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import llama

FLAVORS: dict[str, dict[str, ModelConfig]] = {**llama.FLAVORS}


def model_config(name: str, flavor: str, overrides: dict[str, Any]) -> ModelConfig:
    """The ModelConfig that `model.name`, `model.flavor` and `model.overrides` ask for.

    Raises one ConfigError with a line for each key that is wrong, naming the nearest value.
    """
    problems = []
    flavors = FLAVORS.get(name, {})
    if not flavors:
        problems.append(f"model.name = {name!r}: unknown; {_choose(name, FLAVORS)}")
    elif flavor not in flavors:
        problems.append(f"model.flavor = {flavor!r}: unknown; {_choose(flavor, flavors)}")
    fields = {field.name: str(field.type) for field in dataclasses.fields(ModelConfig)}
    for key, value in overrides.items():
        if key not in fields:
            problems.append(f"model.overrides.{key}: no such field; {_choose(key, fields)}")
        elif not _fits(value, fields[key]):
            problems.append(f"model.overrides.{key} = {value!r}: it must be {fields[key]}")
    if not problems:
        try:
            return dataclasses.replace(flavors[flavor], **overrides)
        except ValueError as error:
            problems.append(f"model.overrides: {error}")
    raise ConfigError("\n".join(problems))


def _choose(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"choose from {', '.join(known)}"


def _fits(value: Any, annotation: str) -> bool:
    """Whether a TOML value suits a field's annotation, which is a string such as "int"."""
    if annotation == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation == "bool":
        return isinstance(value, bool)
    return value is None or isinstance(value, dict)
