"""AdamW with bf16 moments: right on the mean, the same bits on any mesh, half the bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

from tests.checkpoint.worlds import draw
from tests.optim.test_optimizer import build
from tests.parity.harness import STEPS, TINY, TOLERANCE, Mesh, RecordingTrainer, errors, run, whole
from tests.parity.test_compile import EXPERTS
from tests.parity.test_resume import train
from tests.precision.test_training import LAST, losses
from tests.world import run_ranks
from torchtitan_lite.checkpoint.state import materialise_state, optimizer_state
from torchtitan_lite.data.loader import Batch
from torchtitan_lite.optim import low_precision
from torchtitan_lite.optim.low_precision import LowPrecisionAdamW, round_stochastically

BF16 = {"optimizer.state_dtype": "bfloat16"}
SHAPES = {"embed_tokens.weight": (10, 8), "experts": (4, 6, 8), "norm.weight": (6,)}
SHAPES |= {"q_proj.weight": (16, 8), "up_proj.weight": (16, 8)}


def random_tensor(name: str, step: int) -> Tensor:
    """The value of a parameter (step 0) or of its gradient at a step, the same on every rank."""
    seed = step * 100 + [*SHAPES].index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def group_of(parameters: dict[str, nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    group = {"params": list(parameters.values()), "names": list(parameters), "weight_decay": 0.1}
    return [{**group, **options}]


def make(parameters: dict[str, nn.Parameter], *, beta2: float = 0.95, **options: Any) -> Any:
    return LowPrecisionAdamW(
        group_of(parameters), lr=1e-2, betas=(0.9, beta2), eps=1e-8, **{"seed": 0, **options}
    )


def torchs(parameters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    group = group_of(parameters)
    return torch.optim.AdamW(group, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)


def steps(parameters: dict[str, nn.Parameter], optimizer: Any, num_steps: int = 3) -> Any:
    for step in range(1, num_steps + 1):
        for name, parameter in parameters.items():
            gradient = random_tensor(name, step)
            if isinstance(parameter, DTensor):
                placed = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, *placed, src_data_rank=None)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return optimizer


def plain(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(random_tensor(name, 0).to(dtype)) for name in SHAPES}


# --- the formula --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 1 << 20])
def test_the_update_is_adamws(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the state in fp32, in one block or in many."""
    monkeypatch.setattr(low_precision, "BLOCK_SIZE", block_size)
    ours, theirs = plain(), plain()
    steps(ours, make(ours, state_dtype=torch.float32), 20)
    steps(theirs, torchs(theirs), 20)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_an_update_reads_moments_before_they_are_rounded() -> None:
    """So the first step is torch's, whatever the state is stored in."""
    ours, theirs = plain(), plain()
    optimizer = steps(ours, make(ours), 1)
    steps(theirs, torchs(theirs), 1)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-7)
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_parameters_in_bf16_are_updated_in_fp32() -> None:
    ours, exact = plain(torch.bfloat16), plain(torch.bfloat16)
    steps(ours, make(ours), 1)
    exact = {name: nn.Parameter(parameter.detach().float()) for name, parameter in exact.items()}
    for name, parameter in exact.items():
        parameter.grad = random_tensor(name, 1).bfloat16().float()
    make(exact).step()
    for name in SHAPES:
        assert torch.equal(ours[name], exact[name].bfloat16())


def test_the_key_chooses_it_for_adamw_alone() -> None:
    assert isinstance(build(state_dtype="bfloat16"), LowPrecisionAdamW)
    assert isinstance(build(state_dtype="bfloat16", name="SGD"), torch.optim.SGD)
    assert isinstance(build(), torch.optim.AdamW)


def test_moments_take_four_bytes_a_parameter_in_the_place_of_eight() -> None:
    sizes = {}
    for state_dtype in ("float32", "bfloat16"):
        parameters = plain()
        optimizer = steps(parameters, build(parameters, state_dtype=state_dtype))
        moments = [
            value
            for name, value in optimizer_state(optimizer, parameters).items()
            if not name.endswith(".step")
        ]
        sizes[state_dtype] = sum(value.numel() * value.itemsize for value in moments)
    num_parameters = sum(parameter.numel() for parameter in plain().values())
    assert sizes == {"float32": 8 * num_parameters, "bfloat16": 4 * num_parameters}


