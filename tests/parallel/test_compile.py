"""What is compiled, counted in graphs; what is no graph is noticed; what cannot be one is refused.

On one process, over graphs that run their operators as they are (aot_eager) or in front of a
compiler that counts them. That a compiled run equals an eager one: tests/parity/test_compile.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.config.cases import Shape, degrees, problems, warnings
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.parallel.compile import CompiledForward, CompiledParts, apply_compile

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    max_position_embeddings=24,
)
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
BOTH = ["model", "loss"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of the whole process
    with torch._dynamo.config.patch():  # whatever a test sets is set back
        yield
    torch._dynamo.reset()


def build(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(CONFIG, **changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def train(model: Decoder, *, seq: int = 24) -> float:
    tokens = torch.arange(2 * seq).view(2, seq) % CONFIG.vocab_size
    loss = model(tokens, labels=tokens.roll(-1, 1))[0]
    loss.backward()
    return loss.item()


def compiled(model: Decoder, backend: Any = "aot_eager", components: Any = BOTH) -> CompiledParts:
    apply_compile(model, components=components, backend=backend)
    return CompiledParts([model])


def pieces(model: Decoder) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m.forward, CompiledForward)}


def test_layers_that_are_alike_share_a_graph_and_the_loss_has_one() -> None:
    model = build()
    names = [name for name, _ in model.named_parameters()], list(model.state_dict())
    expected = train(model)
    parts = compiled(model)
    assert parts.num_graphs == 0
    assert train(model) == expected
    assert parts.num_graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert {piece.graphs.num_calls for piece in parts.pieces} == {5}  # four layers and the loss
    assert ([name for name, _ in model.named_parameters()], list(model.state_dict())) == names


@pytest.mark.parametrize(
    ("components", "found"),
    [
        (["loss"], {"lm_head.token_loss"}),
        (["model"], {f"layers.{i}" for i in range(4)}),
        (BOTH, {"lm_head.token_loss", *(f"layers.{i}" for i in range(4))}),
    ],
)
def test_components_are_what_is_compiled(components: list[str], found: set[str]) -> None:
    model = build()
    compiled(model, components=components)
    assert pieces(model) == found


def test_of_a_layer_with_experts_attention_and_shared_expert_are_compiled() -> None:
    model = build(**EXPERTS, first_k_dense_replace=1)
    expected = train(model)
    parts = compiled(model, components=["model"])
    assert pieces(model) == {
        "layers.0",
        *(f"layers.{i}.self_attn" for i in (1, 2, 3)),
        *(f"layers.{i}.mlp.shared_expert" for i in (1, 2, 3)),
    }
    assert train(model) == pytest.approx(expected, rel=1e-6)
    assert parts.num_graphs == 3


def test_more_layers_of_different_graphs_than_the_compiler_allows_a_function() -> None:
    """A number that differs, here the scale, is a constant of a layer's graph; torch stops at 8."""
    model = build(num_hidden_layers=10)
    for index, layer in enumerate(model.layers.values()):
        layer.self_attn.core_attention.scale = 0.1 * (index + 1)
    parts = compiled(model, backend="eager", components=["model"])
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert parts.num_graphs == 10


def test_only_another_shape_makes_another_graph() -> None:
    model = build()
    parts = compiled(model)
    train(model)
    parts.after_first_step()
    train(model)
    train(model)
    assert parts.recompilations == 0
    train(model, seq=16)
    assert parts.recompilations == 2
    train(model, seq=16)
    train(model)
    assert parts.recompilations == 2


