"""What a step communicates, counted exactly, on real ranks.

A dispatch mode sees every collective that torch issues, with its group. Each mesh has two axes
larger than 1, so that no axis's group is the world's and each collective can be told apart by
(axis, operation, phase). Models of two and of three layers separate what a layer costs from what
the ends cost. Every operation that is not known here is an error: nothing goes uncounted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.builder import CPU, configure, mesh_of
from tests.parity.harness import SEQ_LEN, TINY, Mesh, make_source
from tests.world import run_ranks
from torchtitan_lite import build
from torchtitan_lite.config import Config
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import ParallelMesh
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import LMHead
from torchtitan_lite.models.moe import Router
from torchtitan_lite.parallel import tensor
from torchtitan_lite.trainer import Trainer

NUM_CHUNKS = 3  # the harness's loss.num_chunks

SHARDED = Mesh(dp_shard=2, tp=2)
HYBRID = Mesh(dp_replicate=2, dp_shard=2)
PIPELINED = Mesh(pp=2, dp_shard=2)

Counts = dict[tuple[str, str, str], int]  # (axis, operation, phase) -> how often

OPERATIONS = {
    "_allgather_base_": "gather",  # FSDP
    "all_gather_into_tensor": "gather",  # the tensor-parallel plan
    "_reduce_scatter_base_": "scatter",
    "reduce_scatter_tensor": "scatter",
    "allreduce_": "reduce",
    "all_reduce": "reduce",
    "all_to_all_single": "exchange",
    "send": "send",
    "recv_": "receive",
}
NO_MESSAGE = {"wait_tensor", "_wrap_tensor_autograd"}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by (axis of their group, operation, forward or backward)."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        views = (mesh.pp, mesh.tp, mesh.fsdp, mesh.ep, mesh.efsdp)
        axes = [(axis, view) for view in views for axis in view.mesh_dim_names or ()]
        self.axes = {str(view.get_group(axis).group_name): axis for axis, view in axes}
        self.axes[str(dist.group.WORLD.group_name)] = "world"  # type: ignore[union-attr]
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in NO_MESSAGE:
            in_backward = torch._C._current_graph_task_id() != -1
            axis = self.axes[_group_name((*args, *(kwargs or {}).values()))]
            self.counts[axis, OPERATIONS[name], "backward" if in_backward else "forward"] += 1
        return func(*args, **(kwargs or {}))


def _group_name(arguments: tuple[Any, ...]) -> str:
    """The name of the group that a collective was given: by object, or, last of all, by name."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).group_name
    return [argument for argument in arguments if isinstance(argument, str)][-1]


def _count_steps(cases: list[tuple[Config, ModelConfig]], num_steps: int) -> list[Counts]:
    """The last of `num_steps` forwards and backwards of this rank's rows, in each case."""
    # One mesh for all: DTensor takes equal meshes for the same, and would mix up their groups.
    mesh = mesh_of(cases[0][0])
    found = []
    for config, model_config in cases:
        with CollectiveCounter(mesh) as building:
            model = build.build_model(config, model_config, mesh, CPU)
        assert not building.counts, f"each rank cuts its own weights, and yet: {building.counts}"
        for module in model.parts[0].modules():
            if isinstance(module, Router):
                module.balance.auxiliary_weight = config.moe.aux_loss_weight
        rows = config.training.global_batch_size // mesh.degrees.batch
        tokens = torch.zeros(rows, SEQ_LEN, dtype=torch.int64)
        size = config.training.local_batch_size  # 1 with a pipeline, as its micro-batch is
        for _ in range(num_steps):
            with CollectiveCounter(mesh) as counter:
                model.train(tokens, tokens, loss=GlobalBatchLoss(CPU), micro_batch_size=size)
        found.append(dict(counter.counts))
    return found


def count(
    mesh: Mesh, *cases: tuple[dict[str, Any], dict[str, Any]], num_steps: int = 1
) -> list[list[Counts]]:
    """For each case of (options, changes of the model), what each rank counts in a step."""
    models = [dataclasses.replace(TINY, **changes) for _, changes in cases]
    configs = [configure(mesh, options, m) for (options, _), m in zip(cases, models, strict=True)]
    built = list(zip(configs, models, strict=True))
    ranks = run_ranks(_count_steps, mesh.world, built, num_steps)
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


def on_axis(counts: Counts, axis: str) -> dict[tuple[str, str], int]:
    """(operation, phase) -> how often, on one axis."""
    return {(op, phase): n for (where, op, phase), n in counts.items() if where == axis}