# --- rounding -----------------------------------------------------------------------------------


def random_bits(count: int) -> Tensor:
    key = low_precision._key(0, 1, "norm.weight", torch.device("cpu"))
    return low_precision.scramble(key + torch.arange(count) * low_precision.STEP)


@pytest.mark.parametrize("value", [1.0007, -3.3333e-9, 0.7491, 1e30, 1e-39])
def test_a_number_is_rounded_to_a_neighbour_and_right_on_the_mean(value: float) -> None:
    """Of 2^18 roundings, each off by less than a gap, the mean is off by a thousandth of one."""
    exact, bits = torch.full((1 << 18,), value), random_bits(1 << 18)
    for shifted in (bits, bits >> 16):
        rounded = round_stochastically(exact, shifted, torch.bfloat16).double()
        low, high = rounded.min(), rounded.max()
        assert low < exact[0].double() < high and set(rounded.tolist()) == {float(low), float(high)}
        # Four standard deviations of a mean of 2^18, at most a half gap each.
        assert abs(rounded.mean() - exact[0].double()) < (high - low) * 2 / 512


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -1.5, 2.0**-130, torch.inf, 3.3895313892515355e38]
)
def test_what_bf16_holds_exactly_stays(value: float) -> None:
    exact = torch.full((1 << 12,), value)
    rounded = round_stochastically(exact, random_bits(1 << 12), torch.bfloat16)
    assert torch.equal(rounded.float(), exact)
    assert torch.equal(torch.signbit(rounded), torch.signbit(exact))


def test_the_two_moments_are_rounded_independently() -> None:
    """Of elements that are all alike, how many have both moments rounded to the same side."""
    parameters = {"norm.weight": nn.Parameter(torch.zeros(1 << 14))}
    optimizer = make(parameters)
    parameters["norm.weight"].grad = torch.full((1 << 14,), 1.106)  # either half-way
    optimizer.step()
    state = optimizer.state[parameters["norm.weight"]]
    up = [(state[name] == state[name].max()).float() for name in ("exp_avg", "exp_avg_sq")]
    first, second = (float(share.mean()) for share in up)
    assert 0.3 < first < 0.7 and 0.3 < second < 0.7
    expected = first * second + (1 - first) * (1 - second)
    assert abs(float((up[0] == up[1]).float().mean()) - expected) < 0.02


def second_moment_after(num_steps: int) -> Tensor:
    """Of gradients that were 1 for long and are 1/2 from here on: mean of squares to be 1/4."""
    parameters = {"norm.weight": nn.Parameter(torch.zeros(1 << 12))}
    optimizer = make(parameters, beta2=0.999)
    materialise_state(optimizer)
    state = optimizer.state[parameters["norm.weight"]]
    state["exp_avg_sq"].fill_(1.0)
    for _ in range(num_steps):
        parameters["norm.weight"].grad = torch.full((1 << 12,), 0.5)
        optimizer.step()
    return state["exp_avg_sq"].float()


def test_a_second_moment_follows_its_gradients() -> None:
    expected = 0.25 + 0.75 * 0.999**500
    found = second_moment_after(500)
    assert found.mean().item() == pytest.approx(expected, rel=2e-3)
    assert found.std() < 0.05 * expected


def test_rounded_to_nearest_it_would_stay_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = lambda value, bits, dtype: value.to(dtype)  # noqa: E731
    monkeypatch.setattr(low_precision, "round_stochastically", nearest)
    assert second_moment_after(500).unique().tolist() == [1.0]


# --- meshes -------------------------------------------------------------------------------------


def _bits_of_shards() -> dict[str, list[Tensor]]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    layouts: dict[str, Any] = {
        "embed_tokens.weight": (flat, [Shard(0)]),  # 10 rows on 4 ranks
        "experts": (sparse, [Shard(1), Shard(0)]),
        "norm.weight": (flat, [Shard(0)]),  # 6 elements: nothing on the last rank
        "q_proj.weight": (dense, [_StridedShard(0, split_factor=2), Shard(0)]),
        "up_proj.weight": (dense, [Replicate(), Shard(1)]),
    }
    parameters = {
        name: nn.Parameter(distribute_tensor(random_tensor(name, 0), *layout, src_data_rank=None))
        for name, layout in layouts.items()
    }
    optimizer = steps(parameters, make(parameters))
    return {
        name: [
            whole(parameter),
            *(whole(optimizer.state[parameter][moment]) for moment in ("exp_avg", "exp_avg_sq")),
        ]
        for name, parameter in parameters.items()
    }


