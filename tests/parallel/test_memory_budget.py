"""activation_checkpoint.mode = memory_budget: the compiler keeps a share, and makes the rest again.

Bytes are those of the saved tensors of one layer more: parameters and what all layers share (the
angles of positions) drop out. That such runs equal eager ones: tests/parity/test_compile.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from tests.config.cases import Shape, problems
from tests.parallel.test_compile import (
    CONFIG,
    _fresh_compiler,  # noqa: F401  (a fixture)
    build,
    train,
)
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.parallel.compile import apply_compile

TOKENS, FLOAT = 2 * 24, 4


def make(num_layers: int, budget: float, backend: Any = "aot_eager") -> Decoder:
    model = build(num_hidden_layers=num_layers)
    apply_activation_checkpointing(model, mode="memory_budget", selective_option="2")
    apply_compile(model, components=["model", "loss"], backend=backend, memory_budget=budget)
    return model


def bytes_saved(model: Decoder) -> int:
    """Of all storages but the parameters' that a forward leaves for its backward."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train(model)
    return sum(saved.values())


def bytes_of_a_layer(budget: float | None) -> int:
    """Without a budget: of the layer as it is without any recomputation, not compiled."""
    if budget is None:
        return bytes_saved(build(num_hidden_layers=2)) - bytes_saved(build(num_hidden_layers=1))
    return bytes_saved(make(2, budget)) - bytes_saved(make(1, budget))


def test_what_a_layer_keeps_shrinks_with_the_budget_down_to_its_input() -> None:
    kept = [bytes_of_a_layer(budget) for budget in (1.0, 0.5, 0.0)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
    only_input = TOKENS * CONFIG.hidden_size * FLOAT
    assert kept[-1] == only_input, "as much as of a layer under mode full"


def test_a_whole_budget_keeps_what_a_compiled_layer_keeps_without_one() -> None:
    model = build(num_hidden_layers=2)
    apply_compile(model, components=["model", "loss"], backend="aot_eager")
    assert bytes_saved(model) == bytes_saved(make(2, 1.0))
    # The partitioner always computes again what costs next to nothing: less than eager keeps.
    assert bytes_of_a_layer(1.0) <= bytes_of_a_layer(None)


@pytest.mark.parametrize(("budget", "matmuls"), [(1.0, 14), (0.0, 14 + 6)])
def test_the_rest_is_computed_again_in_backward(budget: float, matmuls: int) -> None:
    """Seven matmuls in forward, of which down's has no reader; twice as many in backward."""
    counted = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counted.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    model = make(2, budget, backend=compiler)
    expected = train(build(num_hidden_layers=2))
    assert train(model) == pytest.approx(expected, rel=1e-6)
    # The loss forms its gradient in forward, and nothing of it is computed again.
    assert counted == [0, matmuls]


def test_gradients_are_those_of_a_whole_budget_to_the_bit() -> None:
    found = []
    for budget in (1.0, 0.5, 0.0):
        model = make(2, budget)
        train(model)
        found.append([parameter.grad for parameter in model.parameters()])
    for ours in found[1:]:
        for one, other in zip(ours, found[0], strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


def test_a_budget_is_that_of_one_model_and_leaves_the_process_as_it_was() -> None:
    thrifty, whole = make(2, 0.0), make(2, 1.0)
    assert functorch.activation_memory_budget == 1.0
    assert bytes_saved(thrifty) < bytes_saved(whole)
    assert functorch.activation_memory_budget == 1.0


MODE = "--activation_checkpoint.mode=memory_budget"


@pytest.mark.parametrize(
    ("argv", "shape", "told"),
    [
        ([], Shape(), "chosen by the compiler of the layers, which is off; set compile.enable to"),
        (["--compile.enable", "--compile.components=loss"], Shape(), "with model among compile."),
        (
            ["--compile.enable", "--compile.backend=eager"],
            Shape(),
            "set compile.backend to induc",
        ),
        (["--compile.enable"], Shape(num_experts=4), "would be kept whatever the budget; use full"),
    ],
)
def test_a_budget_that_nothing_could_keep_to_is_refused(
    argv: list[str], shape: Shape, told: str
) -> None:
    (line,) = problems([MODE, *argv], shape=shape)
    assert line.startswith('activation_checkpoint.mode = "memory_budget"') and told in line
    assert problems(argv, shape=shape) == []
    assert problems([MODE, "--compile.enable"]) == []
