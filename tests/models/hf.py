"""Tiny random models of transformers, and ours with their weights: the oracle of every family.

Made offline, in fp32. Every parameter is drawn, biases and norms too, so that none is a number that
would hide a mistake; weights are so large that logits are of the order of one. Ours are read from
the folder that transformers writes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from torchtitan_lite.models.decoder import Decoder, stored_shapes
from torchtitan_lite.models.families import config_from_hf, regions
from torchtitan_lite.models.families.family import Region

VOCAB_SIZE = 99
WINDOW = 7
_ATTENTION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 256,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_EXPERTS = {**_ATTENTION, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_ATTENTION, "intermediate_size": 20, "num_local_experts": 5},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "mlp_only_layers": [0, 1],
    },
    "deepseek_v3": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 256,
        "attention_bias": True,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    },
}
# What each family has that others have not is switched on.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_ATTENTION, **_BIASES},
    "mistral": {**_ATTENTION, "sliding_window": WINDOW},
    "qwen2": {**_ATTENTION, **_WINDOW},
    "qwen3": {**_ATTENTION, **_WINDOW, "attention_bias": True},
    "starcoder2": {**_ATTENTION, "sliding_window": WINDOW},
    "smollm3": {**_ATTENTION, **_BIASES, "no_rope_layer_interval": 2},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 80, "n_positions": 256},
    "mamba": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "state_size": 6,
        "time_step_rank": 5,
        "use_bias": True,
    },
    **MOE_FAMILIES,
}


def tiny_hf_config(family: str, **changes: Any) -> Any:
    """A config of transformers: that of FAMILIES, with `changes` in their names."""
    transformers = pytest.importorskip("transformers")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    options = {"vocab_size": VOCAB_SIZE, **ids, **FAMILIES[family], **changes}
    return transformers.AutoConfig.for_model(family, **options)


def tiny_hf_model(family: str, **changes: Any) -> Any:
    """A model of transformers with random weights; `changes` as in tiny_hf_config."""
    return hf_model(tiny_hf_config(family, **changes))


def hf_model(config: Any) -> Any:
    """The model that transformers builds from its `config`, always with the same random weights."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in named_weights(model).items():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(0.1 * drawn)  # scores are about 1/2: it moves some choices
            elif name.endswith("A_log"):
                parameter.copy_(drawn.abs().log())  # a state lasts a few tokens
            elif parameter.ndim > 1:
                parameter.copy_(drawn * config.hidden_size**-0.5)
            else:
                parameter.copy_(0.3 * drawn + name.endswith((".weight", ".D")))
    return model


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """What is on disk of a model, theirs or ours: parameters, and biases of routers."""
    biases = {name: b for name, b in model.named_buffers() if name.endswith("correction_bias")}
    return {**dict(model.named_parameters()), **biases}


def saved(theirs: Any) -> dict[str, Tensor]:
    """The tensors that transformers writes, by their names on disk."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def ours_from(theirs: Any) -> Decoder:
    """Our model from the config.json that transformers saves, with the weights of `theirs`."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.config.save_pretrained(folder)
        config = config_from_hf(folder, key="--hf_path")
    model = Decoder(config)
    fill(model, saved(theirs), regions(config, stored_shapes(config)))
    return model


def fill(
    model: Decoder, stored: Mapping[str, Tensor], places: Mapping[str, Sequence[Region]]
) -> None:
    """Copy the tensors of a file into the parameters. What no region covers is seen in logits."""
    with torch.no_grad():
        for name, parameter in named_weights(model).items():
            parameter.fill_(1e3)
            for region in places[name]:
                block = stored[region.tensor][region.theirs]
                block = block.transpose(-2, -1) if region.transposed else block
                parameter[region.ours] = block.reshape(parameter[region.ours].shape)


def some_tokens(batch: int = 2, seq: int = 40) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch, seq), generator=torch.Generator().manual_seed(1))
