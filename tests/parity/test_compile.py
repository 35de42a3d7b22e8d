"""A compiled run equals the eager one: losses, gradient norms, gradients, parameters.

Each row is four optimizer steps of the real Trainer with compile.enable, held against one process
in eager mode. aot_eager captures the same graphs of forward and backward as inductor, and runs
their operators as they are. Each row also counts graphs: every rank has some, and makes none after
the first step, since all shapes are fixed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.parity.harness import TINY, Mesh, RecordingTrainer, assert_equal, reference, run
from torchtitan_lite.observe.metrics import Record
from torchtitan_lite.parallel.compile import CompiledParts

COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
BUDGET = {"activation_checkpoint.mode": "memory_budget"}
DOCUMENTS = {"training.document_mask": True}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 16,
}
STATE_SPACE = {
    "layer_type": "state_space",
    "intermediate_size": 80,
    "state_size": 4,
    "time_step_rank": 3,
    "conv_kernel": 4,
}
DROPOUT = {"residual_dropout": 0.1, "attention_dropout": 0.1, "num_hidden_layers": 10}


class CountingTrainer(RecordingTrainer):
    """Keeps how many graphs there are after each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: list[int] = []
        self.compiled = CompiledParts(self.model.parts)

    def train_step(self) -> Record:
        record = super().train_step()
        self.graphs.append(self.compiled.num_graphs)
        return record

    def train(self) -> Any:
        super().train()
        return self.graphs, [piece.name for piece in self.compiled.pieces if piece.num_eager_calls]


def schedule(name: str) -> dict[str, Any]:
    return {"parallelism.pipeline_parallel_schedule": name}


def row(name: str, mesh: Mesh, *options: dict[str, Any], quick: bool = False, **model: Any) -> Any:
    merged = {key: value for some in options for key, value in some.items()}
    marks = () if quick else pytest.mark.slow
    return pytest.param(mesh, merged, model, id=name, marks=marks)


ROWS = [
    row("one", Mesh(), quick=True),
    row("dp2-tp2-recomputed", Mesh(dp_shard=2, tp=2), FULL),
    row("dp2", Mesh(dp_shard=2), quick=True),
    row("tp2", Mesh(tp=2)),
    row("dp2-tp2", Mesh(dp_shard=2, tp=2)),
    row("pp2", Mesh(pp=2)),
    row("cp2", Mesh(cp=2)),
    row("ep2", Mesh(dp_shard=2), {"parallelism.expert_parallel_degree": 2}, **EXPERTS),
    row("ep2-recomputed", Mesh(dp_shard=2, tp=2), {"parallelism.expert_parallel_degree": 2}, FULL,
        **EXPERTS),
    row("one-recomputed", Mesh(), FULL),
    row("pp2-recomputed", Mesh(pp=2), FULL),
    row("every-second-layer", Mesh(dp_shard=2), {"activation_checkpoint.mode": "selective"}),
    row("per-op", Mesh(), PER_OP),
    row("tp2-per-op", Mesh(tp=2), PER_OP),
    row("cp2-per-op", Mesh(cp=2), PER_OP),
    row("accumulation", Mesh(dp_shard=2), {"training.local_batch_size": 2,
                                           "parallelism.zero_stage": 1}),
    row("zero0", Mesh(dp_shard=2), {"parallelism.zero_stage": 0}),
    row("no-sp", Mesh(tp=2), {"parallelism.enable_sequence_parallel": False}),
    row("no-loss-parallel", Mesh(tp=2), {"parallelism.disable_loss_parallel": True}),
    row("ulysses", Mesh(cp=2), {"parallelism.context_parallel_method": "ulysses"}),
    row("documents", Mesh(tp=2), DOCUMENTS),
    row("documents-ulysses", Mesh(cp=2), DOCUMENTS,
        {"parallelism.context_parallel_method": "ulysses"}),
    row("documents-per-op", Mesh(), DOCUMENTS, PER_OP),
    row("budget", Mesh(), BUDGET, {"activation_checkpoint.memory_budget": 0.0}),
    row("budget-dp2-tp2", Mesh(dp_shard=2, tp=2), BUDGET),
    row("budget-cp2", Mesh(cp=2), BUDGET, {"activation_checkpoint.memory_budget": 0.1}),
    row("budget-pp2-ZBVZeroBubble", Mesh(pp=2), BUDGET, schedule("ZBVZeroBubble")),
    row("window", Mesh(), sliding_window=8, max_window_layers=2),
    row("latent", Mesh(tp=2), **LATENT),
    row("state-space", Mesh(), **STATE_SPACE),
    row("dropout-in-ten-layers", Mesh(tp=2), **DROPOUT),
    row("loss-alone", Mesh(tp=2), {"compile.components": ["loss"]}),
    row("model-alone", Mesh(tp=2), {"compile.components": ["model"]}),
    *(
        row(f"pp2-{name}", Mesh(pp=2), schedule(name), {"parallelism.zero_stage": 2})
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    row("pp2-ZBVZeroBubble-recomputed", Mesh(pp=2), schedule("ZBVZeroBubble"), FULL),
    row("inductor", Mesh(), {"compile.backend": "inductor"}),
    row("inductor-dp2-tp2", Mesh(dp_shard=2, tp=2), {"compile.backend": "inductor"}, FULL),
    row("inductor-budget", Mesh(tp=2), {"compile.backend": "inductor"}, BUDGET),
    row("inductor-DualPipeV", Mesh(pp=2), {"compile.backend": "inductor"}, schedule("DualPipeV")),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "options", "changes"), ROWS)
def test_compiled_equals_eager(
    mesh: Mesh, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    eager = {name: value for name, value in options.items() if not name.startswith("compile.")}
    model = dataclasses.replace(TINY, **changes)
    compiled = run(mesh, {**COMPILED, **options}, model, trainer=CountingTrainer, timeout=300.0,
                   act=CountingTrainer.train)  # fmt: skip
    assert_equal(compiled, reference(eager, changes))
    for graphs, eager_pieces in compiled.returned:
        assert eager_pieces == []
        assert graphs[0] > 0 and set(graphs) == {graphs[0]}, graphs
