"""What a rank holds, keeps and peaks at by mode, against arithmetic: counted by bench_memory.py."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from scripts.bench_memory import SMALL, Bytes, least, load, measure
from torchtitan_lite.models.decoder import parameter_shapes

MODEL = dataclasses.replace(
    SMALL, vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=6
)
NUMBER = sum(shape.numel() for shape in parameter_shapes(MODEL).values())
TOKENS = 256


@cache
def found(text: str, ranks: int = 4) -> Bytes:
    return measure((ranks, text), MODEL)[0]


@cache
def minimum(text: str, ranks: int = 4) -> Bytes:
    return least(*load((ranks, text), MODEL))


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_backward_a_rank_holds_its_share_of_sixteen_bytes_a_parameter(ranks: int) -> None:
    """fp32 parameters, gradients and two moments; and a few numbers besides."""
    held = found("zero=3 ac=full", ranks).held
    assert 16 * NUMBER / ranks <= held < 1.05 * 16 * NUMBER / ranks


@pytest.mark.parametrize("stage", [1, 2])
def test_the_stages_that_share_hold_as_little(stage: int) -> None:
    assert found(f"zero={stage} ac=full").held == pytest.approx(4 * NUMBER, rel=0.02)


def test_stage_0_holds_everything() -> None:
    assert found("zero=0 ac=full").held == pytest.approx(16 * NUMBER, rel=0.01)


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    norms = sum(s.numel() for n, s in parameter_shapes(MODEL).items() if "norm" in n)
    expected = 16 * ((NUMBER - norms) / 4 + norms)
    assert found("zero=0 tp=4 ac=full").held == pytest.approx(expected, rel=0.02)


def test_moments_in_bf16_are_four_bytes_a_parameter_less() -> None:
    less = found("zero=3 ac=full").held - found("zero=3 ac=full state=bfloat16").held
    # Of the count of steps, of each tensor, torch makes 4 bytes and LowPrecisionAdamW 8.
    assert less == 4 * NUMBER / 4 - 4 * len(parameter_shapes(MODEL))


def test_offloaded_parameters_and_moments_take_nothing_on_the_device() -> None:
    """Gradients stay here, where host and device are one."""
    assert found("zero=3 ac=full offload=true").held == pytest.approx(NUMBER, rel=0.05)
    gone = found("zero=3 ac=full").peak - found("zero=3 ac=full offload=true").peak
    assert gone == pytest.approx(12 * NUMBER / 4, rel=0.01)


@pytest.mark.parametrize(
    "text",
    ["zero=3 ac=full", "zero=2 ac=full", "zero=0 ac=full", "zero=3 tp=2 ac=full",
     "zero=2 pp=2 ac=full rows=4"],
)  # fmt: skip
def test_a_layer_that_is_computed_again_keeps_its_input_alone(text: str) -> None:
    tp = 2 if "tp=2" in text else 1
    assert found(text).kept == TOKENS * MODEL.hidden_size * 2 / tp == minimum(text).kept


def test_of_every_second_layer_half_is_kept() -> None:
    """Of layers 1 to 4, two of each kind."""
    full, none = found("zero=3 ac=full").kept, found("zero=3").kept
    assert found("zero=3 ac=selective every=2").kept == (full + none) / 2


def test_what_is_kept_is_at_least_what_backward_needs() -> None:
    """Eager keeps more: what it makes on the way to a norm, a rotation, a product."""
    assert minimum("zero=3").kept <= found("zero=3").kept < 2 * minimum("zero=3").kept
    text = "zero=3 ac=selective every=op"
    assert minimum(text).kept <= found(text).kept < 1.3 * minimum(text).kept


def test_logits_in_chunks_take_less_at_the_peak() -> None:
    """Of a large vocabulary they are the peak; seven eighths of them are not there in chunks."""
    model = dataclasses.replace(MODEL, vocab_size=8192, num_hidden_layers=3)
    whole, in_chunks = (
        measure((4, f"zero=3 ac=full chunks={chunks}"), model)[0].peak for chunks in (1, 8)
    )
    assert whole - in_chunks > 7 / 8 * 4 * TOKENS * model.padded_vocab_size


@pytest.mark.parametrize("text", ["zero=3", "zero=2 ac=full", "zero=0 ac=full"])
def test_no_peak_is_below_the_least_there_can_be(text: str) -> None:
    assert found(text).peak >= minimum(text).peak


@pytest.mark.slow
def test_a_dry_run_counts_what_real_tensors_take() -> None:
    """The 8B on 8 ranks, of which a rank holds 16 bytes an eighth of each parameter."""
    of_8b, smallest = measure((8, "flavor=8B zero=3 ac=full"))
    assert of_8b.held == pytest.approx(smallest.held, rel=1e-4)
    assert of_8b.kept == smallest.kept == 8192 * 4096 * 2
    assert 1 < of_8b.peak / smallest.peak < 1.25
