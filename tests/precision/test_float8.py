"""Casts, scales and products, against high precision, against each other and against torchao."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torchtitan_lite.precision import float8
from torchtitan_lite.precision.float8 import E4M3, E5M2, RECIPES, Recipe, cast, multiply
from torchtitan_lite.precision.linear import Float8Linear

SIZES = [(96, 64, 48), (33, 160, 272), (1, 16, 16), (7, 16, 304), (130, 400, 16)]  # tokens, in, out

# Steps of s round by s / sqrt(12) in the mean. With m bits of mantissa s is 2^-m of the power of
# two below a number, which is on average 1.4 times that: 0.026 of it in E4M3, 0.052 in E5M2.
ERROR = {E4M3: 0.027, E5M2: 0.054}


def linear(weight: Tensor, recipe: Recipe | None, bias: Tensor | None = None) -> torch.nn.Linear:
    made = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype)
    made.weight.data.copy_(weight)
    if bias is not None:
        made.bias.data.copy_(bias)
    if recipe is not None:
        made.__class__ = Float8Linear
        made.recipe = recipe  # type: ignore[assignment]
    return made


def products(module: torch.nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What comes out, the input's gradient and those of the parameters."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(grad)
    yield "out", out.detach()
    assert x.grad is not None
    yield "dx", x.grad
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        yield name.rpartition(".")[2], parameter.grad


def tensors(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight, and an upstream gradient that is small, and no two numbers of it equal."""
    tokens, features_in, features_out = sizes
    generator = torch.Generator().manual_seed(tokens)
    x, w, g = (
        torch.randn(shape, generator=generator)
        for shape in ((tokens, features_in), (features_out, features_in), (tokens, features_out))
    )
    return x.to(dtype), (0.05 * w).to(dtype), (1e-6 * g).to(dtype)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


