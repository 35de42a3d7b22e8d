"""torch.compile, a piece at a time: forward and backward of a layer become one graph each.

The compiler sees a layer and never the model: it works for seconds instead of minutes, layers that
are alike share a graph, and FSDP's hooks, which stand around a layer, stay outside. A piece is one
graph or an error (`fullgraph`), never eager in silence; what cannot be captured is in no piece:

    dense layer, state space    the layer
    layer with experts          its attention and its shared expert; the host reads how many rows
                                each expert gets
    head                        the loss from hidden states (component "loss")

`forward` is compiled in place, so no module and no parameter changes its name. A layer that is
computed again as a whole calls its graph twice. Which operators of a layer are kept can be said
only inside of a graph: there, activation checkpointing is captured with the layer.

Exchanges between ranks that are operators are captured too, those of tensor parallelism and of two
methods of context parallelism; what is refused is in config/model_checks.py.
Proven in tests/parallel/test_compile.py and tests/parity/test_compile.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from logging import Logger
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import MoE

# Training and evaluation, each with a last batch that is shorter.
GRAPHS_OF_A_LAYER = 4


class Graphs:
    """Compiles what one part of a model captures, and counts: graphs made, graphs called.

    Of what a graph's backward needs, `memory_budget` is the share that is kept: torch's partitioner
    computes the rest again, what costs least a byte first.
    """

    def __init__(self, backend: str, memory_budget: float = 1.0) -> None:
        self.backend, self.memory_budget = backend, memory_budget
        self.num_made = self.num_calls = 0

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """What torch.compile takes as its backend."""
        self.num_made += 1
        # Settings of the process, which the partitioner reads here and nowhere later.
        with torch._functorch.config.patch(
            activation_memory_budget=self.memory_budget,
            # Those among a graph's inputs are process groups: no bytes that it could keep.
            unsafe_treat_script_objects_as_zero_size=True,
        ):
            compute = torch._dynamo.lookup_backend(self.backend)(graph, inputs)

        def compute_and_count(*args: Any) -> Any:
            self.num_calls += 1
            return compute(*args)

        return compute_and_count


class CompiledForward:
    """The forward of the module `name`, as graphs; notices a call in which no graph ran."""

    def __init__(self, name: str, forward: Callable[..., Any], graphs: Graphs) -> None:
        self.name, self.graphs = name, graphs
        self.num_eager_calls = 0
        # Static shapes: a row length that differs gets a graph of its own.
        self._compute = torch.compile(
            forward, backend=graphs.compile, fullgraph=True, dynamic=False
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.graphs.num_calls
        try:
            out = self._compute(*args, **kwargs)
        except Unsupported as error:
            raise RuntimeError(
                f"compile.enable = true: {self.name} is no single graph; leave the component out "
                f"of compile.components, or take out what torch names here:\n{error}"
            ) from error
        self.num_eager_calls += self.graphs.num_calls == before
        return out


def apply_compile(
    model: Decoder,
    *,
    components: Sequence[str],
    backend: str,
    memory_budget: float = 1.0,
    split_backward: bool = False,
) -> None:
    """Compile the pieces of `model`; components: "model" (its layers), "loss", or both.

    `memory_budget` is that of a layer: 1 keeps what eager would. The loss, which forms its gradient
    in forward, has none. `split_backward`: the pipeline's schedule runs a graph's backward twice.
    """
    graphs = Graphs(backend, memory_budget)
    if split_backward:  # a first run must not overwrite what the second one reads
        torch._functorch.config.donated_buffer = False
    if "model" in components:
        # Layers that differ (by a window, by the site of a dropout) have graphs of their own, and
        # all count as one function's. Where the limit is reached, `fullgraph` is an error.
        limit = GRAPHS_OF_A_LAYER * (model.config.num_hidden_layers + 1)
        dynamo.recompile_limit = max(dynamo.recompile_limit, limit)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, limit)
        # A captured layer that is computed again: views of parameters, and a mask kept for the
        # next layer, are put in place by its forward alone.
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        for index, layer in model.layers.items():
            for name, piece in _pieces(layer):
                _compile(piece, f"layers.{index}{name}", graphs)
    if "loss" in components and model.lm_head is not None:
        of_loss = graphs if memory_budget == 1.0 else Graphs(backend)
        _compile(model.lm_head.token_loss, "lm_head.token_loss", of_loss)


def _pieces(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a layer that can be captured whole, as (name below the layer, module)."""
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, MoE):
        yield "", layer
        return
    yield ".self_attn", layer.self_attn  # type: ignore[misc]
    if mlp.shared_expert is not None:
        yield ".mlp.shared_expert", mlp.shared_expert


def _compile(module: nn.Module, name: str, graphs: Graphs) -> None:
    forward: Any = module.forward
    if _is_recomputed(forward):  # as activation.py leaves it
        (compute,), options = forward.args, forward.keywords
        _, choose = options["context_fn"].args
        if not isinstance(choose()[0], TorchDispatchMode):
            compiled = CompiledForward(name, compute, graphs)
            module.forward = partial(checkpoint, compiled, **options)
            return
        # The choice of operators alone: a layer that is captured whole has no router.
        forward = partial(checkpoint, compute, **{**options, "context_fn": choose})
    module.forward = CompiledForward(name, forward, graphs)


class CompiledParts:
    """What was compiled in this rank's parts of a model, for the log and the metrics."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        forwards: list[Any] = [module.forward for part in parts for module in part.modules()]
        within = [f.args[0] if _is_recomputed(f) else f for f in forwards]
        self.pieces = [f for f in within if isinstance(f, CompiledForward)]
        self._made_at_first = 0

    @property
    def num_graphs(self) -> int:
        """Graphs that were made; pieces that are alike share one."""
        return sum(graphs.num_made for graphs in {piece.graphs for piece in self.pieces})

    @property
    def recompilations(self) -> int:
        """Graphs made since the first step."""
        return self.num_graphs - self._made_at_first

    def after_first_step(self) -> tuple[str, str]:
        """To be called once: what was compiled, and a warning of what ran without a graph or ""."""
        self._made_at_first = self.num_graphs
        kinds = Counter(
            ".".join("*" if word.isdigit() else word for word in piece.name.split("."))
            for piece in self.pieces
        )
        told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "nothing"
        eager = [piece.name for piece in self.pieces if piece.num_eager_calls]
        warning = (
            f"compile.enable = true: {', '.join(eager)} ran without a graph; something outside "
            "switches torch.compile off, as TORCH_COMPILE_DISABLE=1 does"
        )
        return f"compiled: {self.num_graphs} graphs for {told}", warning if eager else ""

    def log_after_first_step(self, logger: Logger) -> None:
        """As after_first_step, into the log; nothing where nothing was compiled."""
        if self.pieces:
            line, warning = self.after_first_step()
            logger.info(line)
            if warning:
                logger.warning(warning)


def _is_recomputed(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is checkpoint
