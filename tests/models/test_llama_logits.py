"""Our Llama is transformers' Llama: the same weights give the same logits, to 1e-5 in fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TINY = ModelConfig(
    vocab_size=99,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)


def _transformers_llama(config: ModelConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    rope = {**(config.rope_scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{
                field.name: getattr(config, field.name)
                for field in dataclasses.fields(config)
                if not field.name.startswith("rope_")
            },
            rope_parameters=rope,
        )
    ).eval()


def _ours(config: ModelConfig, theirs: Any) -> Decoder:
    """A Decoder with their weights; vocabulary rows past the end are filled with noise."""
    model = Decoder(config)
    weights = {name.removeprefix("model."): t for name, t in theirs.state_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with torch.no_grad():
            parameter[: weights[name].shape[0]] = weights[name]
            parameter[weights[name].shape[0] :] = 1e3
    return model


def _largest_difference(config: ModelConfig, tokens: Tensor, positions: Tensor | None) -> float:
    theirs = _transformers_llama(config)
    ours = _ours(config, theirs)
    with torch.no_grad():
        expected = theirs(tokens, position_ids=positions).logits
        logits = ours(tokens, positions)
    assert logits.shape == expected.shape == (*tokens.shape, config.vocab_size)
    return (logits - expected).abs().max().item()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"head_dim": 8, "rms_norm_eps": 1e-6},
    ],
    ids=["gqa", "tied", "mha", "llama3-rope", "narrow-heads"],
)
def test_logits_equal_transformers(changes: dict[str, Any]) -> None:
    tokens = torch.randint(99, (2, 200), generator=torch.Generator().manual_seed(1))
    config = dataclasses.replace(TINY, **changes)
    assert _largest_difference(config, tokens, None) < 1e-5


def test_logits_equal_far_past_the_original_context() -> None:
    """200 tokens starting at position 3000 of a model whose original context is 32."""
    tokens = torch.randint(99, (1, 200), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(3000, 3200)[None]
    config = dataclasses.replace(TINY, rope_scaling=LLAMA3_ROPE)
    assert _largest_difference(config, tokens, positions) < 1e-5


def test_ignoring_the_rope_scaling_would_be_seen() -> None:
    theirs = _transformers_llama(dataclasses.replace(TINY, rope_scaling=LLAMA3_ROPE))
    ours = _ours(TINY, theirs)
    tokens = torch.randint(99, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = Decoder(TINY)
    tokens = torch.randint(99, (2, 20))
    labels = tokens.roll(-1, 1)
    labels[0, :7] = -100
    loss, cross_entropy, _ = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(cross_entropy, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
