"""The formula counts what torch's own counter counts on a real Llama, to the last FLOP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.hf import tiny_hf_model
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import FLAVORS, config_from_hf
from torchtitan_lite.observe.flops import flops_per_token

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
}
SHAPE = ModelConfig(**SIZES)


def counted_flops_per_token(shape: ModelConfig, *, batch: int, seq_len: int, tied: bool) -> float:
    """What FlopCounterMode sees in a forward and backward of transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: getattr(shape, name) for name in SIZES}
    config = LlamaConfig(
        **sizes, tie_word_embeddings=tied, use_cache=False, attn_implementation="sdpa"
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(shape.vocab_size, (batch, seq_len))
    # The math kernel is made of products that the counter knows; the CPU's flash kernel is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    return counter.get_total_flops() / (batch * seq_len)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seq_len", [8, 40])
def test_the_formula_equals_the_counter(seq_len, tied):
    counted = counted_flops_per_token(SHAPE, batch=2, seq_len=seq_len, tied=tied)
    assert counted == flops_per_token(SHAPE, seq_len)


@pytest.mark.parametrize("field", SIZES)
def test_the_formula_depends_on_every_field_as_the_counter_does(field):
    grown = replace(SHAPE, **{field: SIZES[field] * 2})
    counted = counted_flops_per_token(grown, batch=1, seq_len=8, tied=False)
    assert counted == flops_per_token(grown, 8) != flops_per_token(SHAPE, 8)


def test_llama_3_8b_costs_the_known_number():
    shape = FLAVORS["llama3"]["8B"]
    # 7.505e9 matrix parameters (8.03e9 less the embedding and the norms), and 8192 tokens.
    assert flops_per_token(shape, 8192) == 6 * 7_504_658_432 + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize("family", ["starcoder2", "gpt2"])
def test_an_mlp_without_a_gate_counts_two_products(family, tmp_path):
    window = {"sliding_window": None} if family == "starcoder2" else {}
    theirs = tiny_hf_model(family, attn_implementation="sdpa", **window)
    theirs.config.save_pretrained(tmp_path)
    config = config_from_hf(tmp_path, key="--test")
    tokens = torch.randint(config.vocab_size, (1, 8))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        theirs(tokens).logits.sum().backward()
    assert counter.get_total_flops() / 8 == flops_per_token(config, 8)


def test_a_window_shorter_than_the_sequence_counts_its_keys_alone():
    windowed = replace(SHAPE, sliding_window=10, max_window_layers=1)
    whole, cut = flops_per_token(SHAPE, 40), flops_per_token(windowed, 40)
    assert whole - cut == 2 * 12 * 8 * 16 * (40 - 10)
    assert flops_per_token(windowed, 10) == flops_per_token(SHAPE, 10)