def differing() -> set[str]:
    """Names of what four ranks compute in other bits than one process."""
    parameters = plain()
    optimizer = steps(parameters, make(parameters))
    apart = set()
    for found in run_ranks(_bits_of_shards, 4):
        for name, parameter in parameters.items():
            state = optimizer.state[parameter]
            expected = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
            if not all(map(torch.equal, found[name], expected)):
                apart.add(name)
    return apart


def test_the_same_gradients_give_the_same_bits_on_any_mesh() -> None:
    """Cut evenly or not, over one axis or two, by rows, columns or experts, or not at all."""
    assert differing() == set()


def test_bits_by_an_index_in_the_part_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "_global_offset", lambda parameter: (0,) * parameter.dim())
    assert differing() == set(SHAPES)


def test_steps_seeds_names_and_elements_draw_different_bits() -> None:
    keys = {
        low_precision._key(seed, step, name, torch.device("cpu")).item()
        for seed in range(4)
        for step in range(4)
        for name in SHAPES
    }
    assert len(keys) == 4 * 4 * len(SHAPES)
    assert len(random_bits(1 << 16).unique()) == 1 << 16


# --- the Trainer --------------------------------------------------------------------------------


class Drawn(RecordingTrainer):
    """Whatever the loss, its gradients are drawn by name and step: the same on any mesh."""

    def forward_backward(self, batch: Batch) -> None:
        super().forward_backward(batch)
        for name, parameter in self.model.named_parameters.items():
            gradient = draw(f"{name} {self.step}", parameter.shape)
            if isinstance(parameter, DTensor):
                placed = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, *placed, src_data_rank=None)
            parameter.grad = gradient


def moments(trainer: Any) -> dict[str, Tensor]:
    state = optimizer_state(trainer.optimizer, trainer.model.named_parameters)
    return {name: whole(value) for name, value in state.items()}


def train_and_look(trainer: Any) -> dict[str, Tensor]:
    trainer.train()
    return moments(trainer)


def trained(mesh: Mesh, options: dict[str, Any], trainer: Any = Drawn, **changes: Any) -> Any:
    """A run, and the moments of all its ranks together."""
    model = dataclasses.replace(TINY, **changes)
    found = run(mesh, {**BF16, **options}, model, trainer=trainer, act=train_and_look)
    return found, {name: value for of_rank in found.returned for name, value in of_rank.items()}


