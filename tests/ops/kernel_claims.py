"""What holds of the kernels of ops/kernels.py, in Triton's interpreter: on a CPU, by numpy.

tests/ops/test_kernels.py runs these in a process of their own, since Triton decides when it is
imported whether it interprets. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/ops/kernel_claims.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_lite.device import INTERPRETS_TRITON, has_triton
from torchtitan_lite.models import moe
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.ops import float8, kernels, permute
from torchtitan_lite.precision.float8 import E4M3, E5M2, RECIPES, cast, multiply
from torchtitan_lite.precision.linear import Float8Linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy divides by zero aloud

BLOCKS = [(0, 0), (1, 0), (1, 128), (128, 128)]
SHAPES = [(1, 1), (1, 300), (130, 140)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_kernels_serve_this_process() -> None:
    assert INTERPRETS_TRITON and has_triton("cpu") and kernels.INTERPRETS_TRITON


@pytest.mark.parametrize("name", ["cast_blocks", "scaled_matmul", "gather", "combine", "dot_rows"])
def test_what_is_compared_here_runs_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function that launches one is missed by an operator, so none compares torch to torch."""
    monkeypatch.delattr(kernels, name)
    x, order = torch.ones(4, 8, requires_grad=True), torch.tensor([1, 2, 0, 3])
    weights = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(AttributeError, match=name):
        a, b = (cast(x.detach(), E4M3, block, powers_of_two=True) for block in BLOCKS[2:])
        multiply(a, b, dtype=torch.float32, emulate=False)
        permute.gather_rows(x[:2], order, 2).sum().backward()
        permute.combine_rows(x, order, weights).sum().backward()


# --- casts ------------------------------------------------------------------------------------


def numbers(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Of all sizes, with rows and columns of zeros and of almost zeros."""
    x = torch.randn(shape, generator=generator())
    x *= 10.0 ** torch.randint(-9, 9, (shape[0], 1), generator=generator())
    if min(shape) > 1:
        x[1] = 0.0
        x[:, 1] = 0.0
        x[2] = 1e-14
    return x.to(dtype)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """NaN is NaN, whichever of its bits are set; all others are equal, and so is the sign of 0."""
    ours, theirs = ours.float(), theirs.float()
    is_nan = theirs.isnan()
    equal = ours.view(torch.int32) == theirs.view(torch.int32)
    return ours.shape == theirs.shape and bool(torch.where(is_nan, ours.isnan(), equal).all())


def assert_cast_alike(x: Tensor, dtype: torch.dtype, block: tuple[int, int], pow2: bool) -> Tensor:
    values, scale = float8.cast_blocks(x, dtype, block, powers_of_two=pow2)
    expected = float8.cast_blocks_reference(x, dtype, block, powers_of_two=pow2)
    assert (values.dtype, values.shape, values.is_contiguous()) == (dtype, x.shape, True)
    assert same_bits(values, expected[0]) and same_bits(scale, expected[1])
    return values


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cast_has_the_bits_of_its_reference(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Of either dtype and any strides, into either format, by either scale."""
    x = numbers(shape, torch.float32)
    assert_cast_alike(x, E4M3, block, True)
    assert_cast_alike(x.t(), E5M2, block, False)
    x = numbers(shape, torch.bfloat16)
    assert_cast_alike(x[:, ::2], E5M2, block, True)
    assert_cast_alike(x.t(), E4M3, block, False)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_an_infinity_or_a_nan_spoils_its_block_as_in_the_reference(
    powers_of_two: bool, bad: float
) -> None:
    for block, shape in zip(BLOCKS, [(4, 5), (4, 5), (4, 130), (130, 4)], strict=True):
        x = numbers(shape, torch.float32)
        x[shape[0] - 1, shape[1] - 1] = bad
        values = assert_cast_alike(x, E4M3, block, powers_of_two)
        assert values.float().isnan()[-1, -1]


@triton.jit
def rounding(x, out, SMALLEST: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(out + place, kernels._round(tl.load(x + place), SMALLEST, EPSILON))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_of_float8_and_what_lies_about_a_tie_is_rounded_as_torch_does(
    dtype: torch.dtype,
) -> None:
    """In the kernel itself, though on a device a conversion follows that may round again."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort()[0]
    ties = (every[1:] + every[:-1]) / 2
    about = [ties.nextafter(every[:-1]), ties.nextafter(every[1:])]
    row = torch.cat([every, ties, *about, torch.tensor([math.nan, 1e-30, -1e-30])])
    row = torch.cat([row, row.new_zeros(1024 - len(row))])
    ours, format = torch.empty_like(row), torch.finfo(dtype)
    rounding[(1,)](row, ours, SMALLEST=format.smallest_normal, EPSILON=format.eps, SIZE=1024)
    assert same_bits(ours, row.to(dtype).float())


@pytest.mark.parametrize("amax", [0.0, 0.3, 1e4, math.inf, math.nan])
def test_beyond_a_given_amax_numbers_are_cut_and_what_is_not_finite_is_nan(amax: float) -> None:
    x = numbers((9, 140), torch.float32)
    x[5, 7], x[6, 7], x[7, 7] = math.inf, -math.inf, math.nan
    for dtype in (E4M3, E5M2):
        for pow2 in (True, False):
            options = {"powers_of_two": pow2, "amax": torch.tensor(amax)}
            ours = float8.cast_blocks(x, dtype, (0, 0), **options)  # type: ignore[arg-type]
            theirs = float8.cast_blocks_reference(x, dtype, (0, 0), **options)  # type: ignore[arg-type]
            assert all(same_bits(mine, other) for mine, other in zip(ours, theirs, strict=True))


# --- products -----------------------------------------------------------------------------------


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the order of fp32 sums, and a last bit of bf16 where it decides."""
    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-300)
    assert error < (1e-6 if dtype == torch.float32 else 2e-3), float(error)


@pytest.mark.parametrize("height", [1, 128])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 129, 200), (3, 260, 128)], ids=str)
def test_a_scaled_product_is_its_reference(sizes: tuple[int, int, int], height: int) -> None:
    m, n, k = sizes
    for pow2, dtype in (True, torch.bfloat16), (False, torch.float32):
        a = cast(torch.randn(m, k, generator=generator(1)), E4M3, (1, 128), powers_of_two=pow2)
        b = cast(torch.randn(n, k, generator=generator(2)), E4M3, (height, 128), powers_of_two=pow2)
        arguments = (a.values, a.scale, b.values, b.scale, height, dtype)
        expected = float8.scaled_matmul_reference(*arguments)
        assert_near(multiply(a, b, dtype=dtype, emulate=False), expected, dtype)
        turned = (a.values.t().contiguous().t(), a.scale.t().contiguous().t(), *arguments[2:])
        assert_near(float8.scaled_matmul(*turned), expected, dtype)