# --- the linear against high precision -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_each_product_is_off_by_the_rounding_of_its_formats_and_no_more(
    name: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, w, g = tensors(sizes, dtype)
    bias = w[:, 0]
    high = products(linear(w.float(), None, bias.float()), x.float(), g.float())
    same = products(linear(w, None, bias), x, g)
    found = products(linear(w, RECIPES[name], bias), x, g)
    second = ERROR[RECIPES[name].gradient]
    bounds = {"out": ERROR[E4M3], "dx": second, "weight": second}
    many = 1.2 if min(sizes) > 1 else 2.0  # a mean over few numbers is less of one
    for (what, ours), (_, theirs), (_, plain) in zip(found, high, same, strict=True):
        assert ours.dtype == dtype
        if what == "bias":
            torch.testing.assert_close(ours, plain, rtol=0, atol=0)
            continue
        bound = many * math.hypot(ERROR[E4M3], bounds[what])
        assert bound / 6 < relative_error(ours, theirs) < bound, what
        assert relative_error(ours, plain) < bound, what


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_kernels_and_emulation_differ_in_the_order_of_sums(
    name: str, sizes: tuple[int, int, int], dtype: torch.dtype, powers_of_two: bool
) -> None:
    x, w, g = tensors(sizes, dtype)
    recipe = replace(RECIPES[name], powers_of_two=powers_of_two)
    emulated = products(linear(w, replace(recipe, emulate=True)), x, g)
    native = products(linear(w, replace(recipe, emulate=False)), x, g)
    for (what, ours), (_, theirs) in zip(native, emulated, strict=True):
        rounding = 1e-6 if dtype == torch.float32 else 2e-3  # of a few last bits of bf16
        assert relative_error(ours, theirs) < rounding, what


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "powers_of_two"), [("tensorwise", True), ("tensorwise", False), ("rowwise", True)]
)
def test_equal_to_torchao(
    name: str, powers_of_two: bool, sizes: tuple[int, int, int], emulate: bool
) -> None:
    """Its recipes as it has them, and tensorwise with either rounding of scales."""
    torchao = pytest.importorskip("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    theirs = replace(config, emulate=emulate, round_scales_to_power_of_2=powers_of_two)
    x, w, g = tensors(sizes, torch.bfloat16)
    module = torch.nn.Sequential(linear(w, None))
    converted = torchao.convert_to_float8_training(module, config=theirs)
    assert type(converted[0]) is not torch.nn.Linear
    recipe = replace(RECIPES[name], emulate=emulate, powers_of_two=powers_of_two)
    expected = products(converted, x, g)
    for (what, ours), (_, other) in zip(products(linear(w, recipe), x, g), expected, strict=True):
        if powers_of_two:
            assert torch.equal(ours, other), what
        else:  # a scale multiplies or divides
            assert relative_error(ours, other) < 1e-4, what


# --- formats and scales --------------------------------------------------------------------------


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (257, 129), (128, 256), (3, 5)])
def test_a_cast_is_off_by_half_a_step_of_each_number(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, powers_of_two: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-5
    scaled = cast(x, dtype, block, powers_of_two=powers_of_two)
    assert (scaled.values.dtype, scaled.values.shape) == (dtype, x.shape)
    mantissa = {E4M3: 3, E5M2: 2}[dtype]
    least = x.abs().max() / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
    error = (scaled.high() - x).abs()
    bound = x.abs().clamp(min=float(2 * least)) * 2.0 ** -(mantissa + 1)
    assert (error <= bound * 1.0001).all()
    height, width = block[0] or shape[0], block[1] or shape[1]
    assert scaled.scale.shape == (-(-shape[0] // height), -(-shape[1] // width))
    if powers_of_two:
        assert (torch.frexp(scaled.scale).mantissa == 0.5).all()


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128)])
def test_numbers_share_a_scale_with_those_of_their_block_alone(block: tuple[int, int]) -> None:
    x = torch.rand(200, 300) + 1
    before = cast(x, E4M3, block, powers_of_two=True).high()
    x[130, 140] = 2.0**40  # all that shares its scale falls below what the format holds
    after = cast(x, E4M3, block, powers_of_two=True).high()
    lost = (before != after).nonzero()
    height, width = block[0] or 200, block[1] or 300
    rows = torch.arange(200)[130 // height * height :][:height]
    columns = torch.arange(300)[140 // width * width :][:width]
    assert lost.tolist() == torch.cartesian_prod(rows, columns).tolist()


# The numbers of a matrix of 256 x 256 that share a scale with the one at (130, 140).
SHARING = {
    "tensorwise": {"input": (slice(256), slice(256)), "weight": (slice(256), slice(256))},
    "rowwise": {"input": (slice(130, 131), slice(256)), "weight": (slice(130, 131), slice(256))},
    "blockwise": {
        "input": (slice(130, 131), slice(128, 256)),
        "weight": (slice(128, 256), slice(128, 256)),
    },
}


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("operand", ["x", "w", "g", "w^T", "g^T", "x^T"])
@pytest.mark.parametrize("name", RECIPES)
def test_each_operand_of_each_product_has_the_blocks_of_its_recipe(
    name: str, operand: str, emulate: bool
) -> None:
    """An outlier takes those that share its scale to zero; the identity shows which those are."""
    spoilt, identity = torch.ones(256, 256), torch.eye(256)
    spoilt[130, 140] = 2.0**80
    matrix = spoilt.t() if operand.endswith("T") else spoilt
    x, w, g = (matrix if operand[0] == letter else identity for letter in "xwg")
    recipe = replace(RECIPES[name], emulate=emulate or name == "blockwise")
    found = dict(products(linear(w, recipe), x, g))
    shown = {"x": "out", "w": "out", "g": "dx", "w^T": "dx", "g^T": "weight", "x^T": "weight"}
    seen = found[shown[operand]]
    rows = seen.t() if operand in ("w", "w^T", "x^T") else seen
    lost = torch.zeros(256, 256, dtype=torch.bool)
    lost[SHARING[name]["weight" if operand[0] == "w" else "input"]] = True
    lost[130, 140] = False
    assert torch.equal(rows == 0, lost)


def test_a_power_of_two_makes_a_number_the_same_beside_any_other() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    x = x.sign() * x.abs().clamp(min=0.01)
    beside = torch.cat((x, torch.full((64, 1), 7.7)), dim=1)
    for pow2 in (True, False):
        alone, other = (
            cast(t, E4M3, (0, 0), powers_of_two=pow2).high()[:, :64] for t in (x, beside)
        )
        assert torch.equal(alone, other) == pow2


def test_gradients_reach_lower_in_e5m2_than_in_e4m3() -> None:
    gradient = 2.0 ** -torch.arange(30.0)[None]
    fine, wide = (cast(gradient, dtype, (0, 0), powers_of_two=True) for dtype in (E4M3, E5M2))
    assert torch.equal(wide.high(), gradient)
    assert (fine.high()[0, 18:] == 0).all()


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128)])
def test_the_largest_number_is_never_cut(block: tuple[int, int]) -> None:
    x = torch.tensor([[1e30, -1e30, 448.0, 447.9, 57344.0, 1e-30, 0.0]])
    for dtype in (E4M3, E5M2):
        for pow2 in (True, False):
            high = cast(x, dtype, block, powers_of_two=pow2).high()
            assert high.isfinite().all()
            torch.testing.assert_close(high[:, :2], x[:, :2], rtol=0.07, atol=0)