OFFLOADED = {"training.enable_cpu_offload": True}
EP2 = {"parallelism.expert_parallel_degree": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "options", "changes"),
    [
        pytest.param(Mesh(dp_shard=2, tp=2), {}, {}, id="dp2-tp2"),
        pytest.param(Mesh(dp_shard=2), OFFLOADED, {}, id="offloaded"),
        pytest.param(Mesh(dp_shard=3), {"training.global_batch_size": 9,
                     "training.local_batch_size": 3}, {}, id="dp3-uneven", marks=slow),
        pytest.param(Mesh(dp_shard=2), {}, {}, id="dp2", marks=slow),
        pytest.param(Mesh(tp=2), {}, {}, id="tp2", marks=slow),
        pytest.param(Mesh(dp_replicate=2, dp_shard=2), {}, {}, id="hsdp", marks=slow),
        pytest.param(Mesh(pp=2), {}, {"tie_word_embeddings": True}, id="pp2-tied", marks=slow),
        pytest.param(Mesh(dp_shard=2, tp=2), EP2, EXPERTS, id="ep2", marks=slow),
    ],
)  # fmt: skip
def test_the_trainers_layouts_give_the_bits_of_one_process(
    mesh: Mesh, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    rows = {key: value for key, value in options.items() if key.endswith("batch_size")}
    ours, state = trained(mesh, options, **changes)
    one, expected = trained(Mesh(), rows, **changes)
    assert not ours.apart and state.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == (torch.int64 if name.endswith(".step") else torch.bfloat16)
        assert torch.equal(state[name], value), name
    for name, parameter in one.parameters.items():
        assert torch.equal(ours.parameters[name], parameter), name


@pytest.mark.slow
def test_a_mesh_trains_as_one_process_does() -> None:
    """Gradients differ in their last bits, by which some roundings go another way.

    Numbers that differ by TOLERANCE, 2^8 of which make a gap, are rounded apart by a share of
    2^8 TOLERANCE of all random bits, in each of the steps.
    """
    ours, state = trained(Mesh(dp_shard=2, tp=2), {}, RecordingTrainer)
    one, expected = trained(Mesh(), {}, RecordingTrainer)
    found = errors(ours, one)
    assert max(found["loss"], found["grad_norm"]) < TOLERANCE
    different = [(state[name] != value).flatten() for name, value in expected.items()]
    assert torch.cat(different).float().mean() < STEPS * 2**8 * TOLERANCE


def test_a_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """Saved after step 3 of 6; the random bits of a step do not depend on where a run began."""
    mesh = Mesh(dp_shard=2)
    unstopped = train(options=BF16, mesh=mesh)
    train(tmp_path, BF16, until=3, mesh=mesh)
    resumed = train(tmp_path, BF16, mesh=mesh)
    for ours, theirs in zip(resumed.returned, unstopped.returned, strict=True):
        assert ours.moments.keys() == theirs.moments.keys()
        assert all(torch.equal(ours.moments[name], theirs.moments[name]) for name in ours.moments)
    for name, parameter in resumed.parameters.items():
        assert torch.equal(parameter, unstopped.parameters[name])


def goes_on(folder: Path, first: Mesh, second: Mesh, **options: Any) -> list[str]:
    """Names of what a run that `second` goes on with after step 3 has in other bits at step 6.

    Beside one process that was not stopped; the gradients are the same on all.
    """

    def ends_with(*where: Path, **more: Any) -> dict[str, Tensor]:
        result = train(*where, **more, trainer=Drawn, act=train_and_look)
        state = {name: value for of_rank in result.returned for name, value in of_rank.items()}
        return {**state, **result.parameters}

    expected = ends_with(options=BF16)
    ends_with(folder, options=BF16, mesh=first, until=3)
    found = ends_with(folder, options={**BF16, **options}, mesh=second)
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(Mesh(dp_shard=2), Mesh(tp=2), id="dp2-then-tp2"),
        pytest.param(Mesh(pp=2), Mesh(dp_shard=2, tp=2), id="pp2-then-dp2-tp2", marks=slow),
    ],
)
def test_any_mesh_goes_on_with_the_bits_of_any_other(
    tmp_path: Path, first: Mesh, second: Mesh
) -> None:
    assert goes_on(tmp_path, first, second) == []


@pytest.mark.slow
def test_moments_that_began_anew_would_be_seen(tmp_path: Path) -> None:
    anew = {"checkpoint.exclude_from_loading": ["optimizer"]}
    assert goes_on(tmp_path, Mesh(dp_shard=2), Mesh(tp=2), **anew)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_a_checkpoint_of_either_state_starts_the_other(tmp_path: Path, first: str) -> None:
    """The moments are rounded, or widened, where they are loaded."""
    second = "bfloat16" if first == "float32" else "float32"
    saved = train(tmp_path, {"optimizer.state_dtype": first}, until=3)
    loaded = train(tmp_path, {"optimizer.state_dtype": second}, act=moments)
    for name, value in loaded.returned[0].items():
        expected = saved.returned[0].moments[name]
        assert torch.equal(value, expected.to(value.dtype)), name
        if not name.endswith(".step"):
            assert value.dtype == getattr(torch, second)


@pytest.mark.slow
def test_200_steps_of_the_debug_model_end_within_2_percent(tmp_path: Path) -> None:
    exact = losses("", tmp_path / "float32")
    ours = losses("", tmp_path / "bfloat16", "--optimizer.state_dtype=bfloat16")
    assert len(ours) == len(exact) == 200 and ours != exact
    mean, expected = (sum(series[-LAST:]) / LAST for series in (ours, exact))
    assert abs(mean - expected) < 0.02 * expected and mean < 0.9 * ours[0]