@pytest.mark.parametrize(("spoilt", "height"), [("a", 128), ("b", 128), ("b", 1)])
def test_an_infinity_reaches_each_number_of_which_it_is_a_term(spoilt: str, height: int) -> None:
    """And no other, though it lies behind the end of the row before it."""
    for pow2 in (True, False):
        x = {"a": torch.randn(5, 150), "b": torch.randn(140, 150)}
        x[spoilt][3, 5] = math.inf
        a = cast(x["a"], E4M3, (1, 128), powers_of_two=pow2)
        b = cast(x["b"], E4M3, (height, 128), powers_of_two=pow2)
        out = multiply(a, b, dtype=torch.float32, emulate=False)
        expected = torch.zeros(5, 140, dtype=torch.bool)
        if spoilt == "a":
            expected[3] = True
        else:
            expected[:, slice(3, 4) if height == 1 else slice(128)] = True
        assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((33, 160, 144), torch.bfloat16), ((1, 16, 16), torch.float32)], ids=str
)
def test_a_blockwise_linear_by_kernels_is_the_one_emulated(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, features_in, features_out = sizes
    x = torch.randn(tokens, features_in, generator=generator()).to(dtype)
    grad = 1e-6 * torch.randn(tokens, features_out, generator=generator(1)).to(dtype)
    found = []
    for emulate in (False, True):
        torch.manual_seed(0)
        linear = torch.nn.Linear(features_in, features_out, bias=False, dtype=dtype)
        linear.__class__ = Float8Linear
        linear.recipe = replace(RECIPES["blockwise"], emulate=emulate)  # type: ignore[assignment]
        leaf = x.clone().requires_grad_()
        out = linear(leaf)
        found.append((out, *torch.autograd.grad(out, (leaf, linear.weight), grad)))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, dtype)


# --- rows ---------------------------------------------------------------------------------------

