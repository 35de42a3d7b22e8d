"""The formula counts what torch's own counter counts on a real Llama, to the last FLOP."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.observe.flops import flops_per_token, mfu


@dataclass
class Shape:
    vocab_size: int = 97
    hidden_size: int = 48
    intermediate_size: int = 80
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 16  # not hidden_size / num_attention_heads


def counted_flops_per_token(shape: Shape, *, batch: int, seq_len: int, tied: bool) -> float:
    """What FlopCounterMode sees in a forward and backward of transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **vars(shape), tie_word_embeddings=tied, use_cache=False, attn_implementation="sdpa"
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
    counted = counted_flops_per_token(Shape(), batch=2, seq_len=seq_len, tied=tied)
    assert counted == flops_per_token(Shape(), seq_len)


@pytest.mark.parametrize("field", list(vars(Shape())))
def test_the_formula_depends_on_every_field_as_the_counter_does(field):
    grown = replace(Shape(), **{field: getattr(Shape(), field) * 2})
    counted = counted_flops_per_token(grown, batch=1, seq_len=8, tied=False)
    assert counted == flops_per_token(grown, 8) != flops_per_token(Shape(), 8)


def test_llama_3_8b_costs_the_known_number():
    shape = Shape(128256, 4096, 14336, 32, 32, 8, 128)
    # 7.505e9 matrix parameters (8.03e9 less the embedding and the norms), and 8192 tokens.
    assert flops_per_token(shape, 8192) == 6 * 7_504_658_432 + 12 * 32 * 4096 * 8192


def test_mfu_is_a_share_of_the_peak_and_none_without_one():
    used = {"tokens_per_second_per_device": 1000.0, "flops_per_token": 2e9}
    assert mfu(**used, peak_flops=8e12) == 0.25
    assert mfu(**used, peak_flops=None) is None
