"""Stages: how layers are cut, which rank holds what, validation through them, the tied head.

That training is right for every schedule is proven in tests/parity/; here is what parity cannot
see: the choice of the cut, the forward-only pass and the tied head's messages.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from tests.parallel.builder import CPU, build, configure
from tests.parity.harness import SEQ_LEN, TINY, Mesh, relative_error, whole
from tests.world import run_ranks
from torchtitan_lite.build import stage_modules
from torchtitan_lite.config import Config
from torchtitan_lite.config.derived import V_SCHEDULES
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import module_names
from torchtitan_lite.models.families import FLAVORS
from torchtitan_lite.parallel import pipeline
from torchtitan_lite.parallel.pipeline import balanced_stages, stages_of_rank

# --- the cut ----------------------------------------------------------------------------------

Rank = tuple[float, float, tuple[int, ...]]  # (largest cost, sum of squares, ends): less is better


def rank_of_cut(cuts: list[list[int]], costs: list[float], last: float) -> Rank:
    loads = [sum(costs[layer] for layer in cut) for cut in cuts]
    loads[-1] += last
    return max(loads), sum(load**2 for load in loads), tuple(cut[-1] + 1 for cut in cuts)


def best_cut(costs: list[float], num_stages: int, last: float) -> Rank:
    """By trying every cut there is."""
    layers = list(range(len(costs)))
    ends = itertools.combinations(range(1, len(costs)), num_stages - 1)
    cuts = (
        [layers[a:b] for a, b in zip((0, *inner), (*inner, len(costs)), strict=True)]
        for inner in ends
    )
    return min(rank_of_cut(cut, costs, last) for cut in cuts)


def test_no_cut_is_better_than_the_one_chosen() -> None:
    """600 random models of up to 9 layers; costs and the head's are whole numbers, so exact."""
    rng = random.Random(0)
    for _ in range(600):
        costs = [float(rng.randint(1, 6)) for _ in range(rng.randint(1, 9))]
        num_stages, last = rng.randint(1, len(costs)), float(rng.randint(0, 12))
        cuts = balanced_stages(costs, num_stages, last=last)
        assert rank_of_cut(cuts, costs, last) == best_cut(costs, num_stages, last)


@pytest.mark.parametrize("num_layers", [1, 5, 7, 32, 126])
def test_every_stage_has_a_layer_and_the_layers_keep_their_order(num_layers: int) -> None:
    for num_stages in {1, 2, num_layers // 2, num_layers - 1, num_layers} - {0}:
        for last in (0.0, 0.5, 100.0):  # a head heavier than all layers leaves its stage one
            if num_stages > num_layers:
                continue
            cuts = balanced_stages([1.0] * num_layers, num_stages, last=last)
            assert len(cuts) == num_stages
            assert all(cuts)
            assert [layer for cut in cuts for layer in cut] == list(range(num_layers))


@pytest.mark.parametrize(
    ("last", "sizes"),
    [
        (0.0, [2, 2, 3, 3]),  # uneven: the first stages keep the most micro-batches in flight
        (1.0, [2, 3, 3, 2]),
        (2.0, [3, 3, 3, 1]),
        (50.0, [3, 3, 3, 1]),
    ],
)
def test_a_heavy_head_takes_layers_from_its_stage(last: float, sizes: list[int]) -> None:
    assert [len(cut) for cut in balanced_stages([1.0] * 10, 4, last=last)] == sizes


def test_a_cut_that_ignores_the_head_would_be_seen() -> None:
    costs, last = [1.0] * 10, 2.0
    blind = balanced_stages(costs, 4, last=0.0)
    assert rank_of_cut(blind, costs, last) > best_cut(costs, 4, last)


@pytest.mark.parametrize(
    ("flavor", "num_stages"), [("debugmodel", 4), ("8B", 4), ("70B", 8), ("405B", 16)]
)
def test_a_model_is_cut_into_all_its_modules_and_the_ends_are_weighed(
    flavor: str, num_stages: int
) -> None:
    config = FLAVORS["llama3"][flavor]
    stages = stage_modules(config, num_stages, given=None)
    assert [name for stage in stages for name in stage] == module_names(config)
    num_layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    assert num_layers[-1] == min(num_layers), "the head's stage has the fewest layers"
    # No stage is above the mean by more than one layer and the head.
    assert max(num_layers) - min(num_layers) <= 1 + _head_in_layers(config)


def _head_in_layers(config: ModelConfig) -> float:
    """The parameters of the head, with those of one layer as the unit."""
    from torchtitan_lite.models.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config, ["layers.0", "lm_head"])
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    head = sizes.pop("lm_head.weight")
    return head / sum(sizes.values())