ROWS = [(1, 1, 1), (5, 1, 7), (7, 3, 40), (3, 2, 2100), (0, 2, 8)]  # tokens, top k, width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ROWS, ids=str)
def test_rows_go_to_the_order_of_experts_and_back_as_in_the_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Results, and gradients of tokens, rows and weights; upstream gradients of any strides."""
    tokens, top_k, width = sizes
    order = torch.randperm(tokens * top_k, generator=generator())
    x = torch.randn(tokens, width, generator=generator(1)).to(dtype).requires_grad_()
    rows = torch.randn(tokens * top_k, width, generator=generator(2)).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=generator(3), requires_grad=True)
    grad_rows = torch.randn(width, tokens * top_k, generator=generator(4)).to(dtype).t()
    grad_x = torch.randn(1, width, generator=generator(5)).to(dtype).expand(tokens, width)
    gathered = permute.gather_rows(x, order, top_k)
    expected = permute.gather_rows_reference(x, order, top_k)
    assert torch.equal(gathered, expected)
    # In fp64: the reference adds gradients in the dtype of x, a rounding a choice.
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    exact = exact.index_add(0, order // top_k, grad_rows.double()).to(dtype)
    assert_near(torch.autograd.grad(gathered, x, grad_rows)[0], exact, dtype)
    combined = permute.combine_rows(rows, order, weights)
    expected = permute.combine_rows_reference(rows, order, weights)
    assert_near(combined, expected, dtype)
    ours = torch.autograd.grad(combined, (rows, weights), grad_x)
    theirs = torch.autograd.grad(expected, (rows, weights), grad_x)
    assert_near(ours[0], theirs[0], dtype)
    assert (ours[1].dtype, ours[1].shape) == (torch.float32, weights.shape)
    assert_near(ours[1].to(dtype), theirs[1].to(dtype), dtype)


@pytest.mark.parametrize("bad", [0.0, math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_its_rows_and_tokens_and_no_others(bad: float) -> None:
    order = torch.randperm(6, generator=generator())
    x, weights = torch.randn(3, 40, generator=generator(1)), torch.ones(3, 2)
    x[1, 5] = bad
    rows = permute.gather_rows(x, order, 2)
    assert same_bits(rows, permute.gather_rows_reference(x, order, 2))
    combined = permute.combine_rows(rows, order, weights)
    assert same_bits(combined, permute.combine_rows_reference(rows, order, weights))
    assert torch.equal(combined.isfinite(), x.isfinite())


def test_a_mixture_of_experts_computes_the_same_with_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModelConfig(
        hidden_size=16,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    torch.manual_seed(0)
    layer = moe.MoE(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, grad = torch.randn(2, 9, 16, requires_grad=True), torch.randn(2, 9, 16)
    found = []
    for functions in (
        (permute.gather_rows, permute.combine_rows),
        (
            permute.gather_rows_reference,
            permute.combine_rows_reference,
        ),
    ):
        monkeypatch.setattr(moe, "gather_rows", functions[0])
        monkeypatch.setattr(moe, "combine_rows", functions[1])
        out = layer(x)
        found.append((out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- operators ----------------------------------------------------------------------------------


def test_operators_tell_shapes_and_dtypes_without_running() -> None:
    """torch's own check: schema, fake tensors, and that nothing given is written to."""
    checks = ("test_schema", "test_faketensor")
    order, places = torch.tensor([1, 2, 0, 3]), torch.tensor([[2, 0], [1, 3]])
    rows, weights = torch.randn(4, 8), torch.rand(2, 2)
    a, b = (cast(torch.randn(5, 130), E4M3, block, powers_of_two=True) for block in BLOCKS[2:])
    calls = [
        (permute._gather, (rows[:2], order, 2, None)),
        (permute._gather, (rows[:2], order, 2, weights)),
        (permute._combine, (rows, places, weights)),
        (permute._dot_rows, (rows[:2], rows, places)),
        *((float8._cast_blocks, (rows.t(), E4M3, *block, True, None)) for block in BLOCKS),
        (float8._cast_blocks, (rows, E5M2, 0, 0, False, torch.tensor(1.0))),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=checks)
    arguments = (a.values, a.scale, b.values, b.scale, 128, torch.bfloat16)
    torch.library.opcheck(float8.scaled_matmul, arguments, test_utils=checks[1])  # knows no float8


def test_compiled_in_one_graph_kernels_compute_the_same() -> None:
    """Casts, products and rows, forward and backward; a graph holds operators in their place."""
    linear = torch.nn.Linear(16, 32, bias=False)
    linear.__class__ = Float8Linear
    linear.recipe = replace(RECIPES["blockwise"], emulate=False)  # type: ignore[assignment]
    order, weights = torch.tensor([1, 2, 0, 3]), torch.rand(2, 2, requires_grad=True)
    x = torch.randn(2, 16, generator=generator(), requires_grad=True)

    def run(x: Tensor, weights: Tensor) -> Tensor:
        rows = linear(permute.gather_rows(x, order, 2))
        return permute.combine_rows(rows, order, weights)

    found = []
    for function in run, torch.compile(run, backend="aot_eager", fullgraph=True):
        out = function(x, weights)
        grads = torch.autograd.grad(out.square().sum(), (x, weights, linear.weight))
        found.append((out, *grads))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
