"""The head and the routers in float8, where they are named: numbers, meshes, what is refused."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.parity.harness import Mesh, assert_equal, relative_error, run
from tests.parity.test_compile import COMPILED
from tests.precision.test_float8 import linear, products, tensors
from tests.precision.test_linear import DENSE, configure, meta
from tests.precision.test_linear import MIXTURE as SMALL
from tests.precision.test_meshes import MIXTURE, WIDE, largest_gradient_error, options
from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.ops.cross_entropy import Products, linear_cross_entropy
from torchtitan_lite.precision.float8 import RECIPES
from torchtitan_lite.precision.linear import (
    announce_float8,
    apply_float8,
    float8_linear,
    head_products,
)

SLOW = pytest.mark.slow
INCLUDE = "quantize.linear.float8.include_fqns"


@pytest.mark.parametrize(("num_chunks", "powers_of_two"), [(1, True), (3, True), (1, False)])
@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_is_that_of_logits_by_a_float8_linear(
    name: str, num_chunks: int, powers_of_two: bool
) -> None:
    """However many chunks there are under powers of two; other scales tell block from block."""
    recipe = dataclasses.replace(RECIPES[name], powers_of_two=powers_of_two)
    x, w, _ = tensors((96, 64, 128), torch.float32)
    labels = torch.arange(96) % 120
    labels[5:20] = -100
    x.requires_grad_()
    reference = linear(20 * w, recipe)
    expected = F.cross_entropy(reference(x)[:, :120], labels, ignore_index=-100, reduction="sum")
    expected.backward()
    assert x.grad is not None and reference.weight.grad is not None
    dx, x.grad = x.grad, None
    weight = (20 * w).requires_grad_()
    made = partial(head_products, recipe=recipe)
    options = {"vocab_size": 120, "num_chunks": num_chunks}
    loss = linear_cross_entropy(x, weight, labels, **options, products=made)[0]
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(x.grad, dx) < 1e-5
    assert relative_error(weight.grad, reference.weight.grad) < 1e-5
    high = linear_cross_entropy(x, weight, labels, **options, products=Products.of)[0]
    assert abs(high.item() - loss.item()) > 1e-5 * high.item()


@pytest.mark.parametrize("name", RECIPES)
def test_a_router_multiplies_as_a_float8_linear(name: str) -> None:
    x, w, g = tensors((96, 64, 48), torch.float32)
    expected = dict(products(linear(w, RECIPES[name]), x, g))
    x, w = x.view(2, 48, 64).requires_grad_(), w.requires_grad_()
    out = float8_linear(x, w, recipe=RECIPES[name])
    out.backward(g.view(2, 48, 48))
    assert x.grad is not None and w.grad is not None
    for ours, what in ((out, "out"), (x.grad, "dx"), (w.grad, "weight")):
        assert torch.equal(ours.flatten(), expected[what].flatten())
    assert float8_linear(x[:, :0], w, recipe=RECIPES[name]).shape == (2, 0, 48)


# --- the real Trainer ----------------------------------------------------------------------------

EP2 = {"parallelism.expert_parallel_degree": 2}
MESHES: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(dp_shard=2, tp=2), EP2),
    (Mesh(tp=2), {"parallelism.disable_loss_parallel": True}),
    (Mesh(pp=2), {}),
    (Mesh(), {"loss.num_chunks": 1, "activation_checkpoint.mode": "full"}),
    (Mesh(), {**COMPILED, "compile.components": ["loss"]}),
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
    common = options(name) | {INCLUDE: ["lm_head", "mlp.gate"]}
    one = run(Mesh(), common, MIXTURE)
    assert_equal(run(mesh, common | more, MIXTURE), one)
    for entry in ("lm_head", "mlp.gate"):
        part = run(Mesh(), common | {INCLUDE: [entry]}, MIXTURE)
        assert largest_gradient_error(one, part) > 0.01


@SLOW
def test_a_tied_head_is_swapped_alone() -> None:
    tied = dataclasses.replace(WIDE, tie_word_embeddings=True)
    common = options("rowwise") | {INCLUDE: ["lm_head"]}
    assert_equal(run(Mesh(pp=2), common, tied), run(Mesh(), common, tied))


# --- which are swapped ---------------------------------------------------------------------------


def including(*entries: str, recipe: str = "rowwise", filters: tuple[str, ...] = ()) -> Config:
    config = configure(recipe, *filters)
    config.quantize.linear.float8.include_fqns = list(entries)
    return config


def swapped(config: Config) -> list[str]:
    apply_float8(part := meta(SMALL), config)
    assert part.lm_head is not None
    head = ["lm_head"] if "products" in part.lm_head.token_loss.extra else []
    routers = [n for n, m in part.named_modules() if getattr(m, "linear", F.linear) != F.linear]
    assert type(part.lm_head).__name__ == "LMHead"
    return head + routers


def test_what_is_named_is_swapped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    routers = ["layers.0.mlp.gate", "layers.1.mlp.gate"]
    assert swapped(including()) == []
    assert swapped(including("lm_head")) == ["lm_head"]
    assert swapped(including("mlp.gate", "lm_head")) == ["lm_head", *routers]
    assert swapped(including("layers.1.mlp.gate")) == routers[1:]
    assert swapped(including("gate", filters=("layers.0.",))) == routers[1:]
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    announce_float8(meta(SMALL), including("lm_head", "gate"))
    (record,) = caplog.records
    assert record.message == (
        "float8 rowwise, cpu kernels: 11 of 19 linears; left are "
        "8 of sizes that 16 does not divide (layers.0.mlp.shared_expert.gate_proj)"
    )


def test_an_entry_that_names_neither_a_head_nor_a_router_is_refused() -> None:
    for model, entry, there in (
        (SMALL, "q_proj", "layers.0.mlp.gate, layers.1.mlp.gate"),
        (DENSE, "gate", "lm_head"),
    ):
        with pytest.raises(ConfigError) as error:
            announce_float8(meta(model), including("lm_head", entry))
        assert str(error.value) == (
            f"{INCLUDE} = {entry}: neither a head nor a router has it in its name, but there are "
            f"{there}; remove it (linears of the layers are swapped unless filter_fqns names them)"
        )
