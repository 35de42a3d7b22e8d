"""Generated tokens: those of transformers, those without the cache, and each row's own.

The models are tiny and random, with logits so far apart that greedy decoding wanders through the
vocabulary. All is fp32 and seeded, so nothing here is a matter of chance.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.models.hf import FAMILIES, WINDOW, ours_from, tiny_hf_model
from tests.world import run_ranks
from torchtitan_lite import generate as room
from torchtitan_lite.build import build_model, initialise
from torchtitan_lite.config import Config, ConfigError, resolve
from torchtitan_lite.generate import draw, generate, warp
from torchtitan_lite.mesh import Degrees, build_mesh
from torchtitan_lite.models.attention import RowMask
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder

SEED = 5
CPU = torch.device("cpu")
TINY = ModelConfig(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "window": {"sliding_window": 5},
    "window in some layers": {"sliding_window": 5, "max_window_layers": 2},
    "rotates in some layers": {"no_rope_layer_interval": 2},
    "learned positions": {"learned_positions": True, "norm_type": "layer", "gated_mlp": False},
    "norm of q and k, biases": {"qk_norm": True, "attention_bias": True, "mlp_bias": True},
    "state space": {"layer_type": "state_space", "time_step_rank": 4},
}
LENGTHS = (9, 3, 17, 1)  # of the prompts; 9 and 17 are longer than every window here, 1 and 3 not
NEW_TOKENS = 20
TOLERANCE = 1e-4  # of logits of the order of ten, in fp32


def prompts_of(lengths: Sequence[int], vocab_size: int = TINY.vocab_size) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = prompts_of(LENGTHS)


@cache
def decoder_of(kind: str, **changes: Any) -> Decoder:
    decoder = Decoder(dataclasses.replace(TINY, **KINDS[kind], **changes))
    initialise(decoder, seed=SEED, device=CPU)
    return decoder


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    return generate(decoder, prompts, **{"max_new_tokens": NEW_TOKENS, **options})


def logits_of(
    decoder: Decoder, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[list[int]], Tensor]:
    """The tokens, and the logits (batch, steps, vocab) that they were chosen by.

    A random model likes to repeat itself, and tokens alone would then hide a mistake.
    """
    steps: list[Tensor] = []
    assert decoder.lm_head is not None
    hook = decoder.lm_head.register_forward_hook(lambda _, __, out: steps.append(out[:, -1]))
    rows = greedy(decoder, prompts, **options)
    hook.remove()
    return rows, torch.stack(steps, dim=1)[..., : decoder.config.vocab_size]


# --- the same tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    """A batch of ours, padded on the left, and each prompt alone in transformers."""
    theirs = tiny_hf_model(family)
    prompts = prompts_of(LENGTHS, theirs.config.vocab_size)
    assert max(LENGTHS) > WINDOW
    theirs.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    rows, logits = logits_of(ours_from(theirs), prompts)
    for row, ours, prompt in zip(rows, logits, prompts, strict=True):
        tokens = torch.tensor([prompt])
        expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert row == expected.sequences[0, len(prompt) :].tolist()
        torch.testing.assert_close(ours, torch.cat(expected.logits), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lengths", [LENGTHS, (9, 9), (3,)], ids=["padded", "even", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_cache_equals_without(kind: str, lengths: tuple[int, ...]) -> None:
    decoder, prompts = decoder_of(kind), prompts_of(lengths)
    rows, logits = logits_of(decoder, prompts)
    expected_rows, expected = logits_of(decoder, prompts, cache=False)
    assert rows == expected_rows
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_row(kind: str) -> None:
    decoder = decoder_of(kind)
    rows, logits = logits_of(decoder, PROMPTS)
    for row, ours, prompt in zip(rows, logits, PROMPTS, strict=True):
        (alone,), expected = logits_of(decoder, [prompt])
        assert row == alone
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lost", ["window", "documents"])
def test_a_mask_without_window_or_documents_would_be_seen(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, dense = decoder_of("window"), RowMask.dense
    expected = greedy(decoder, PROMPTS)

    def forgetful(self: RowMask, window: int | None) -> Tensor | None:
        if lost == "documents":
            self.documents = None
        return dense(self, None if lost == "window" else window)

    monkeypatch.setattr(RowMask, "dense", forgetful)
    assert greedy(decoder, PROMPTS) != expected


def test_a_lost_state_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("state space")
    expected = greedy(decoder, PROMPTS)
    monkeypatch.setattr(room, "MambaState", Mock(empty=Mock(return_value=None)))
    assert greedy(decoder, PROMPTS) != expected


def test_every_token_is_computed_once() -> None:
    decoder, seen = decoder_of("plain"), []
    assert decoder.embed_tokens is not None
    hook = decoder.embed_tokens.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    heads = []
    assert decoder.lm_head is not None
    other = decoder.lm_head.register_forward_hook(lambda _, args, out: heads.append(out.shape[1]))
    greedy(decoder, PROMPTS[:1], max_new_tokens=4)
    hook.remove()
    other.remove()
    assert [tokens.shape[1] for tokens in seen] == [LENGTHS[0], 1, 1, 1]
    assert heads == [1, 1, 1, 1]  # and no logits but the next token's


def test_rows_of_one_length_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, masks = RowMask.dense, []
    monkeypatch.setattr(RowMask, "dense", lambda *a: masks.append(dense(*a)))
    greedy(decoder_of("plain"), prompts_of([9, 9]))
    assert masks and not any(mask is not None for mask in masks)


@pytest.mark.parametrize("kind", ["plain", "state space"])
def test_the_decoder_is_left_as_it_was(kind: str) -> None:
    decoder, tokens = decoder_of.__wrapped__(kind), torch.tensor([PROMPTS[2]])  # no other test's
    before = decoder(tokens)
    attributes = {name: set(vars(module)) for name, module in decoder.named_modules()}

    def interrupt(row: int, token: int, last: bool) -> None:
        raise KeyboardInterrupt

    for options in ({}, {"cache": False}, {"on_token": interrupt}):
        try:
            greedy(decoder, PROMPTS, **options)
        except KeyboardInterrupt:
            assert options
        assert decoder(tokens).equal(before) and not decoder.document_mask
        left = {name: set(vars(module)) for name, module in decoder.named_modules()}
        assert left == attributes


# --- the end of a row ----------------------------------------------------------------------------


def test_a_row_ends_with_its_eos_and_the_others_go_on() -> None:
    decoder = decoder_of("plain")
    whole = greedy(decoder, PROMPTS)
    eos_ids = {whole[0][4], whole[2][7]}
    heard: list[list[int]] = [[] for _ in PROMPTS]
    ends: Counter[int] = Counter()

    def listen(row: int, token: int, last: bool) -> None:
        assert not ends[row]
        heard[row].append(token)
        ends[row] += last

    rows = greedy(decoder, PROMPTS, eos_ids=eos_ids, on_token=listen)
    for row, full in zip(rows, whole, strict=True):
        end = next((i + 1 for i, token in enumerate(full) if token in eos_ids), NEW_TOKENS)
        assert row == full[:end]
    assert len(rows[0]) <= 5 and len(rows[2]) <= 8
    assert heard == rows and set(ends.values()) == {1}


def test_nothing_is_computed_once_all_rows_ended() -> None:
    decoder, calls = decoder_of("plain"), []
    first = greedy(decoder, [PROMPTS[0]])[0][0]
    hook = decoder.register_forward_hook(lambda *_: calls.append(1))
    assert greedy(decoder, [PROMPTS[0]], eos_ids={first}) == [[first]]
    hook.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["plain", "learned positions"])
def test_a_row_ends_where_the_context_does(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder = decoder_of(kind, max_position_embeddings=20)
    rows = greedy(decoder, PROMPTS)
    assert [len(row) for row in rows] == [11, 17, 3, 19]
    assert "17 tokens and 20 more exceed the context of the model: its text ends after 20" in (
        caplog.text
    )
    assert rows == greedy(decoder, PROMPTS, cache=False)
    assert greedy(decoder, prompts_of([20])) == [[]]


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt 2 has 65 tokens and the context of the model 64"):
        greedy(decoder_of("plain"), prompts_of([3, 65]))


def test_a_state_has_no_context_to_exceed(caplog: pytest.LogCaptureFixture) -> None:
    decoder = decoder_of("state space", max_position_embeddings=8)
    assert greedy(decoder, PROMPTS) == greedy(decoder_of("state space"), PROMPTS)
    assert not caplog.text


# --- draws ----------------------------------------------------------------------------------------


def some_logits() -> Tensor:
    """Rows of unequal sharpness, with ties at the top, in the middle and everywhere."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    logits *= torch.tensor([0.1, 1.0, 3.0, 10.0, 1.0, 0.0])[:, None]
    logits[4] = logits[4].round()
    return logits


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_what_is_left_to_draw_is_what_transformers_leaves(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
    warpers += [] if top_p == 1.0 else [TopPLogitsWarper(top_p)]
    expected = some_logits()
    for warper in warpers:
        expected = warper(None, expected)
    scores = warp(some_logits(), temperature=temperature, top_k=top_k, top_p=top_p)
    assert scores.equal(expected)
    assert scores.isfinite().any(1).all()


def test_no_draw_takes_what_was_left_out() -> None:
    """Neither the smallest uniform number nor the largest, beside tokens of no probability."""
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(3, -1)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(scores, uniforms).tolist() == [1, 3, 3]


def chi_square(counts: Sequence[int], logits: Tensor) -> float:
    expected = logits.softmax(-1).double() * sum(counts)
    return float(((torch.tensor(counts) - expected) ** 2 / expected).sum())


def test_draws_are_distributed_as_softmax() -> None:
    """4000 samples of one token; other temperatures would be far outside of the bound."""
    decoder, temperature = decoder_of("plain"), 2.0
    rows = generate(
        decoder, PROMPTS[:1], max_new_tokens=1, temperature=temperature, num_samples=4000
    )
    found = Counter(row[0] for row in rows)
    counts = [found[token] for token in range(TINY.vocab_size)]
    with torch.no_grad():
        logits = decoder(torch.tensor(PROMPTS[:1]))[0, -1]
    freedom = TINY.vocab_size - 1
    bound = freedom + 3 * math.sqrt(2 * freedom)  # mean and three deviations of chi-square
    assert chi_square(counts, logits / temperature) < bound
    for other in (0.8 * temperature, 1.2 * temperature):
        assert chi_square(counts, logits / other) > bound


def sampled(prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    options = {
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.95,
        **options,
    }
    return generate(decoder_of("plain"), prompts, **options)


def test_a_row_draws_alone() -> None:
    """From (seed, prompt, sample), whatever the other rows, their number and their length."""
    rows = sampled(PROMPTS, num_samples=3)
    assert len({tuple(row) for row in rows}) == len(rows) == 12
    assert sampled(PROMPTS, num_samples=3) == rows
    others = prompts_of([2, 20, 5])
    assert sampled([others[0], PROMPTS[1], others[2]], num_samples=3)[3:6] == rows[3:6]
    assert sampled(PROMPTS[:2], num_samples=2) == [rows[0], rows[1], rows[3], rows[4]]
    assert [row[:5] for row in rows] == sampled(PROMPTS, num_samples=3, max_new_tokens=5)
    assert sampled(PROMPTS, num_samples=3, cache=False) == rows
    assert all(a != b for a, b in zip(sampled(PROMPTS, num_samples=3, seed=1), rows, strict=True))


# --- tensor parallel ------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 8},
    {"max_new_tokens": 8, "temperature": 1.5, "top_k": 40, "top_p": 0.95, "num_samples": 2},
]


def on_rank(kinds: Sequence[str], *, deaf: bool = False) -> dict[str, list[list[list[int]]]]:
    """What this rank generates, of models as scripts/generate.py builds them.

    `deaf`: rank 1 draws something else.
    """
    if deaf and dist.get_rank() == 1:
        room.draw = lambda scores, uniforms: uniforms.long()
    config = Config()
    config.parallelism.tensor_parallel_degree = dist.get_world_size()
    config.parallelism.enable_sequence_parallel = False
    config.training.mixed_precision_param = "float32"
    config.debug.seed = SEED
    resolve(config, dist.get_world_size())
    mesh = build_mesh(Degrees.of(config), "cpu", dist.get_rank())
    results = {}
    for kind in kinds:
        decoder = build_model(config, decoder_of(kind).config, mesh, CPU).parts[0]
        results[kind] = [
            greedy(decoder, PROMPTS, group=mesh.tp.get_group(), **options) for options in OPTIONS
        ]
    return results


def test_two_ranks_generate_as_one() -> None:
    kinds = ["plain", "tied", "window in some layers", "learned positions"]
    expected = {
        kind: [greedy(decoder_of(kind), PROMPTS, **options) for options in OPTIONS]
        for kind in kinds
    }
    assert run_ranks(on_rank, 2, kinds) == [expected, expected]


def test_all_ranks_get_the_tokens_of_the_first() -> None:
    first, second = run_ranks(partial(on_rank, deaf=True), 2, ["plain"])
    assert first == second