def totals(counts: Counts) -> dict[tuple[str, str], int]:
    """(axis, operation) -> how often in forward and backward together, but for send and receive."""
    summed: Counter[tuple[str, str]] = Counter()
    for (axis, operation, _), number in counts.items():
        if operation in ("gather", "scatter", "reduce"):
            summed[axis, operation] += number
    return dict(summed)


# --- tensor parallelism: per layer ------------------------------------------------------------

Row = dict[tuple[str, str], int]  # (operation, phase) -> how often

F, B = "forward", "backward"
SP_OFF = {"parallelism.enable_sequence_parallel": False}
LOSS_OFF = {"parallelism.disable_loss_parallel": True}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}

# Into each block one gather and out of it one scatter, and the conjugates in backward. The two
# reduces are of the norms' weights: a rank's gradient is that of its part of the sequence, and FSDP
# sums it over tp, weight by weight, before it reduces over its own axis.
SP_LAYER = {("gather", F): 2, ("scatter", F): 2, ("gather", B): 2, ("scatter", B): 2}
SP_LAYER |= {("reduce", B): 2}
# Out of the embedding a scatter, into the head a gather, two numbers a token gathered in each
# chunk of the loss, and the final norm's weight.
SP_ENDS = {("scatter", F): 1, ("gather", F): 1 + NUM_CHUNKS, ("gather", B): 1, ("scatter", B): 1}
SP_ENDS |= {("reduce", B): 1}
TP_LAYER = {("reduce", F): 2, ("reduce", B): 2}
TP_ENDS = {("reduce", F): 1, ("gather", F): NUM_CHUNKS, ("reduce", B): 1}

TENSOR_PARALLEL: dict[str, tuple[dict[str, Any], Row, Row]] = {
    "sequence-parallel": ({}, SP_LAYER, SP_ENDS),
    "without": (SP_OFF, TP_LAYER, TP_ENDS),
    # The head's weight and its input are gathered whole, and every rank computes the same loss:
    # its input's gradient is whole too.
    "sequence-parallel, whole loss": (
        LOSS_OFF,
        SP_LAYER,
        {("scatter", F): 1, ("gather", F): 2, ("gather", B): 1, ("reduce", B): 1},
    ),
    "without, whole loss": (
        SP_OFF | LOSS_OFF,
        TP_LAYER,
        {("reduce", F): 1, ("gather", F): 1},
    ),
    # Recomputation repeats the forward's collectives, up to the last saved tensor: what follows
    # it in the layer, the scatter behind the MLP, is not computed again.
    "sequence-parallel, recomputed": (
        FULL,
        {**SP_LAYER, ("gather", B): 2 + 2, ("scatter", B): 2 + 1},
        SP_ENDS,
    ),
    "without, recomputed": (SP_OFF | FULL, {**TP_LAYER, ("reduce", B): 2 + 1}, TP_ENDS),
    # The reduced outputs are kept; gathers are cheap to keep out of memory and are done again.
    "sequence-parallel, recomputed per op": (
        PER_OP,
        {**SP_LAYER, ("gather", B): 2 + 2},
        SP_ENDS,
    ),
    "without, recomputed per op": (SP_OFF | PER_OP, TP_LAYER, TP_ENDS),
}


def check_tensor_parallel(case: str) -> None:
    options, layer, ends = TENSOR_PARALLEL[case]
    depths = [2, 3]
    counted = count(SHARDED, *((options, {"num_hidden_layers": depth}) for depth in depths))
    for depth, ranks in zip(depths, counted, strict=True):
        expected = Counter({key: depth * number for key, number in layer.items()}) + Counter(ends)
        for counts in ranks:
            assert on_axis(counts, "tp") == dict(expected)
            assert not on_axis(counts, "world")


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_a_layer_costs_its_collectives_over_tp_and_no_more(case: str) -> None:
    check_tensor_parallel(case)


def test_a_plan_that_gathers_for_each_linear_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather = tensor.GatherInput._apply

    class Colwise(tensor.Colwise):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            super()._apply(module, device_mesh)
            return gather(tensor.GatherInput(True), module, device_mesh)

    def only_at_the_head(
        self: tensor.GatherInput, module: nn.Module, device_mesh: DeviceMesh
    ) -> nn.Module:
        return gather(self, module, device_mesh) if isinstance(module, LMHead) else module

    monkeypatch.setattr(tensor, "Colwise", Colwise)
    monkeypatch.setattr(tensor.GatherInput, "_apply", only_at_the_head)
    ((counts, *_),) = count(SHARDED, ({}, {"num_hidden_layers": 2}))
    # q, k, v, gate and up instead of attention and MLP
    assert on_axis(counts, "tp")["gather", F] == 5 * 2 + SP_ENDS["gather", F]
    with pytest.raises(AssertionError):
        check_tensor_parallel("sequence-parallel")


