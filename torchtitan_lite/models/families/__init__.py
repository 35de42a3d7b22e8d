"""The families of models: a name and a flavor, or a config.json, become a ModelConfig.

    family.py        what a family consists of
    config_json.py   how a config.json is read and written by its table
    all others       a family each, or two that share their table: a screen of numbers

Nothing here imports torch, so a wrong name is reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families.config_json import read_config, read_sizes, write_config
from torchtitan_lite.models.families.deepseek import DEEPSEEK_V3
from torchtitan_lite.models.families.family import FIELDS, Family, Region, fits
from torchtitan_lite.models.families.gpt2 import GPT2
from torchtitan_lite.models.families.llama import LLAMA
from torchtitan_lite.models.families.mamba import MAMBA
from torchtitan_lite.models.families.mistral import MISTRAL
from torchtitan_lite.models.families.mixtral import MIXTRAL
from torchtitan_lite.models.families.qwen import QWEN2, QWEN3
from torchtitan_lite.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from torchtitan_lite.models.families.smollm3 import SMOLLM3
from torchtitan_lite.models.families.starcoder2 import STARCODER2

_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, STARCODER2, GPT2, MAMBA)
_ALL = (*_DENSE, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
FLAVORS = {name: flavors for family in _ALL for name, flavors in read_sizes(family).items()}
AUTO = "auto"


def model_of(config: Config) -> ModelConfig:
    """The model of a run, as `model_config` has it."""
    model = config.model
    return model_config(model.name, model.flavor, model.overrides, model.hf_assets_path)


def model_config(
    name: str, flavor: str, overrides: dict[str, Any], hf_assets_path: str
) -> ModelConfig:
    """The ModelConfig that `model.name`, `model.flavor` and `model.overrides` ask for.

    With name "auto" the config.json in `hf_assets_path` stands for name and flavor.
    Raises one ConfigError with a line for each key that is wrong, naming the nearest value.
    """
    problems = []
    flavors = FLAVORS.get(name, {})
    base = flavors.get(flavor, ModelConfig())
    if name == AUTO:
        try:
            base = config_from_hf(hf_assets_path, key=f"model.hf_assets_path = {hf_assets_path!r}")
        except ConfigError as error:
            problems.append(str(error))
    elif not flavors:
        problems.append(f"model.name = {name!r}: unknown; {_choose(name, (*FLAVORS, AUTO))}")
    elif flavor not in flavors:
        problems.append(f"model.flavor = {flavor!r}: unknown; {_choose(flavor, flavors)}")
    for key, value in overrides.items():
        if key not in FIELDS:
            problems.append(f"model.overrides.{key}: no such field; {_choose(key, FIELDS)}")
        elif not fits(value, FIELDS[key]):
            problems.append(f"model.overrides.{key} = {value!r}: it must be {FIELDS[key]}")
    if not problems:
        try:
            return dataclasses.replace(base, **overrides)
        except ValueError as error:
            problems.append(f"model.overrides: {error}")
    raise ConfigError("\n".join(problems))


def config_from_hf(folder: str | Path, *, key: str) -> ModelConfig:
    """The model that `folder`/config.json describes.

    Raises ConfigError with a line for each problem of the file; each begins with `key`.
    """
    file = Path(folder) / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = content.get("model_type") if isinstance(content, dict) else None
        if kind not in list(FAMILIES):
            raise ValueError(f"model_type {kind!r} is unknown; {_choose(str(kind), FAMILIES)}")
        return read_config(FAMILIES[kind], content)
    except OSError as error:
        problem = str(error.strerror)
    except ValueError as error:  # what is not UTF-8 or not JSON raises one, too
        problem = str(error)
    raise ConfigError("\n".join(f"{key}: {file}: {line}" for line in problem.splitlines()))


def config_to_hf(
    config: ModelConfig, *, dtype: str, bos_token_id: int | None, eos_token_id: int | None
) -> dict[str, Any]:
    """The content of a config.json from which transformers builds the very same model.

    Raises ConfigError, a line for each field that the model's family cannot have.
    """
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    return write_config(family_of(config), config, torch_dtype=dtype, **ids)


def family_of(config: ModelConfig) -> Family:
    """The family of a model; ConfigError where it has none."""
    if config.model_type not in FAMILIES:
        choice = _choose(config.model_type, FAMILIES)
        raise ConfigError(f"model_type = {config.model_type!r}: transformers has no such; {choice}")
    return FAMILIES[config.model_type]


def regions(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Region]]:
    """Parameter -> where its numbers lie on disk, by the full shapes of our parameters.

    Rows of the vocabulary past vocab_size are in no region. A parameter of experts has a region
    for each. A router's e_score_correction_bias, a buffer of ours, counts as a parameter here.
    """
    family, found = family_of(config), {}
    for name, shape in shapes.items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            shape = (config.vocab_size, *shape[1:])
        found[name] = family.regions(name, shape)
    return found


def _choose(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"choose from {', '.join(known)}"
