"""Experts in float8: each of three products as a linear of its own, on any mesh; who is swapped."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.cases import problems
from tests.parity.harness import Mesh, assert_equal, relative_error, run
from tests.precision.test_float8 import linear, products
from tests.precision.test_linear import MIXTURE as SMALL
from tests.precision.test_linear import configure, meta
from tests.precision.test_meshes import MIXTURE, largest_gradient_error, options
from torchtitan_lite import device
from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.ops.grouped import grouped_linear
from torchtitan_lite.precision.float8 import RECIPES
from torchtitan_lite.precision.grouped import (
    FQNS,
    announce_float8_experts,
    apply_float8_to_experts,
    float8_grouped_linear,
)

SLOW = pytest.mark.slow
COUNTS = [40, 0, 150, 7, 16]


def draw(dtype: torch.dtype, behind: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, some of them `behind` all blocks, weights, upstream gradient, counts."""
    generator = torch.Generator().manual_seed(3)
    num_rows = sum(COUNTS) + behind
    x, w, g = (
        torch.randn(shape, generator=generator)
        for shape in ((num_rows, 160), (len(COUNTS), 144, 160), (num_rows, 144))
    )
    return x.to(dtype), (0.05 * w).to(dtype), (1e-6 * g).to(dtype), torch.tensor(COUNTS)