def test_without_fsdp_the_weights_of_norms_are_summed_over_tp_once_a_step() -> None:
    """Four micro-batches, two stages: two layers and the embedding; two layers and the head."""
    (counted,) = count(Mesh(pp=2, tp=2), ({}, {}))
    for rank, counts in enumerate(counted):
        summed_in_backward = on_axis(counts, "tp").get(("reduce", B), 0)
        assert summed_in_backward == 0
        assert on_axis(counts, "tp")["reduce", F] == (2 * 2 if rank < 2 else 2 * 2 + 1)


# --- data parallelism: per step and group -----------------------------------------------------


def check_data_parallel(mesh: Mesh, zero_stage: int, **model_changes: Any) -> None:
    """Counts of a step of one and of three micro-batches, by the table in parallel/data.py."""
    num_layers, three_rows = 2, 3 * mesh.dp_replicate * mesh.dp_shard
    base = {"training.global_batch_size": three_rows, "parallelism.zero_stage": zero_stage}
    changes = {"num_hidden_layers": num_layers, **model_changes}
    counted = count(mesh, *(({**base, "training.local_batch_size": n}, changes) for n in (3, 1)))
    # The embedding, each layer, norm and head; a tied embedding is in the head's group.
    groups = num_layers + (1 if model_changes.get("tie_word_embeddings") else 2)
    for num_micro_batches, ranks in zip((1, 3), counted, strict=True):
        rounds = num_micro_batches if zero_stage >= 2 else 1
        # The last group is needed at once in backward, so it is gathered once.
        gathers = 2 * groups - 1 if zero_stage == 3 else groups
        expected = {}
        if zero_stage > 0:
            expected["fsdp", "gather"] = rounds * gathers
            expected["fsdp", "scatter"] = rounds * groups
        if zero_stage == 0 or mesh.dp_replicate > 1:
            expected["dp_replicate", "reduce"] = rounds * groups
        for counts in ranks:
            counted_on_dp = {key: n for key, n in totals(counts).items() if key[0] != "tp"}
            assert counted_on_dp == expected, f"{num_micro_batches} micro-batches"


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_zero_stage_costs_a_step_what_its_table_says(zero_stage: int) -> None:
    check_data_parallel(SHARDED, zero_stage)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_replicas_of_shards_add_one_all_reduce_to_each_scatter(zero_stage: int) -> None:
    check_data_parallel(HYBRID, zero_stage)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_tied_embedding_is_reduced_once_with_the_head(zero_stage: int) -> None:
    check_data_parallel(SHARDED, zero_stage, tie_word_embeddings=True)


def test_stage_1_without_deferring_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "set_last_micro_batch", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="3 micro-batches"):
        check_data_parallel(SHARDED, 1)


# --- a mixture of experts: per layer ----------------------------------------------------------

MIXTURE = {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
MIXTURE["shared_expert_gate"] = True
EP = {"parallelism.expert_parallel_degree": 2}
LOSS = {"moe.aux_loss_weight": 0.1}
# Attention as above. The block enters and leaves nothing; of the router, the shared expert and its
# gate a rank has a share of each gradient, and so it has of the norms'.
SP_MOE = {("gather", F): 1, ("scatter", F): 1, ("gather", B): 1, ("scatter", B): 1}
SP_MOE |= {("reduce", B): 2 + 1 + 3 + 1}
# Without, the outputs of the slices are gathered, and in backward the gradients of the inputs.
TP_MOE = {("reduce", F): 1, ("gather", F): 1, ("reduce", B): 1 + 1 + 3 + 1, ("gather", B): 1}
# The counts, the rows, and the rows back; in backward both again.
EXCHANGED = {("exchange", F): 3, ("exchange", B): 2}
# A group of its own: gathered twice, reduced once.
SHARDED_EXPERTS = {("gather", F): 1, ("gather", B): 1, ("scatter", B): 1}
MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Row]]] = {
    "sequence-parallel": (EP, {"tp": SP_MOE, "ep": EXCHANGED, "efsdp": SHARDED_EXPERTS}),
    "without": (SP_OFF | EP, {"tp": TP_MOE, "ep": EXCHANGED, "efsdp": SHARDED_EXPERTS}),
    # A loss on each sequence must know the load of the whole of it.
    "with a loss": (EP | LOSS, {"tp": {**SP_MOE, ("reduce", F): 1}, "ep": EXCHANGED}),
    # The experts that are gathered to compute a layer again stay until its backward.
    "recomputed": (
        EP | FULL,
        {
            "tp": {**SP_MOE, ("gather", B): 2, ("scatter", B): 2},
            "ep": {("exchange", F): 3, ("exchange", B): 2 + 3},
            "efsdp": SHARDED_EXPERTS,
        },
    ),
    "recomputed per op": (
        EP | PER_OP | LOSS,
        {"tp": {**SP_MOE, ("gather", B): 2, ("reduce", F): 1}, "ep": EXCHANGED},
    ),
}