# --- bad numbers and odd shapes ------------------------------------------------------------------


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_zeros_give_zeros(name: str, emulate: bool) -> None:
    recipe = replace(RECIPES[name], emulate=emulate or name == "blockwise")
    x, w, g = tensors((33, 160, 272), torch.float32)
    x[3], w[5], g[7] = 0, 0, 0
    found = dict(products(linear(w, recipe), x, g))
    assert not found["out"][3].any() and not found["out"][:, 5].any() and not found["dx"][7].any()
    assert all(t.isfinite().all() for t in found.values())
    for t in dict(products(linear(w * 0, recipe), x * 0, g * 0)).values():
        assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_an_infinity_or_a_nan_is_never_hidden(
    name: str, emulate: bool, powers_of_two: bool, bad: float
) -> None:
    """Wherever it comes from, each number of which it is a term is not finite."""
    recipe = replace(
        RECIPES[name], emulate=emulate or name == "blockwise", powers_of_two=powers_of_two
    )
    x, w, g = tensors((33, 160, 272), torch.float32)
    spoilt = x.clone()
    spoilt[4, 9] = bad
    found = dict(products(linear(w, recipe), spoilt, g))
    assert not found["out"][4].isfinite().any() and not found["weight"][:, 9].isfinite().any()
    spoilt = w.clone()
    spoilt[4, 9] = bad
    found = dict(products(linear(spoilt, recipe), x, g))
    assert not found["out"][:, 4].isfinite().any() and not found["dx"][:, 9].isfinite().any()
    spoilt = g.clone()
    spoilt[4, 9] = bad
    found = dict(products(linear(w, recipe), x, spoilt))
    assert not found["dx"][4].isfinite().any() and not found["weight"][9].isfinite().any()
    if name != "tensorwise":  # other rows are none the worse
        assert found["dx"][5:].isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_no_tokens_and_leading_dimensions(name: str) -> None:
    x, w, g = tensors((24, 64, 48), torch.float32)
    module = linear(w, RECIPES[name])
    flat = dict(products(module, x, g))
    module.zero_grad()
    shaped = dict(products(module, x.view(2, 3, 4, 64), g.view(2, 3, 4, 48)))
    assert shaped["out"].shape == (2, 3, 4, 48)
    assert all(torch.equal(shaped[what].flatten(), flat[what].flatten()) for what in flat)
    module.zero_grad()
    none = dict(products(module, x[:0].view(2, 0, 64), g[:0].view(2, 0, 48)))
    assert none["out"].shape == (2, 0, 48) and not none["weight"].any()


def test_a_product_that_kernels_have_to_fill_up() -> None:
    """Rows, columns and summed dimension, none of them a multiple of 16."""
    for block in ((0, 0), (1, 0)):
        a, b = (cast(torch.randn(rows, 37), E4M3, block, powers_of_two=False) for rows in (5, 19))
        native = multiply(a, b, dtype=torch.float32, emulate=False)
        torch.testing.assert_close(
            native, multiply(a, b, dtype=torch.float32, emulate=True), rtol=1e-5, atol=1e-5
        )
        assert native.shape == (5, 19)


def test_what_needs_no_filling_up_is_not_copied() -> None:
    """A copy of every operand would cost a share of the product."""
    values = cast(torch.randn(32, 48), E4M3, (1, 0), powers_of_two=True).values
    assert float8._aligned(values) is values
    assert float8._aligned(values[:, :33].contiguous(), more_rows=3).shape == (35, 48)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_in_one_graph_it_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    recipe = replace(RECIPES[name], emulate=name == "blockwise")
    x, w, g = tensors((33, 160, 272), torch.float32)
    eager = dict(products(linear(w, recipe), x, g))
    module = linear(w, recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = dict(products(compiled, x, g))
    assert all(torch.equal(found[what], eager[what]) for what in eager)
