"""Rescaled rotary embeddings are transformers': frequencies, factors on attention, and logits.

Every rope_type in the tiny models of hf.py, at positions within the old context and far past it.
How config.json spells them is in test_hf_config.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hf import ours_from, some_tokens, tiny_hf_config, tiny_hf_model
from torchtitan_lite.config import ConfigError, load_config
from torchtitan_lite.generate import generate
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.families import model_config
from torchtitan_lite.models.rope import RotaryEmbedding, attention_factor, rotary_frequencies

Table = dict[str, Any]
TOLERANCE = 1e-5
CONTEXT = 16  # max_position_embeddings of the tiny models here, whose rows have 40 tokens
LINEAR: Table = {"rope_type": "linear", "factor": 4.0}
DYNAMIC: Table = {"rope_type": "dynamic", "factor": 3.0}
LLAMA3: Table = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: Table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
BETAS: Table = {**YARN, "beta_fast": 20, "beta_slow": 2.5}
MSCALES: Table = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
TABLES: list[Table] = [
    LINEAR,
    DYNAMIC,
    LLAMA3,
    YARN,
    BETAS,
    {**BETAS, "truncate": False},
    {**YARN, "attention_factor": 0.8},
    MSCALES,
    {**MSCALES, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7},  # one of the two alone says nothing of cos and sin
    {**YARN, "mscale": 0.0, "mscale_all_dim": 1.0},
    {**YARN, "factor": 1.0},
    {**YARN, "original_max_position_embeddings": 4},  # no pair turns often enough to be kept
    {**YARN, "original_max_position_embeddings": 1},  # nor so seldom as to be divided
    {**YARN, "original_max_position_embeddings": 10**9},
]


def name_of(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def theirs_of(family: str, table: Table, **changes: Any) -> Any:
    """transformers writes into the table that it is given, so it gets one of its own."""
    changes = {"max_position_embeddings": CONTEXT, **changes}
    return tiny_hf_model(family, rope_parameters={"rope_theta": 1e4, **table}, **changes)


# --- frequencies ------------------------------------------------------------------------------


def rotary_of_transformers(table: Table, **changes: Any) -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    changes = {"max_position_embeddings": CONTEXT, **changes}
    return LlamaRotaryEmbedding(tiny_hf_config("llama", rope_parameters=table, **changes))


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (128, 5e5), (4, 30.0)])
@pytest.mark.parametrize("table", TABLES, ids=name_of)
def test_frequencies_and_attention_factor_are_transformers(
    table: Table, head_dim: int, theta: float
) -> None:
    theirs = rotary_of_transformers({"rope_theta": theta, **table}, head_dim=head_dim)
    shape = {"head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": CONTEXT}
    config = ModelConfig(rope_scaling=table, **shape)
    positions = torch.arange(300)[None]
    cos, sin = theirs(torch.zeros(1), positions)
    frequencies = rotary_frequencies(config, positions).flatten()
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(table) == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert frequencies.dtype == torch.float32
    for ours, expected in zip(RotaryEmbedding(config)(positions), (cos, sin), strict=True):
        assert (ours[:, :, 0] - expected).abs().max() < 1e-4  # 300 times the angle's rounding
        assert (ours[:, :8, 0] - expected[:, :8]).abs().max() < 2e-6


def test_each_rope_type_treats_fast_and_slow_pairs_as_its_paper_says() -> None:
    """Fast pairs are kept, slow ones divided by the factor; linear divides all."""
    shape: Table = {"head_dim": 128, "max_position_embeddings": CONTEXT}
    positions = torch.arange(3 * CONTEXT)[None]
    plain = rotary_frequencies(ModelConfig(**shape), positions)
    ratios = {}
    for table in (LINEAR, DYNAMIC, LLAMA3, {**YARN, "original_max_position_embeddings": 2048}):
        config = ModelConfig(rope_scaling=table, **shape)
        ratio = (plain / rotary_frequencies(config, positions)).flatten()
        ratios[table["rope_type"]] = [ratio[0].item(), ratio[-1].item()]
    # Three times the context, so the stretch is 1 + factor * (3 - 1).
    expected = {"linear": [4, 4], "dynamic": [1, 7], "llama3": [1, 8], "yarn": [1, 4]}
    for kind, ends in expected.items():
        assert ratios[kind] == pytest.approx(ends, rel=1e-5), kind


# --- logits -----------------------------------------------------------------------------------


@torch.no_grad()
def difference(theirs: Any, ours: Decoder, positions: Tensor | None = None) -> float:
    tokens = some_tokens()
    expected = theirs(tokens, position_ids=positions, use_cache=False).logits
    assert 0.3 < expected.std() < 3, "an absolute bound means something"
    return (ours(tokens, positions) - expected).abs().max().item()


@pytest.mark.parametrize("table", [LINEAR, DYNAMIC, LLAMA3, YARN, MSCALES], ids=name_of)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3", "qwen3_moe"])
def test_logits_equal_transformers(family: str, table: Table) -> None:
    theirs = theirs_of(family, table)
    ours = ours_from(theirs)
    assert ours.config.rope_scaling == table
    assert difference(theirs, ours) < TOLERANCE
    assert difference(theirs, ours, torch.arange(400, 440)[None]) < TOLERANCE
    twin = Decoder(dataclasses.replace(ours.config, rope_scaling=None))
    twin.load_state_dict(ours.state_dict())
    assert difference(theirs, twin) > 1e-3


LATENT_TABLES: list[Table] = [
    YARN,
    MSCALES,
    {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    {**YARN, "mscale_all_dim": 0.9},  # alone it is in the softmax, and not taken out of cos and sin
    {**MSCALES, "attention_factor": 1.2},
    LINEAR,
    DYNAMIC,
]


@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("table", LATENT_TABLES, ids=name_of)
def test_logits_of_latent_attention_equal_transformers(table: Table, interleave: bool) -> None:
    theirs = theirs_of("deepseek_v3", table, rope_interleave=interleave)
    ours = ours_from(theirs)
    core = ours.get_submodule("layers.1.self_attn.core_attention")
    assert core.scale == pytest.approx(theirs.model.layers[1].self_attn.scaling, rel=1e-12)
    assert difference(theirs, ours) < TOLERANCE
    assert difference(theirs, ours, torch.arange(400, 440)[None]) < TOLERANCE


@pytest.mark.parametrize(
    ("entry", "other"),
    [
        ("factor", 5.0),
        ("original_max_position_embeddings", 512),
        ("beta_fast", 8),
        ("beta_slow", 4),
        ("truncate", False),
        ("mscale", 1.0),
        ("mscale_all_dim", 1.0),
        ("attention_factor", 1.1),
    ],
)
def test_an_entry_of_yarn_that_is_not_read_would_be_seen(entry: str, other: Any) -> None:
    table = {**MSCALES, "original_max_position_embeddings": 1000, "factor": 40.0}
    theirs = theirs_of("deepseek_v3", table, qk_rope_head_dim=16)
    ours = ours_from(theirs)
    assert difference(theirs, ours) < TOLERANCE
    wrong = Decoder(dataclasses.replace(ours.config, rope_scaling={**table, entry: other}))
    wrong.load_state_dict(ours.state_dict())
    assert difference(theirs, wrong) > 1e-4


# --- frequencies that follow the length -------------------------------------------------------


def dynamic_model() -> Decoder:
    return ours_from(theirs_of("llama", DYNAMIC))


def test_only_dynamic_follows_the_length() -> None:
    assert [t["rope_type"] for t in TABLES if ModelConfig(rope_scaling=t).rope_follows_length] == [
        "dynamic"
    ]
    assert not ModelConfig().rope_follows_length


@torch.no_grad()
@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 40])
def test_dynamic_is_transformers_at_each_length(length: int) -> None:
    theirs = theirs_of("llama", DYNAMIC)
    tokens = some_tokens(2, length)
    expected = theirs(tokens).logits
    assert (ours_from(theirs)(tokens) - expected).abs().max() < TOLERANCE
    unscaled = theirs_of("llama", {"rope_type": "default"})(tokens).logits
    assert ((unscaled - expected).abs().max() > 1e-3) == (length > CONTEXT)


@torch.no_grad()
def test_dynamic_gives_each_row_the_logits_it_has_alone() -> None:
    """However a batch is cut; longest positions differ where documents are packed."""
    ours, tokens = dynamic_model(), some_tokens(3, 40)
    restart = torch.tensor([[40], [30], [CONTEXT]])  # the longest position, and one more
    positions = torch.arange(40) % restart
    together = ours(tokens, positions)
    for row in range(3):
        alone = ours(tokens[row : row + 1], positions[row : row + 1])
        assert (together[row] - alone[0]).abs().max() < TOLERANCE
        fresh = theirs_of("llama", DYNAMIC)  # it keeps the longest length that it has seen
        mine = {"position_ids": positions[row : row + 1], "use_cache": False}
        expected = fresh(tokens[row : row + 1], **mine).logits
        # transformers keeps documents apart where positions restart; so do we.
        ours.document_mask = True
        masked = ours(tokens[row : row + 1], positions[row : row + 1])
        ours.document_mask = False
        assert (masked - expected).abs().max() < TOLERANCE


def test_dynamic_never_waits_for_the_device() -> None:
    """A tensor without numbers has none that Python could ask for."""
    config = ModelConfig(rope_scaling=DYNAMIC, max_position_embeddings=CONTEXT)
    cos, _ = RotaryEmbedding(config)(torch.zeros(2, 40, dtype=torch.int64, device="meta"))
    assert cos.shape == (2, 40, 1, config.head_dim)


@pytest.mark.parametrize("table", [DYNAMIC, YARN], ids=name_of)
def test_a_cache_chooses_the_tokens_that_are_chosen_without(table: Table) -> None:
    """The short prompt goes on so long that places of the padded batch pass the context."""
    ours = ours_from(theirs_of("llama", table))
    prompts = [some_tokens(1, 14)[0].tolist(), [5, 7]]
    texts = [generate(ours, prompts, max_new_tokens=14, cache=cache) for cache in (True, False)]
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [2, 14]
    alone = generate(ours, prompts[1:], max_new_tokens=14)
    assert texts[0][1:] == alone


# --- what is refused --------------------------------------------------------------------------


def without(table: Table, name: str) -> Table:
    return {key: value for key, value in table.items() if key != name}


REFUSED: list[tuple[Table, str]] = [
    ({"factor": 4.0}, "rope_scaling.rope_type is None; choose from 'linear', 'dynamic',"),
    ({"rope_type": "longrope", "factor": 4.0}, "rope_scaling.rope_type is 'longrope'; choose from"),
    ({"rope_type": ["yarn"]}, "rope_scaling.rope_type is ['yarn']; choose from"),
    ({"rope_type": "linear"}, "rope_scaling lacks factor; rope_type 'linear' needs"),
    ({"rope_type": "dynamic"}, "rope_scaling lacks factor; rope_type 'dynamic' needs"),
    (without(YARN, "factor"), "rope_scaling lacks factor; rope_type 'yarn' needs"),
    (
        without(YARN, "original_max_position_embeddings"),
        "rope_scaling lacks original_max_position_embeddings; rope_type 'yarn' needs",
    ),
    (
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
        "rope_scaling lacks low_freq_factor, high_freq_factor; rope_type 'llama3' needs",
    ),
    ({**LINEAR, "factor": 0.5}, "rope_scaling.factor is 0.5; it must be a number of 1 or more"),
    ({**YARN, "factor": "4"}, "rope_scaling.factor is '4'; it must be a number of 1 or more"),
    ({**YARN, "factor": True}, "rope_scaling.factor is True; it must be"),
    ({**YARN, "factor": float("nan")}, "rope_scaling.factor is nan; it must be"),
    ({**YARN, "factor": float("inf")}, "rope_scaling.factor is inf; it must be"),
    ({**DYNAMIC, "factor": None}, "rope_scaling.factor is None; it must be"),
    (
        {**LINEAR, "original_max_position_embeddings": 8},
        "rope_scaling.original_max_position_embeddings is 8; rope_type 'linear' has no such",
    ),
    (
        {**LINEAR, "beta_fast": 3},
        "rope_scaling.beta_fast is 3; rope_type 'linear' has no such, rem",
    ),
    ({**LLAMA3, "mscale": 1.0}, "rope_scaling.mscale is 1.0; rope_type 'llama3' has no such"),
    ({**YARN, "finetuned": True}, "rope_scaling.finetuned is True; rope_type 'yarn' has no such"),
    ({**YARN, "truncate": 1}, "rope_scaling.truncate is 1; it must be true or false"),
    ({**YARN, "mscale": -1}, "rope_scaling.mscale is -1; it must be a number of 0 or more"),
    (
        {**YARN, "attention_factor": 0},
        "rope_scaling.attention_factor is 0; it must be a number abo",
    ),
    ({**YARN, "beta_slow": 0}, "rope_scaling.beta_slow is 0; it must be a number above 0"),
    (
        {**YARN, "original_max_position_embeddings": 0},
        "rope_scaling.original_max_position_embeddings is 0; it must be a number above 0",
    ),
    ({**YARN, "beta_fast": 1}, "rope_scaling.beta_slow is 1; it must be below beta_fast, 1"),
    ({**YARN, "beta_slow": 40}, "rope_scaling.beta_slow is 40; it must be below beta_fast, 32"),
    (
        {**LLAMA3, "low_freq_factor": 4.0},
        "rope_scaling.low_freq_factor is 4.0; it must be below high_freq_factor, 4.0",
    ),
]


@pytest.mark.parametrize(("table", "line"), REFUSED, ids=name_of)
def test_a_bad_table_is_one_line_with_key_value_and_fix(table: Table, line: str) -> None:
    with pytest.raises(ValueError) as refused:
        ModelConfig(rope_scaling=table)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("table", "changes", "line"),
    [
        (DYNAMIC, {"head_dim": 2}, "head_dim is 2; rope_type 'dynamic' needs 4 or more"),
        (YARN, {"rope_theta": 1.0}, "rope_theta is 1.0; rope_type 'yarn' needs one above 1"),
        (LINEAR, {"learned_positions": True}, "rope_scaling is {'rope_type': 'linear', 'factor':"),
        (LINEAR, {"layer_type": "state_space"}, "rope_scaling is {'rope_type': 'linear', 'factor'"),
    ],
    ids=name_of,
)
def test_a_table_that_the_model_cannot_have_is_one_line(
    table: Table, changes: Table, line: str
) -> None:
    with pytest.raises(ValueError) as refused:
        ModelConfig(**changes, rope_scaling=table)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


# --- from a TOML file -------------------------------------------------------------------------

TOML = """
[model]
name = "llama3"
flavor = "8B"
[model.overrides.rope_scaling]
rope_type = "yarn"
factor = 4.0
original_max_position_embeddings = 8192
"""


def overridden(folder: Path, text: str, *options: str) -> ModelConfig:
    (folder / "run.toml").write_text(text)
    model = load_config([f"--job.config_file={folder / 'run.toml'}", *options]).model
    return model_config(model.name, model.flavor, model.overrides, "")


def test_a_table_of_overrides_replaces_that_of_the_flavor(tmp_path: Path) -> None:
    expected = {**YARN, "original_max_position_embeddings": 8192}
    assert overridden(tmp_path, TOML).rope_scaling == expected
    factor = "--model.overrides.rope_scaling.factor=2"
    assert overridden(tmp_path, TOML, factor).rope_scaling == {**expected, "factor": 2}


def test_a_bad_table_of_overrides_is_a_line_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        overridden(tmp_path, TOML.replace("yarn", "longrope"))
    assert str(refused.value).startswith("model.overrides: rope_scaling.rope_type is 'longrope'; ")