@cache
def _mixtures() -> dict[str, list[list[Counts]]]:
    """Case -> what each rank counts with two layers, and with three; all in one world."""
    depths = [{**MIXTURE, "num_hidden_layers": depth} for depth in (2, 3)]
    cases = [(options, depth) for options, _ in MIXTURES.values() for depth in depths]
    counted = count(SHARDED, *cases)
    return {case: counted[2 * i : 2 * i + 2] for i, case in enumerate(MIXTURES)}


@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_of_experts_costs_a_layer_its_exchanges_and_no_more(case: str) -> None:
    for before, after in zip(*_mixtures()[case], strict=True):
        for axis, expected in MIXTURES[case][1].items():
            one = Counter(on_axis(after, axis))
            one.subtract(on_axis(before, axis))
            assert {key: number for key, number in one.items() if number} == expected, axis


# --- with a pipeline --------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_pipeline_reduces_gradients_once_a_step_in_every_stage(zero_stage: int) -> None:
    """torch's schedules accumulate whole gradients and reduce them behind the last micro-batch.

    So stages 1 and 2 cost the same. Four micro-batches and three groups a rank: the embedding and
    two layers; two layers and the head.
    """
    (counted,) = count(PIPELINED, ({"parallelism.zero_stage": zero_stage}, {}))
    for rank, counts in enumerate(counted):
        if zero_stage == 0:
            assert totals(counts) == {("dp_replicate", "reduce"): 3}
            continue
        gathers = 3
        if zero_stage == 3:
            # A backward leaves its parameters whole, a forward reshards all but the head. First
            # rank: two forwards ahead, then backward and forward in turn; last rank: in turn.
            gathers = 3 * (2 + 3) if rank < 2 else 3 + 2 * 4
        assert totals(counts) == {("fsdp", "gather"): gathers, ("fsdp", "scatter"): 3}


@pytest.mark.parametrize(("num_steps", "agreement"), [(1, 1), (2, 0)])
def test_neighbours_in_a_pipeline_exchange_one_message_a_micro_batch_each_way(
    num_steps: int, agreement: int
) -> None:
    """And one more each way in the first step, in which torch's stages agree on shapes."""
    (counted,) = count(PIPELINED, ({"parallelism.zero_stage": 2}, {}), num_steps=num_steps)
    for counts in counted:
        messages = Counter[str]()
        for (operation, _), number in on_axis(counts, "pp").items():
            messages[operation] += number
        assert messages == {"send": 4 + agreement, "receive": 4 + agreement}


# --- the Trainer's own ------------------------------------------------------------------------


def _count_run(config: Config) -> Counts:
    trainer = Trainer(config, TINY, source=make_source())
    with CollectiveCounter(trainer.mesh) as counter:
        trainer.train()
    return dict(counter.counts)


@pytest.mark.parametrize(("log_freq", "logged"), [(1, 4), (3, 3)])
def test_a_step_adds_two_all_reduces_and_a_logged_one_two_more(
    log_freq: int, logged: int, tmp_path: Any
) -> None:
    """The count of valid labels and the norm; the losses' sum and the largest loss.

    Of four steps the first and the last are always logged.
    """
    options = {"metrics.log_freq": log_freq, "job.dump_folder": str(tmp_path)}
    for counts in run_ranks(_count_run, SHARDED.world, configure(SHARDED, options, TINY)):
        assert on_axis(counts, "world") == {("reduce", F): 2 * 4 + 2 * logged}
