"""Families with experts are transformers': options, config.json, names on disk, auxiliary loss.

What every family keeps (logits, packed documents, each key of config.json, regions) is in
test_families.py and test_hf_config.py, these among them; a folder written from a mesh, and loaded
by transformers, in tests/test_convert.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.hf import (
    MOE_FAMILIES,
    WINDOW,
    named_weights,
    ours_from,
    saved,
    some_tokens,
    tiny_hf_config,
    tiny_hf_model,
)
from tests.models.test_families import both, largest_difference
from tests.parity.harness import Mesh, make_config
from tests.world import RankFailure, run_ranks
from torchtitan_lite.build import load_model
from torchtitan_lite.checkpoint.hugging_face import INDEX
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.checkpoint.weights import find_weights, load_weights, write_hugging_face
from torchtitan_lite.config import ConfigError, resolve
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder, stored_shapes
from torchtitan_lite.models.families import FLAVORS, config_from_hf, config_to_hf, regions
from torchtitan_lite.models.moe import Balance, Router

TOLERANCE = 1e-5
IDS: dict[str, Any] = {"dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_experts_per_tok": 1, "head_dim": None}),
    ("mixtral", {"num_experts_per_tok": 5, "sliding_window": WINDOW}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": []}),
    ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}),
    ("qwen3_moe", {"norm_topk_prob": True, "use_sliding_window": False}),
    ("qwen3_moe", {"mlp_only_layers": [], "attention_bias": False, "head_dim": 8}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": False}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 0.7}),
    ("deepseek_v3", {"n_group": 6, "topk_group": 5, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_interleave": False, "n_shared_experts": 1}),
    ("deepseek_v3", {"first_k_dense_replace": 0, "qk_nope_head_dim": 4, "v_head_dim": 20}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda value: str(value)[:70])
def test_logits_equal_transformers_with_other_options(family: str, changes: dict[str, Any]) -> None:
    assert largest_difference(*both(family, **changes), some_tokens()) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"norm_topk_prob": False}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"topk_group": 3}),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"router_scores": "softmax"}),
    ],
    ids=str,
)
def test_an_option_that_is_not_read_would_be_seen(family: str, changes: dict[str, Any]) -> None:
    theirs, ours = both(family)
    wrong = Decoder(dataclasses.replace(ours.config, **changes))
    wrong.load_state_dict(ours.state_dict())
    assert largest_difference(theirs, wrong, some_tokens()) > 1e-3


def routers(model: Decoder) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def test_a_bias_that_is_not_read_would_be_seen() -> None:
    theirs, ours = both("deepseek_v3")
    for router in routers(ours):
        assert router.e_score_correction_bias is not None
        router.e_score_correction_bias.zero_()
    assert largest_difference(theirs, ours, some_tokens()) > 1e-3


# --- on disk ----------------------------------------------------------------------------------

EXPERT = "model.layers.2.mlp.experts.4"
ON_DISK = {
    "mixtral": {
        "model.layers.2.block_sparse_moe.gate.weight": [5, 48],
        "model.layers.2.block_sparse_moe.experts.4.w1.weight": [20, 48],
        "model.layers.2.block_sparse_moe.experts.4.w2.weight": [48, 20],
        "model.layers.2.block_sparse_moe.experts.4.w3.weight": [20, 48],
    },
    "qwen2_moe": {
        "model.layers.2.mlp.gate.weight": [6, 48],
        f"{EXPERT}.gate_proj.weight": [20, 48],
        "model.layers.2.mlp.shared_expert.down_proj.weight": [48, 28],
        "model.layers.2.mlp.shared_expert_gate.weight": [1, 48],
        "model.layers.0.mlp.gate_proj.weight": [80, 48],
    },
    "qwen3_moe": {
        f"{EXPERT}.up_proj.weight": [20, 48],
        "model.layers.1.mlp.down_proj.weight": [48, 80],
    },
    "deepseek_v3": {
        "model.layers.2.mlp.gate.e_score_correction_bias": [12],
        "model.layers.2.mlp.shared_experts.gate_proj.weight": [40, 48],
        f"{EXPERT}.down_proj.weight": [48, 20],
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight": [20, 48],
    },
}


def written(model: Decoder) -> dict[str, Tensor]:
    """The tensors on disk of our model, each made of the regions that lie in it."""
    places, weights = regions(model.config, stored_shapes(model.config)), named_weights(model)
    tensors: dict[str, Tensor] = {}
    for name, found in places.items():
        for region in found:
            assert region.tensor not in tensors and not region.transposed
            block = weights[name].detach()[region.ours]
            tensors[region.tensor] = block.reshape([side.stop for side in region.theirs]).clone()
    return tensors


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_tensors_of_transformers_come_back(family: str) -> None:
    """HF -> ours -> HF: the same names, an expert a tensor, and the same numbers."""
    theirs, ours = both(family)
    expected, found = saved(theirs), written(ours)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert ON_DISK[family].items() <= {n: list(t.shape) for n, t in found.items()}.items()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_transformers_loads_what_we_write(family: str, tmp_path: Path) -> None:
    import transformers

    theirs, ours = both(family)
    content = config_to_hf(ours.config, **IDS)
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(written(ours), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert all(t.equal(theirs.state_dict()[name]) for name, t in loaded.state_dict().items())


def _export(source: Path, target: Path) -> None:
    weights = find_weights(source, key="--hf_path")
    state = named_weights(Decoder(weights.model))
    load_weights(weights, state)
    write_hugging_face(target, state, weights.model, hf_assets_path=source, dtype="bfloat16")


def test_an_export_in_half_precision_keeps_the_bias_of_balancing_in_fp32(tmp_path: Path) -> None:
    """On disk, and as transformers loads it; all else is rounded once."""
    import transformers

    theirs, (source, target) = tiny_hf_model("deepseek_v3"), (tmp_path / "in", tmp_path / "out")
    theirs.save_pretrained(source)
    run_ranks(_export, 1, source, target)
    (path,) = target.glob("*.safetensors")
    found, expected = load_file(path), saved(theirs)
    assert found.keys() == expected.keys()
    biases = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    for name, tensor in expected.items():
        rounded = tensor.bfloat16()
        assert found[name].dtype == (torch.float32 if name in biases else torch.bfloat16), name
        assert found[name].equal(tensor if name in biases else rounded), name
        assert name not in biases or not rounded.float().equal(tensor), "rounding would be seen"
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name in biases:
        assert loaded.state_dict()[name].equal(expected[name])


def _through_a_mesh(source: Path, target: Path, mesh: Mesh, degree: int) -> None:
    key = "parallelism.expert_parallel_degree"
    config = make_config(mesh, target.parent, {"training.seq_len": 16, key: degree})
    resolve(config, mesh.world)
    weights = find_weights(source, key="--hf_path")
    model, _, _ = load_model(config, weights)
    state = model_state(model.stored)
    write_hugging_face(target, state, weights.model, hf_assets_path=source, dtype="float32")


@pytest.mark.parametrize(
    ("family", "mesh", "degree"),
    [
        ("deepseek_v3", Mesh(dp_shard=4), 2),
        ("deepseek_v3", Mesh(dp_shard=2, tp=2), 4),
        ("qwen2_moe", Mesh(dp_shard=4), 2),  # three experts on two ranks: cut within
        ("mixtral", Mesh(pp=2, dp_shard=2), 2),
    ],
    ids=str,
)
def test_experts_go_into_ranks_that_share_them_and_out_again(
    family: str, mesh: Mesh, degree: int, tmp_path: Path
) -> None:
    """No rank holds all experts; the tensors come back bit for bit, each once."""
    changes = {"num_local_experts": 6} if family == "mixtral" else {}
    theirs, (source, target) = tiny_hf_model(family, **changes), (tmp_path / "in", tmp_path / "out")
    theirs.save_pretrained(source, max_shard_size="40KB")
    run_ranks(_through_a_mesh, mesh.world, source, target, mesh, degree)
    (path,) = target.glob("*.safetensors")
    found, expected = load_file(path), saved(theirs)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not found[name].equal(expected[name])] == []


def test_two_experts_in_each_others_place_would_be_seen() -> None:
    theirs, ours = both("mixtral")
    with torch.no_grad():
        down = dict(ours.named_parameters())["layers.1.mlp.experts.down_proj"]
        down.copy_(down[[1, 0, 2, 3, 4]])
    assert largest_difference(theirs, ours, some_tokens()) > 1e-3


def _load(folder: Path) -> None:
    weights = find_weights(folder, key="--hf_path")
    model = Decoder(weights.model)
    load_weights(weights, named_weights(model))


def test_the_layer_that_predicts_a_second_token_may_be_there_and_no_other(tmp_path: Path) -> None:
    theirs = tiny_hf_model("deepseek_v3", num_nextn_predict_layers=1)
    theirs.save_pretrained(tmp_path)
    tensors = saved(theirs)
    extra = {"model.layers.3.enorm.weight": torch.ones(48)}
    extra["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.ones(20, 48)
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_load, 1, tmp_path)
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(80, 48)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailure, match=r"1 not in this model \(model\.layers\.4\.mlp"):
        run_ranks(_load, 1, tmp_path)


# --- config.json ------------------------------------------------------------------------------


def full_content(family: str) -> dict[str, Any]:
    return json.loads(tiny_hf_config(family).to_json_string(use_diff=False))


def read(folder: Path, content: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return config_from_hf(folder, key="--hf_path")


LONGROPE = {"rope_type": "longrope", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: only 0.0"),
        ("mixtral", {"num_experts": 4}, "num_experts and num_local_experts: one of the two"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, and there are 5"),
        ("mixtral", {"moe_intermediate_size": 20}, "moe_intermediate_size = 20: unknown"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True: only False"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_gate is True"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "decoder_sparse_step = 1 with mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, "= [0, 2]: only the first layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1: it must be list"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts = 1: unknown"),
        ("deepseek_v3", {"rope_scaling": LONGROPE, "rope_parameters": None}, "'longrope'"),
        ("deepseek_v3", {"rope_parameters": {**LONGROPE, "rope_theta": 1e4}}, "'longrope'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax': only 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy': only 'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: only 1"),
        ("deepseek_v3", {"auto_map": {"AutoModel": "other.Model"}}, "auto_map = {"),
        ("deepseek_v3", {"num_key_value_heads": 3}, "num_key_value_heads = 3: it must be 6"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim = 16: it must be 6"),
        ("deepseek_v3", {"qk_head_dim": 6}, "qk_head_dim = 6: it must be 16"),
        ("deepseek_v3", {"qk_head_dim": "16"}, "qk_head_dim = '16': it must be int | None"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts = 0: it must be 1 or more"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"n_group": 5}, "n_group 5 must divide num_experts 12"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5 be at most n_group"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "raise topk_group"),
        ("deepseek_v3", {"quantization_config": {"fmt": "e4m3"}}, "quantization_config = {"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_computed_is_one_line_that_names_it(
    family: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, {**full_content(family), **keys})
    (line,) = str(refused.value).splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("step", "only", "num_dense"),
    [(1, [], 0), (1, None, 0), (1, [0], 1), (1, [1, 0], 2), (3, [], 2), (3, [0], 2), (4, [], 3)],
)
def test_two_ways_to_say_that_the_first_layers_are_dense(
    step: int, only: list[int] | None, num_dense: int, tmp_path: Path
) -> None:
    changes = {"decoder_sparse_step": step, "mlp_only_layers": only}
    config = read(tmp_path, {**full_content("qwen3_moe"), **changes})
    assert config.first_k_dense_replace == num_dense
    content = config_to_hf(config, **IDS)
    assert content["mlp_only_layers"] == list(range(num_dense))


@pytest.mark.parametrize(
    ("family", "other", "ours"),
    [
        ("mixtral", "num_experts", "num_local_experts"),
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("deepseek_v3", "num_local_experts", "n_routed_experts"),
    ],
)
def test_the_number_of_experts_has_two_spellings(
    family: str, other: str, ours: str, tmp_path: Path
) -> None:
    import transformers

    number = getattr(tiny_hf_config(family), ours)
    content = {k: value for k, value in full_content(family).items() if k not in (ours, other)}
    for spelling in ({other: number}, {ours: number}, {ours: number, other: number}):
        assert read(tmp_path, {**content, **spelling}).num_experts == number
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert getattr(theirs, ours) == getattr(theirs, other) == number
    written = config_to_hf(read(tmp_path, {**content, ours: number}), **IDS)
    assert written[ours] == number and other not in written


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mixtral", {"moe_intermediate_size": 64}, "moe_intermediate_size = 64"),
        ("mixtral", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen2_moe", {"shared_expert_gate": False}, "shared_expert_gate = False"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"router_bias": True}, "router_bias = True"),
        ("deepseek_v3", {"shared_expert_intermediate_size": 200}, "= 200: a config.json"),
        ("deepseek_v3", {"shared_expert_intermediate_size": 0}, "n_shared_experts = 0"),
        ("deepseek_v3", {"router_scores": "softmax"}, "router_scores = 'softmax'"),
        ("llama3", {"num_experts": 8}, "num_experts = 8"),
        ("llama3", {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}, "kv_lora_rank = 8"),
    ],
    ids=lambda value: str(value),
)
def test_what_the_family_cannot_say_is_refused_by_name(
    name: str, changes: dict[str, Any], named: str
) -> None:
    config = dataclasses.replace(FLAVORS[name]["debugmodel"], **changes)
    with pytest.raises(ConfigError) as refused:
        config_to_hf(config, **IDS)
    assert named in str(refused.value)


# --- auxiliary loss ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("per_sequence", [True, False], ids=["per_sequence", "global"])
def test_the_auxiliary_loss_is_that_of_transformers_over_k(family: str, per_sequence: bool) -> None:
    """Where both mean the same: one layer, and one row, or the shares of this very batch.

    transformers counts choices a token, so an even load gives it k, and us one. It takes all rows
    of a micro-batch for one, where our loss is by sequence or has the shares of the last global
    batch; it pools all layers before it multiplies, where each of ours has a loss. For the family
    with a bias transformers has none.
    """
    rows = 1 if per_sequence else 2
    layer = {"num_hidden_layers": 1, "output_router_logits": True}
    if family != "mixtral":
        layer["mlp_only_layers"] = []  # type: ignore[assignment]
    theirs, tokens = tiny_hf_model(family, **layer), some_tokens(rows)
    ours = ours_from(theirs)
    (router,) = routers(ours)
    expected = theirs(tokens, labels=tokens).aux_loss
    (router_weight,) = (p for n, p in theirs.named_parameters() if n.endswith("mlp.gate.weight"))
    (expected_grad,) = torch.autograd.grad(expected, router_weight)
    router.is_counting = True
    ours(tokens)
    router.load = router.counts / router.counts.sum()
    router.losses.zero_()
    router.balance = Balance(
        auxiliary_weight=1.0, per_sequence=per_sequence, num_sequences=rows, seq_len=tokens.shape[1]
    )
    (grad,) = torch.autograd.grad(ours(tokens).sum() * 0, router.weight)
    k = ours.config.num_experts_per_tok
    torch.testing.assert_close(router.losses[0] * k, expected.detach(), rtol=1e-5, atol=0)
    assert expected_grad.abs().max() > 1e-3
    torch.testing.assert_close(grad * k, expected_grad, rtol=1e-4, atol=1e-6)