def test_a_graph_break_is_an_error_that_names_the_layer() -> None:
    model = build()
    activation = model.layers["2"].mlp.activation

    def breaking(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return activation(x)

    model.layers["2"].mlp.activation = breaking
    compiled(model)
    with pytest.raises(RuntimeError, match="compile.enable = true: layers.2 is no single graph"):
        train(model)


def test_what_was_compiled_is_told() -> None:
    model = build(**EXPERTS, first_k_dense_replace=1)
    parts = compiled(model)
    train(model)
    assert parts.after_first_step() == (
        "compiled: 4 graphs for 1 x layers.*, 3 x layers.*.self_attn, "
        "3 x layers.*.mlp.shared_expert, 1 x lm_head.token_loss",
        "",
    )


def test_layers_that_run_eagerly_all_the_same_are_named() -> None:
    model = build()
    parts = compiled(model, components=["model"])
    with torch.compiler.set_stance("force_eager"):
        train(model)
    told, warning = parts.after_first_step()
    assert told == "compiled: 0 graphs for 4 x layers.*"
    assert "layers.0, layers.1, layers.2, layers.3 ran without a graph" in warning


# --- recomputation ------------------------------------------------------------------------------


class CountingCompiler:
    """aot_eager that counts the matmuls of each graph of a layer's backward."""

    def __init__(self) -> None:
        self.backward: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from functorch.compile import make_boxed_func

        def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            return make_boxed_func(graph.forward)

        def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            self.backward.append(sum(node.target in matmuls for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)


@pytest.mark.parametrize(
    ("mode", "option", "matmuls"),
    [
        # Seven in forward: q k v o gate up down. Twice as many in backward.
        ("none", "2", [14]),
        # Every second one is kept: k, o and up. Nothing reads what down gives.
        ("selective", "op", [14 + 3]),
        # The graph is that of a layer that keeps everything, and its forward runs twice.
        ("full", "2", [14]),
    ],
)
def test_what_is_kept_of_a_layer_is_decided_inside_of_its_graph(
    mode: str, option: str, matmuls: list[int]
) -> None:
    model, compiler = build(), CountingCompiler()
    expected = train(model)
    apply_activation_checkpointing(model, mode=mode, selective_option=option)
    parts = compiled(model, backend=compiler, components=["model"])
    assert train(model) == expected
    assert compiler.backward == matmuls
    forwards = 8 if mode == "full" else 4
    assert parts.pieces[0].graphs.num_calls == forwards
    assert not [piece.name for piece in parts.pieces if piece.num_eager_calls]


# --- the configuration --------------------------------------------------------------------------

ON = ["--compile.enable"]
PER_OP = ["--activation_checkpoint.selective_ac_option=op"]
RING, ULYSSES = (f"--parallelism.context_parallel_method={m}" for m in ("ring", "ulysses"))
DOCUMENTS = "--training.document_mask"
LOSS = "--compile.components=loss"
WITH_EXPERTS = Shape(num_experts=4)


@pytest.mark.parametrize(
    ("argv", "world", "shape", "told"),
    [
        (["--compile.components="], 1, Shape(),
         "compile.components = []|nothing would be compiled; name model, loss or both, or set "
         "compile.enable to false"),
        (["--compile.backend=gcc"], 1, Shape(),
         'compile.backend = "gcc"|torch has no such compiler, but '),
        ([*degrees(cp=2), RING], 2, Shape(),
         'parallelism.context_parallel_method = "ring"|messages from rank to rank are part of no '
         "graph; set parallelism.context_parallel_method to allgather or ulysses, or "
         "compile.components to loss"),
        ([*degrees(cp=2), DOCUMENTS], 2, Shape(),
         "parallelism.context_parallel_degree = 2|the host reads where documents end, and that is "
         "part of no graph; set parallelism.context_parallel_method to ulysses, or "
         "compile.components to loss"),
        (PER_OP, 1, WITH_EXPERTS,
         'activation_checkpoint.selective_ac_option = "op"|layers with experts are compiled in '
         "pieces, and of what lies outside of a piece no operator can be kept; set it to a "
         "number, or compile.components to loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_graph_is_refused(
    argv: list[str], world: int, shape: Shape, told: str
) -> None:
    (line,) = problems([*ON, *argv], world=world, shape=shape)
    setting, reason = told.split("|")
    assert line.startswith(setting) and f": {reason}" in line, line
    if "components" not in argv[0]:
        assert problems(argv, world=world, shape=shape) == []  # without compile.enable
    if reason.endswith("to loss"):
        assert problems([*ON, *argv, LOSS], world=world, shape=shape) == []


@pytest.mark.parametrize(
    ("argv", "world", "shape"),
    [
        ([], 1, Shape()),
        (["--compile.backend=aot_eager"], 1, Shape()),
        (degrees(cp=2), 2, Shape()),
        ([*degrees(cp=2), ULYSSES, DOCUMENTS], 2, Shape()),
        (PER_OP, 1, Shape()),
        ([], 1, WITH_EXPERTS),
    ],
)
def test_what_can_be_a_graph_passes(argv: list[str], world: int, shape: Shape) -> None:
    assert problems([*ON, *argv], world=world, shape=shape) == []


def test_a_split_backward_is_told_to_run_twice() -> None:
    quiet = ["--lr_scheduler.warmup_steps=1", *degrees(pp=2)]
    split = [*quiet, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
    (line,) = warnings([*ON, *split], world=2)
    assert "splits the backward, which a compiled layer then runs twice; 1F1B" in line
    assert warnings(split, world=2) == warnings([*ON, *quiet], world=2) == []
