"""Each family is transformers': the same config.json and tensors give the same logits, to 1e-5.

Whole sequences, and packed documents, each of which must see itself only. The oracle is
transformers with position_ids that restart and no cache, for the state-space family each document
by itself. All that config.json can say is in test_hf_config.py.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hf import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    fill,
    named_weights,
    ours_from,
    saved,
    some_tokens,
    tiny_hf_model,
)
from torchtitan_lite.models.decoder import Decoder, stored_shapes
from torchtitan_lite.models.families import family_of, regions

TOLERANCE = 1e-5
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**NO_BIAS, "num_key_value_heads": 6}),
    ("llama", {"head_dim": None, "rms_norm_eps": 1e-3}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("mistral", {"rope_parameters": YARN_ROPE}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("qwen2", {"use_sliding_window": False, "head_dim": 8}),
    ("qwen2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    ("qwen3", {"max_window_layers": 0, "attention_bias": False, "rope_parameters": LLAMA3_ROPE}),
    ("starcoder2", {"use_bias": False, "sliding_window": None, "hidden_act": "gelu"}),
    ("smollm3", {**NO_BIAS, "no_rope_layers": [0, 0, 0]}),
    ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ("smollm3", {"rope_parameters": YARN_ROPE}),
    ("starcoder2", {"rope_parameters": YARN_ROPE}),
    ("gpt2", {"n_inner": None, "activation_function": "gelu", "layer_norm_epsilon": 1e-2}),
    ("mamba", {"use_bias": False, "use_conv_bias": False, "conv_kernel": 2, "expand": 3}),
    ("mamba", {"time_step_rank": "auto", "state_size": 3}),
]


def both(family: str, **changes: Any) -> tuple[Any, Decoder]:
    theirs = tiny_hf_model(family, **changes)
    return theirs, ours_from(theirs)


@torch.no_grad()
def largest_difference(
    theirs: Any, ours: Decoder, tokens: Tensor, positions: Tensor | None = None
) -> float:
    expected = theirs(tokens, position_ids=positions).logits
    logits = ours(tokens, positions)
    assert logits.shape == expected.shape == (*tokens.shape, ours.config.vocab_size)
    assert 0.3 < expected.std() < 3, (
        "of the order of one, so that an absolute bound means something"
    )
    return (logits - expected).abs().max().item()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, is_tied: bool) -> None:
    theirs, ours = both(family, tie_word_embeddings=is_tied)
    assert ours.is_tied == is_tied
    assert largest_difference(theirs, ours, some_tokens()) < TOLERANCE


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda value: str(value)[:60])
def test_logits_equal_transformers_with_other_options(family: str, changes: dict[str, Any]) -> None:
    assert largest_difference(*both(family, **changes), some_tokens()) < TOLERANCE


def test_logits_equal_far_past_the_original_context() -> None:
    """Positions from 3000 on, in a model whose original context is 32."""
    theirs, ours = both("llama", rope_parameters=LLAMA3_ROPE)
    positions = torch.arange(3000, 3040)[None]
    assert largest_difference(theirs, ours, some_tokens(batch=1), positions) < TOLERANCE


# --- packed documents -------------------------------------------------------------------------

# Shorter and longer than the window, of one token, and to the end of the row.
STARTS = [[0, 11, 12, 31, 40], [0, 1, 5, 24, 40]]


def packed_positions() -> Tensor:
    """(2, 40), restarting where a document begins."""
    rows = [[torch.arange(b - a) for a, b in pairwise(starts)] for starts in STARTS]
    return torch.stack([torch.cat(row) for row in rows])


@torch.no_grad()
def packed_logits(theirs: Any, tokens: Tensor) -> Tensor:
    if theirs.config.model_type != "mamba":
        return theirs(tokens, position_ids=packed_positions(), use_cache=False).logits
    rows = [
        torch.cat([theirs(row[None, a:b]).logits for a, b in pairwise(starts)], dim=1)
        for row, starts in zip(tokens, STARTS, strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_get_the_logits_they_have_alone(family: str) -> None:
    theirs, ours = both(family)
    tokens = some_tokens()
    expected = packed_logits(theirs, tokens)
    ours.document_mask = True
    with torch.no_grad():
        assert (ours(tokens, packed_positions()) - expected).abs().max() < TOLERANCE
        ours.document_mask = False
        assert (ours(tokens, packed_positions()) - expected).abs().max() > 1e-2, "the twin"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mamba"])
def test_the_oracle_of_packed_documents_runs_each_alone(family: str) -> None:
    theirs, tokens = tiny_hf_model(family), some_tokens()
    with torch.no_grad():
        alone = theirs(tokens[:1, 12:31]).logits
    assert (packed_logits(theirs, tokens)[:1, 12:31] - alone).abs().max() < TOLERANCE


# --- where the tensors lie --------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_regions_cover_every_number_once(family: str, is_tied: bool) -> None:
    """Of each stored tensor, and of each parameter but the padded rows of the vocabulary."""
    theirs, ours = both(family, tie_word_embeddings=is_tied)
    stored = {name: t.shape for name, t in saved(theirs).items()}
    assert ("lm_head.weight" in stored) == (not is_tied)
    uses = {name: torch.zeros(shape, dtype=torch.int) for name, shape in stored.items()}
    shapes = stored_shapes(ours.config)
    places = regions(ours.config, shapes)
    assert places.keys() == shapes.keys() == named_weights(ours).keys()
    for name, found in places.items():
        held = torch.zeros(shapes[name], dtype=torch.int)
        for region in found:
            held[region.ours] += 1
            uses[region.tensor][region.theirs] += 1
        rows = VOCAB_SIZE if name in ("embed_tokens.weight", "lm_head.weight") else None
        assert (held[:rows] == 1).all() and not held[len(held) if rows is None else rows :].any()
    assert all((count == 1).all() for count in uses.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prefix_is_on_all_tensors_but_the_head(family: str) -> None:
    theirs, ours = both(family, tie_word_embeddings=False)
    prefix = family_of(ours.config).prefix
    assert prefix == theirs.base_model_prefix + "."
    names = set(saved(theirs))
    assert {name for name in names if not name.startswith(prefix)} == {"lm_head.weight"}


def test_a_wrong_offset_in_the_fused_projection_would_be_seen() -> None:
    theirs, ours = both("gpt2")
    places = regions(ours.config, stored_shapes(ours.config))
    (region,) = places["layers.1.self_attn.k_proj.weight"]
    rows, columns = region.theirs
    moved = slice(columns.start + 1, columns.stop + 1)
    places["layers.1.self_attn.k_proj.weight"] = [region._replace(theirs=(rows, moved))]
    fill(ours, theirs.state_dict(), places)
    assert largest_difference(theirs, ours, some_tokens()) > 1e-3


def test_an_untransposed_square_weight_would_be_seen() -> None:
    theirs, ours = both("gpt2")
    places = regions(ours.config, stored_shapes(ours.config))
    (region,) = places["layers.1.self_attn.o_proj.weight"]
    places["layers.1.self_attn.o_proj.weight"] = [region._replace(transposed=False)]
    fill(ours, theirs.state_dict(), places)
    assert largest_difference(theirs, ours, some_tokens()) > 1e-3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": None}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("qwen2", {"max_window_layers": 0}),
        ("smollm3", {"no_rope_layer_interval": 3}),
        ("starcoder2", {"hidden_act": "gelu"}),
    ],
    ids=lambda value: str(value),
)
def test_an_option_that_is_not_read_would_be_seen(family: str, changes: dict[str, Any]) -> None:
    theirs, ours = both(family, **({"rope_parameters": LLAMA3_ROPE} if family == "llama" else {}))
    wrong = Decoder(dataclasses.replace(ours.config, **changes))
    wrong.load_state_dict(ours.state_dict())
    assert largest_difference(theirs, wrong, some_tokens()) > 1e-4


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    """Over the vocabulary, not over the rows that pad it, which ours_from fills with noise."""
    _, ours = both("llama")
    tokens = some_tokens()
    labels = tokens.roll(-1, 1)
    labels[0, :7] = -100
    loss, cross_entropy, _ = ours(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        ours(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(cross_entropy, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
