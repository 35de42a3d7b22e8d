"""Every shipped recipe is built at its real world size, on its first and its last rank.

The fake backend stands for the other ranks, and the parameters stay on the meta device, so 405
billion of them cost nothing. Only the data is replaced, on the command line, as a user would: the
paths in the recipes are to be filled in.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.fake_world import fake_rank
from torchtitan_lite import build
from torchtitan_lite.build import ParallelModel, build_model
from torchtitan_lite.config import Config, ConfigError, config_warnings, load_and_check
from torchtitan_lite.mesh import Degrees, build_mesh
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.families import model_of

FOLDER = Path(__file__).parents[1] / "train_configs"
RECIPES = sorted(path.name for path in FOLDER.glob("*.toml"))
LARGE = [name for name in RECIPES if not name.startswith("debug")]
FIRST_LINE = "# World size: "
WITHOUT_DATA = ["--training.dataset", "synthetic", "--validation.dataset", "synthetic"]


def world_size(name: str) -> int:
    """As the first line of a recipe states it; debug.toml runs on any number, here on one."""
    first = (FOLDER / name).read_text(encoding="utf-8").splitlines()[0]
    return int(first.removeprefix(FIRST_LINE)) if first.startswith(FIRST_LINE) else 1


def load(name: str, *more: str, world: int | None = None) -> tuple[Config, ModelConfig]:
    """What train.py makes of the recipe, all cross-checks passed."""
    argv = ["--job.config_file", str(FOLDER / name), *WITHOUT_DATA, *more]
    return load_and_check(argv, world_size=world or world_size(name), resolve_model=model_of)


def build_rank(name: str, rank: int) -> tuple[Config, ParallelModel]:
    config, model = load(name)
    degrees = Degrees.of(config)
    with fake_rank(rank, degrees.world):
        mesh = build_mesh(degrees, "cpu", rank)
        return config, build_model(config, model, mesh, torch.device("cpu"))


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters get neither storage nor values."""
    monkeypatch.setattr(Decoder, "to_empty", lambda part, **_: part)
    monkeypatch.setattr(build, "initialise", lambda part, **_: None)


def shards(parameter: DTensor) -> int:
    """Into how many pieces the placements cut a parameter."""
    cuts = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in cuts if not placement.is_replicate())


def check_sizes(config: Config, model: ParallelModel) -> None:
    """Each parameter is cut over fsdp and, unless it is a norm's, over tp; and evenly.

    Experts are cut over all ranks of a stage that are no replicas.
    """
    parallelism = config.parallelism
    with torch.device("meta"):
        whole = dict(Decoder(model.config).named_parameters())
    for name, parameter in model.named_parameters.items():
        expected = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
        if not name.endswith("norm.weight"):
            expected *= parallelism.tensor_parallel_degree
        assert parameter.shape == whole[name].shape, name
        if expected == 1 and not isinstance(parameter, DTensor):
            continue
        assert isinstance(parameter, DTensor), name
        assert shards(parameter) == expected, name
        if ".mlp.gate." not in name:  # a router may have fewer rows than there are ranks
            assert parameter.to_local().numel() * expected == whole[name].numel(), name


def test_the_recipes_that_are_promised_ship() -> None:
    dense = {"debug", "llama2_7b", "llama3_1b", "llama3_8b", "llama3_70b", "llama3_405b"}
    dense |= {"llama3_8b_128k"}
    mixtures = {"debug_moe", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_16b"}
    assert dense | mixtures <= {name.removesuffix(".toml") for name in RECIPES}


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_states_its_world_size_first_and_says_which_paths_to_replace(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text.startswith(FIRST_LINE)
    for key in ("model.hf_assets_path", "training.dataset_path", "validation.dataset_path"):
        assert f"#   {key} " in text
    assert f"train_configs/{name}" in text, "the command that starts it"


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_whose_paths_are_not_replaced_is_refused_with_each_of_them(name: str) -> None:
    argv = ["--job.config_file", str(FOLDER / name)]
    with pytest.raises(ConfigError) as refused:
        load_and_check(argv, world_size=world_size(name), resolve_model=model_of)
    lines = str(refused.value).splitlines()
    keys = {"model.hf_assets_path", "training.dataset_path", "validation.dataset_path"}
    assert len(lines) == len(keys), "nothing else is wrong with it"
    assert all(any(line.startswith(key) for line in lines) for key in keys)


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_of_a_recipe_acts(name: str) -> None:
    config, model = load(name)
    replaced = ("_path", "token_cache", "training.packing")
    warnings = [
        line for line in config_warnings(config, model) if not any(key in line for key in replaced)
    ]
    assert not warnings


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_and_each_rank_holds_its_share(
    name: str, place: str, on_meta: None
) -> None:
    rank = 0 if place == "first" else world_size(name) - 1
    config, model = build_rank(name, rank)
    check_sizes(config, model)
    names = set(model.named_parameters)
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    assert ("embed_tokens.weight" in names) == (not pipelined or place == "first")
    assert ("norm.weight" in names) == (not pipelined or place == "last")
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if not pipelined:
        assert len(layers) == model.config.num_hidden_layers
    else:
        assert model.pipeline is not None
        share = model.config.num_hidden_layers / config.parallelism.pipeline_parallel_degree
        assert share - 3 <= len(layers) <= share + 1, "near its share; less beside the head"


@pytest.mark.parametrize(
    "change", [["--parallelism.tensor_parallel_degree", "16"], ["--training.seq_len", "8190"]]
)
def test_a_recipe_with_one_wrong_number_is_refused(change: list[str]) -> None:
    with pytest.raises(ConfigError, match=change[0].removeprefix("--")):
        load("llama3_70b.toml", *change)


def test_a_recipe_in_a_world_of_another_size_is_refused_or_fits() -> None:
    with pytest.raises(ConfigError, match="128 ranks"):
        load("llama3_70b.toml", world=128)
    config, _ = load("llama3_8b.toml", world=32)
    assert config.parallelism.data_parallel_shard_degree == 32


def test_a_parameter_that_the_plan_leaves_whole_would_be_seen(
    on_meta: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: tensor parallelism asked for and not applied."""
    from torchtitan_lite.parallel import apply

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    monkeypatch.setattr(apply, "apply_tensor_parallel", nothing)
    with pytest.raises(AssertionError):
        check_sizes(*build_rank("llama3_70b.toml", 0))