def computed(x: Tensor, w: Tensor, g: Tensor, counts: Tensor, **how: Any) -> dict[str, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    product = float8_grouped_linear if "recipe" in how else grouped_linear
    out = product(x, w, counts, **how)
    out[: sum(COUNTS)].backward(g[: sum(COUNTS)])
    assert x.grad is not None and w.grad is not None
    own = slice(sum(COUNTS))
    return {"out": out[own].detach(), "dx": x.grad[own], "weight": w.grad}


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_each_expert_is_a_float8_linear_over_its_rows(
    name: str, dtype: torch.dtype, kernel: str
) -> None:
    x, w, g, counts = draw(dtype)
    found = computed(x, w, g, counts, kernel=kernel, recipe=RECIPES[name])
    assert all(tensor.dtype == dtype for tensor in found.values())
    start = 0
    for expert, size in enumerate(COUNTS):
        own = slice(start, start + size)
        start += size
        if size == 0:
            assert not found["weight"][expert].any()
            continue
        expected = dict(products(linear(w[expert], RECIPES[name]), x[own], g[own]))
        rounding = 1e-6 if dtype == torch.float32 else 2e-3  # of a few last bits of bf16
        for what, ours in (
            ("out", found["out"][own]),
            ("dx", found["dx"][own]),
            ("weight", found["weight"][expert]),
        ):
            assert relative_error(ours, expected[what]) < rounding, (what, expert)


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_in_float8(name: str) -> None:
    x, w, g, counts = draw(torch.float32)
    high = computed(x, w, g, counts, kernel="loop")
    found = computed(x, w, g, counts, kernel="loop", recipe=RECIPES[name])
    for what in high:
        assert 0.01 < relative_error(found[what], high[what]) < 0.08, what


@pytest.mark.parametrize("letter", ["x", "w", "g"])
@pytest.mark.parametrize("name", RECIPES)
def test_within_an_expert_the_blocks_are_those_of_a_linear(name: str, letter: str) -> None:
    """An outlier takes what shares its scale to zero, in each product that it is an operand of."""
    ones = {which: torch.ones(256, 256) for which in "xwg"}
    ones[letter][130, 140] = 2.0**80
    expected = dict(products(linear(ones["w"], RECIPES[name]), ones["x"], ones["g"]))
    x, g = (torch.cat((torch.ones(100, 256), ones[which])).requires_grad_() for which in "xg")
    w = torch.stack((torch.ones(256, 256), ones["w"])).requires_grad_()
    counts, how = torch.tensor([100, 256]), {"kernel": "loop", "recipe": RECIPES[name]}
    out = float8_grouped_linear(x, w, counts, **how)
    out.backward(g.detach())
    assert x.grad is not None and w.grad is not None
    assert torch.equal(out[100:], expected["out"])
    assert torch.equal(x.grad[100:], expected["dx"])
    assert torch.equal(w.grad[1], expected["weight"])


@pytest.mark.parametrize("letter", ["x", "w", "g"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_outlier_of_one_expert_touches_no_other(name: str, letter: str) -> None:
    x, w, g, counts = draw(torch.float32)
    before = computed(x, w, g, counts, kernel="loop", recipe=RECIPES[name])
    spoilt = {"x": x.clone(), "w": w.clone(), "g": g.clone()}
    spoilt[letter][2 if letter == "w" else 100, 17] *= 2.0**40  # of expert 2
    after = computed(*spoilt.values(), counts, kernel="loop", recipe=RECIPES[name])
    others = [0, 1, 3, 4]
    rows = torch.arange(sum(COUNTS))
    rows = rows[(rows < 40) | (rows >= 190)]
    for what, places in (("out", rows), ("dx", rows), ("weight", others)):
        assert torch.equal(after[what][places], before[what][places]), what
    assert not all(torch.equal(after[what], before[what]) for what in before)


def test_no_rows_at_all_and_what_is_not_finite() -> None:
    x, w, g, counts = draw(torch.float32)
    w = w.requires_grad_()
    out = float8_grouped_linear(x[:0], w, counts * 0, kernel="loop", recipe=RECIPES["rowwise"])
    out.sum().backward()
    assert out.shape == (0, 144) and w.grad is not None and not w.grad.any()
    x[4, 9] = math.nan
    found = computed(x, w.detach(), g, counts, kernel="loop", recipe=RECIPES["rowwise"])
    assert not found["out"][4].isfinite().any() and found["out"][5:].isfinite().all()
    assert not found["weight"][0, :, 9].isfinite().any()


# --- the real Trainer ----------------------------------------------------------------------------


def settings(name: str, **more: Any) -> dict[str, Any]:
    return options(name) | {FQNS: ["experts"]} | more


EP2 = {"parallelism.expert_parallel_degree": 2}
MESHES: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(dp_shard=2), EP2),
    (Mesh(dp_shard=2), {"training.local_batch_size": 2, "parallelism.zero_stage": 1}),
    (Mesh(dp_shard=2, tp=2), EP2),
    (Mesh(pp=2), {}),
    (Mesh(), {"activation_checkpoint.mode": "full"}),
    (Mesh(), {"moe.kernel": "loop"}),
]
CASES = [
    pytest.param(name, mesh, more, id=f"{name}-{mesh}-{number}",
                 marks=[] if (name, number) == ("rowwise", 0) else [SLOW])
    for name in RECIPES for number, (mesh, more) in enumerate(MESHES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "more"), CASES)
def test_a_mesh_computes_what_one_process_computes(
    name: str, mesh: Mesh, more: dict[str, Any]
) -> None:
    one = run(Mesh(), settings(name), MIXTURE)
    assert_equal(run(mesh, settings(name) | more, MIXTURE), one)
    high = run(Mesh(), options(name), MIXTURE)
    assert 0.01 < largest_gradient_error(one, high) < 0.3


# --- which are swapped ---------------------------------------------------------------------------


def named(*entries: str, recipe: str = "rowwise") -> Config:
    config = configure(recipe)
    config.quantize.grouped_mm.float8.fqns = list(entries)
    return config


def swapped(config: Config, model: Any = SMALL) -> list[str]:
    part = meta(model)
    apply_float8_to_experts(part, config)
    return [
        name
        for name, module in part.named_modules()
        if getattr(module, "product", grouped_linear) is not grouped_linear
    ]


def test_experts_that_are_named_are_swapped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert swapped(named()) == []
    assert swapped(named("layers.1.")) == ["layers.1.mlp.experts"]
    assert swapped(named("experts")) == [f"layers.{i}.mlp.experts" for i in (0, 1)]
    assert swapped(named("experts"), dataclasses.replace(SMALL, moe_intermediate_size=40)) == []
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    announce_float8_experts(meta(SMALL), named())
    announce_float8_experts(meta(SMALL), named("layers.1."))
    (record,) = caplog.records
    assert record.message == "float8 rowwise, emulated: experts of 1 of 2 layers"


def test_what_swaps_nothing_is_refused_by_name() -> None:
    odd = dataclasses.replace(SMALL, moe_intermediate_size=40)
    dense = dataclasses.replace(SMALL, num_experts=0)
    for model, entries, told in (
        (SMALL, ["experts", "up_proj"],
         "up_proj: no experts have it in their name; name them as in layers.0.mlp.experts"),
        (dense, ["experts"], "experts: no experts have it in their name; the model has none; "
                             "remove it"),
        (odd, ["experts"], "['experts']: all experts are of sizes that 16 does not divide; "
                           "remove it"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            announce_float8_experts(meta(model), named(*entries))
        assert str(error.value) == f"{FQNS} = {told}"


RECIPE = "--quantize.linear.float8.recipe_name=rowwise"
FLAG = f"--{FQNS}=experts"


def test_experts_need_a_recipe_powers_of_two_and_on_a_device_emulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = f'{FQNS} = ["experts"] (from --{FQNS}): '
    (line,) = problems([FLAG])
    assert line == (
        f"{shown}experts follow the recipe of the linears, of which there is none; set "
        "quantize.linear.float8.recipe_name to one"
    )
    assert problems([FLAG, RECIPE]) == []
    plain = "--quantize.linear.float8.no_round_scales_to_power_of_2"
    (line,) = problems([FLAG, RECIPE, plain])
    assert line.startswith(f"{shown}experts multiply the numbers in bfloat16")
    assert line.endswith("set quantize.linear.float8.round_scales_to_power_of_2 to true")
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (line,) = problems([FLAG, RECIPE])
    assert line == (
        f"{shown}this cuda device has no kernel for experts in float8; set "
        "quantize.linear.float8.emulate to true, which is slower than high precision, or name none"
    )
    assert problems([FLAG, RECIPE, "--quantize.linear.float8.emulate"]) == []