# --- placement --------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "stages_a_rank"),
    [("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 3), *((name, 2) for name in V_SCHEDULES)],
)
def test_ranks_hold_the_stages_that_torchs_schedule_expects_there(
    schedule: str, stages_a_rank: int, degree: int
) -> None:
    num_stages = degree * stages_a_rank
    style = "v" if schedule in V_SCHEDULES else "loop"
    expected = generate_stage_to_rank_mapping(degree, num_stages, style=style)
    held = {
        stage: rank
        for rank in range(degree)
        for stage in stages_of_rank(schedule, pp_rank=rank, pp_degree=degree, num_stages=num_stages)
    }
    assert held == expected


def test_the_drawing_of_looped_and_v_placement() -> None:
    def all_ranks(schedule: str) -> list[list[int]]:
        return [
            stages_of_rank(schedule, pp_rank=rank, pp_degree=4, num_stages=8) for rank in range(4)
        ]

    assert all_ranks("Interleaved1F1B") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all_ranks("ZBVZeroBubble") == [[0, 7], [1, 6], [2, 5], [3, 4]]


# --- evaluate ---------------------------------------------------------------------------------


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(TINY.vocab_size, (rows, SEQ_LEN), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, 9:] = -100
    return tokens, labels


def _evaluate(config: Config, model_config: ModelConfig) -> tuple[bool, list[list[float]]]:
    """(whether this rank holds the last stage, its sums for micro-batches of 1, 3 and 2 rows)."""
    _, model = build(config, model_config)
    found = []
    for rows in (1, 3, 2):
        loss = GlobalBatchLoss(CPU)
        model.evaluate(*_batch(rows), loss=loss)
        found.append(loss.totals.tolist())
    assert all(parameter.grad is None for parameter in model.named_parameters.values())
    return model.pipeline is None or model.pipeline.has_last, found


def evaluate(
    mesh: Mesh, options: dict[str, Any], num_layers: int
) -> list[tuple[bool, list[list[float]]]]:
    model = dataclasses.replace(TINY, num_hidden_layers=num_layers)
    options = {"loss.z_loss_weight": 0.1, **options}
    return run_ranks(_evaluate, mesh.world, configure(mesh, options, model), model, timeout=60)


@cache
def _one_process(num_layers: int) -> list[list[float]]:
    ((_, sums),) = evaluate(Mesh(), {}, num_layers)
    return sums


def check_evaluate(schedule: str, mesh: Mesh, num_layers: int = 8, **more: Any) -> None:
    options = {"parallelism.pipeline_parallel_schedule": schedule}
    options |= {f"parallelism.{key}": value for key, value in more.items()}
    ranks = evaluate(mesh, options, num_layers)
    expected = torch.tensor(_one_process(num_layers))
    assert sum(has_last for has_last, _ in ranks) == mesh.world // mesh.pp
    for has_last, sums in ranks:
        if has_last:
            assert relative_error(torch.tensor(sums), expected) < 1e-6
        else:
            assert torch.tensor(sums).count_nonzero() == 0, "only the last stage has a loss"


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_evaluation_through_stages_equals_one_process(schedule: str, degree: int) -> None:
    """One stage a rank, two looped, and two in a V, whose first rank holds both ends."""
    check_evaluate(schedule, Mesh(pp=degree))


def test_evaluation_through_three_stages_a_rank_equals_one_process() -> None:
    check_evaluate(
        "Interleaved1F1B", Mesh(pp=2), num_layers=6, pipeline_parallel_layers_per_stage=1
    )


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_evaluation_passes_on_slices_of_the_sequence(
    schedule: str, sequence_parallel: bool
) -> None:
    check_evaluate(
        schedule, Mesh(pp=2, tp=2), num_layers=4, enable_sequence_parallel=sequence_parallel
    )


def test_evaluation_with_wrong_positions_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a later stage that does not learn where its tokens stand."""
    monkeypatch.setattr(pipeline, "_positions", lambda tokens: torch.zeros_like(tokens))
    with pytest.raises(AssertionError):
        check_evaluate("1F1B", Mesh(pp=2))


# --- the tied head ----------------------------------------------------------------------------

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


@dataclasses.dataclass
class Ends:
    """A rank's view of the two ends after a step, whole tensors."""

    names: list[str]
    first_head: Tensor | None = None  # as initialised
    gradient: Tensor | None = None  # of the embedding
    embedding: Tensor | None = None  # after an update
    head: Tensor | None = None


def _step_tied(config: Config) -> Ends:
    mesh, model = build(config, TIED)
    ends = Ends(names=sorted(model.named_parameters))
    embedding = model.named_parameters.get("embed_tokens.weight")
    heads = [part.lm_head.weight for part in model.parts if part.lm_head is not None]
    head = heads[0] if heads else None
    if head is not None:
        ends.first_head = whole(head)
    tokens, labels = (
        rows.chunk(mesh.degrees.batch)[mesh.batch_rank]
        for rows in _batch(config.training.global_batch_size)
    )
    size = config.training.local_batch_size
    model.train(tokens, labels, loss=GlobalBatchLoss(CPU), micro_batch_size=size)
    if head is not None and head is not embedding:
        assert head.grad is None, "it would be counted in the norm a second time"
    if embedding is not None:
        ends.gradient = whole(embedding.grad)
        with torch.no_grad():
            embedding.add_(embedding.grad, alpha=-1.0)  # type: ignore[arg-type]
    model.after_update()
    ends.embedding = None if embedding is None else whole(embedding)
    ends.head = None if head is None else whole(head)
    return ends


def step_tied(mesh: Mesh, schedule: str) -> tuple[Ends, Ends]:
    """The rank of the first stage, and the rank of the last."""
    options = {"parallelism.pipeline_parallel_schedule": schedule, "parallelism.zero_stage": 2}
    ranks = run_ranks(_step_tied, mesh.world, configure(mesh, options, TIED), timeout=60)
    first = next(ends for ends in ranks if ends.embedding is not None)
    last = next(ends for ends in ranks if ends.head is not None)
    assert all("lm_head.weight" not in ends.names for ends in ranks), "one weight, one name"
    return first, last


@cache
def _tied_in_one_process() -> Ends:
    return step_tied(Mesh(), "1F1B")[0]


def check_tied(mesh: Mesh, schedule: str) -> None:
    first, last = step_tied(mesh, schedule)
    expected = _tied_in_one_process()
    assert first.gradient is not None and first.embedding is not None and last.head is not None
    assert expected.gradient is not None and expected.first_head is not None
    assert last.first_head is not None
    assert torch.equal(last.first_head, expected.first_head), "the two start equal"
    assert relative_error(first.gradient, expected.gradient) < 1e-5, "the sum of both ends"
    assert torch.equal(last.head, first.embedding), "and stay equal"
    assert not torch.equal(last.head, last.first_head)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2)], ids=str)
def test_a_tied_head_hands_its_gradient_over_and_takes_the_weight_back(
    mesh: Mesh, schedule: str
) -> None:
    check_tied(mesh, schedule)


@pytest.mark.parametrize("half", ["add_gradient_to_embedding", "copy_weight_to_head"])
def test_a_tied_head_that_omits_one_half_would_be_seen(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(tied: pipeline.TiedHead) -> None:
        if half == "add_gradient_to_embedding" and tied.head is not None:
            tied.head.grad = None

    monkeypatch.setattr(pipeline.TiedHead, half, forget)
    with pytest.raises(AssertionError, match="sum of both" if "add" in half else "stay equal"):
        check_tied(Mesh(pp=2), "1F1B")


def test_layers_per_stage_is_the_number_of_layers_of_each_stage() -> None:
    config = ModelConfig(num_hidden_layers=5)
    assert stage_modules(config, 3, layers_per_stage=2) == [
        ["embed_tokens", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "norm", "lm_head"],
    ]
