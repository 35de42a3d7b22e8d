"""Delayed scaling: which scale a cast takes, what is noted and when, on any mesh, after a load."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.cases import problems
from tests.parity.harness import (
    TOLERANCE,
    Mesh,
    RecordingTrainer,
    Run,
    assert_equal,
    errors,
    relative_error,
    run,
)
from tests.parity.test_compile import COMPILED, CountingTrainer
from tests.precision.test_float8 import linear, products, tensors
from tests.precision.test_meshes import MIXTURE, WIDE, options
from torchtitan_lite.checkpoint import compare
from torchtitan_lite.config import Config
from torchtitan_lite.precision.delayed import DelayedScaling, add_history
from torchtitan_lite.precision.float8 import E4M3, E5M2, RECIPES, Recipe, cast, multiply

SLOW = pytest.mark.slow
RECIPE = Recipe((0, 0), (0, 0), E5M2, delayed=True)
SCALING = "quantize.linear.float8.scaling"


def delayed(weight: Tensor, length: int = 3) -> torch.nn.Linear:
    module = linear(weight, RECIPE)
    add_history(module, length, weight.device)
    return module


def keeper(module: torch.nn.Module) -> DelayedScaling:
    config = Config()
    config.quantize.linear.float8.recipe_name = "tensorwise"
    config.quantize.linear.float8.scaling = "delayed"
    return DelayedScaling([module], config, ranks_per_stage=1)


def noted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest of x, as float8 has it."""
    return cast(x.abs().max().view(1, 1), dtype, (0, 0), powers_of_two=True).high()[0, 0]


# --- one linear ----------------------------------------------------------------------------------


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_a_scale_is_that_of_the_largest_of_the_history(powers_of_two: bool) -> None:
    """Not of the newest, not of the numbers that are cast, and for each operand its own."""
    x, w, g = tensors((33, 160, 272), torch.float32)
    module = delayed(w)
    module.recipe = Recipe((0, 0), (0, 0), E5M2, powers_of_two, delayed=True)  # type: ignore[assignment]
    module.amax_history.copy_(  # type: ignore[operator, union-attr]
        torch.tensor([[1.0, 9.0, 2.0], [0.3, 0.2, 0.1], [1e-6, 2e-6, 5e-5]])
    )
    found = dict(products(module, x, g))
    f8_x, f8_w, f8_g = (
        cast(t, dtype, (0, 0), powers_of_two=powers_of_two, amax=torch.tensor(amax))
        for t, dtype, amax in ((x, E4M3, 9.0), (w, E4M3, 0.3), (g, E5M2, 5e-5))
    )
    expected = {"out": (f8_x, f8_w), "dx": (f8_g, f8_w.t), "weight": (f8_g.t, f8_x.t)}
    for what, operands in expected.items():
        high = multiply(*operands, dtype=torch.float32, emulate=True)
        assert torch.equal(found[what], high), what
    if not powers_of_two:
        assert f8_x.scale.item() == pytest.approx(9.0 / 448, rel=1e-6)


def test_without_a_history_a_cast_is_dynamic() -> None:
    x, w, g = tensors((33, 160, 272), torch.float32)
    dynamic = dict(products(linear(w, RECIPES["tensorwise"]), x, g))
    found = dict(products(delayed(w), x, g))
    assert all(torch.equal(found[what], dynamic[what]) for what in dynamic)


def test_larger_numbers_are_cut_for_one_step_and_then_known() -> None:
    x, w, g = tensors((33, 160, 272), torch.float32)
    module = delayed(w)
    scaling = keeper(module)
    errors = []
    for factor in (1, 10, 10, 1):
        scaling.begin()
        module.zero_grad()
        found = dict(products(module, factor * x, g))
        assert all(tensor.isfinite().all() for tensor in found.values())
        errors.append(relative_error(found["out"], factor * (x @ w.t())))
        scaling.end()
    assert errors[0] < 0.05 and errors[2] < 0.05 and errors[3] < 0.05
    assert errors[1] > 0.3
    # Of three steps, the newest first.
    expected = [noted(factor * x, E4M3).item() for factor in (1, 10, 10)]
    assert module.amax_history[0].tolist() == pytest.approx(expected)  # type: ignore[index]


def test_what_is_noted_is_the_largest_of_all_micro_batches() -> None:
    x, w, g = tensors((33, 160, 272), torch.float32)
    module = delayed(w)
    scaling = keeper(module)
    scaling.begin()
    for factor in (1, 4, 2):
        dict(products(module, factor * x, factor * g))
    scaling.end()
    expected = [noted(4 * x, E4M3), noted(w, E4M3), noted(4 * g, E5M2)]
    assert len({*expected, x.abs().max(), w.abs().max(), 4 * g.abs().max()}) == 6  # none is round
    assert torch.equal(module.amax_history[:, 0], torch.stack(expected))  # type: ignore[index]
    scaling.begin()  # forgets what a validation noted
    assert not module.amax.any()  # type: ignore[operator, union-attr]
    scaling.end()
    assert torch.equal(module.amax_history[:, 0], torch.stack(expected))  # type: ignore[index]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("known", [True, False])
def test_an_infinity_or_a_nan_is_seen_and_never_noted(known: bool, bad: float) -> None:
    x, w, g = tensors((33, 160, 272), torch.float32)
    module = delayed(w)
    scaling = keeper(module)
    if known:
        dict(products(module, x, g))
        scaling.end()
    for number, letter in ((0, "x"), (2, "g")):
        before = module.amax_history[number].clone()  # type: ignore[index]
        spoilt = {"x": x.clone(), "g": g.clone()}
        spoilt[letter][4, 9] = bad
        scaling.begin()
        module.zero_grad()
        found = dict(products(module, *spoilt.values()))
        if letter == "x":
            assert not found["out"][4].isfinite().any()
            assert not found["weight"][:, 9].isfinite().any()
        else:
            assert not found["dx"][4].isfinite().any() and not found["weight"][9].isfinite().any()
        scaling.end()
        assert torch.equal(module.amax_history[number], before)  # type: ignore[index]
    assert module.amax_history[1, 0] == noted(w, E4M3)  # type: ignore[index]


def test_a_cut_ends_at_the_end_of_the_format() -> None:
    x = torch.tensor([[1e38, -1e38, 3.0, math.inf, math.nan]])
    for dtype in (E4M3, E5M2):
        scaled = cast(x, dtype, (0, 0), powers_of_two=True, amax=torch.tensor(1.0))
        values, end = scaled.values.float()[0], torch.finfo(dtype).max
        assert values[:3].tolist() == [end, -end, end] and not values[3:].isfinite().any()


# --- the real Trainer ----------------------------------------------------------------------------


def settings(**others: Any) -> dict[str, Any]:
    return options("tensorwise") | {SCALING: "delayed", "training.steps": 3} | others


def histories(trainer: RecordingTrainer) -> dict[str, Tensor]:
    trainer.train()
    return trainer.model.scaling.state()


def of_all_ranks(finished: Run) -> dict[str, Tensor]:
    return {name: history for part in finished.returned for name, history in part.items()}


def assert_same_experiment(ours: Run, expected: Run) -> None:
    """Gradients of the first step, losses of all, and what the first two have noted.

    What comes later parts where a number is on the edge between two of float8 (test_meshes.py).
    """
    assert not ours.apart
    found = errors(ours, expected)
    wanted = {name: e for name, e in found.items() if name == "loss" or "gradient" in name}
    assert len(wanted) > 28 and max(wanted.values()) < TOLERANCE, wanted
    assert_same_histories(ours, expected, but_newest=1)


def assert_same_histories(ours: Run, expected: Run, but_newest: int = 0) -> None:
    merged, wanted = of_all_ranks(ours), of_all_ranks(expected)
    assert merged.keys() == wanted.keys() and merged
    for part in ours.returned:
        assert all(torch.equal(history, merged[name]) for name, history in part.items())
    for name, history in merged.items():
        kept = slice(but_newest, None)
        assert torch.equal(history[:, kept], wanted[name][:, kept]), name


@cache
def one_process(scaling: str) -> Run:
    return run(Mesh(), settings(**{SCALING: scaling}), WIDE, act=histories)


MESHES = [
    (Mesh(dp_shard=2, tp=2), {}),
    (Mesh(dp_shard=2), {"parallelism.zero_stage": 1, "training.local_batch_size": 2}),
    (Mesh(dp_shard=2), {"quantize.linear.float8.enable_fsdp_float8_all_gather": True}),
    (Mesh(tp=2), {}),
    (Mesh(tp=2), {"quantize.linear.float8.enable_tp_float8_all_gather": True}),
    (Mesh(cp=2), {}),
    (Mesh(pp=2, dp_shard=2), {}),
    (Mesh(pp=2), {"parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}),
    (Mesh(), {"activation_checkpoint.mode": "full", "training.local_batch_size": 2}),
    (Mesh(), {"activation_checkpoint.mode": "selective",
              "activation_checkpoint.selective_ac_option": "op"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param(mesh, more, id=f"{mesh}-{number}", marks=[SLOW] if number else [])
        for number, (mesh, more) in enumerate(MESHES)
    ],
)
def test_any_mesh_computes_three_steps_as_one_process_does(
    mesh: Mesh, more: dict[str, Any]
) -> None:
    one, dynamic = one_process("delayed"), one_process("dynamic")
    assert_same_experiment(run(mesh, settings() | more, WIDE, act=histories), one)
    assert dynamic.series("loss")[0] == one.series("loss")[0]
    assert dynamic.series("loss")[1:] != one.series("loss")[1:]


@SLOW
def test_beside_experts_that_ranks_share_out_it_is_the_same() -> None:
    one = run(Mesh(), settings(), MIXTURE, act=histories)
    more = {"parallelism.expert_parallel_degree": 2}
    assert_same_experiment(run(Mesh(dp_shard=2), settings() | more, MIXTURE, act=histories), one)


@SLOW
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (Mesh(), {"training.local_batch_size": 2}),
        (Mesh(tp=2), {"activation_checkpoint.mode": "full"}),
        (Mesh(pp=2), {"parallelism.pipeline_parallel_schedule": "1F1B"}),
        (Mesh(pp=2), {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
        (Mesh(), {"compile.backend": "inductor"}),
    ],
    ids=str,
)
def test_compiled_equals_eager(mesh: Mesh, more: dict[str, Any]) -> None:
    """To note is to write in a graph, also while several micro-batches wait for their backward."""
    compiled = {**COMPILED, "compile.components": ["model"], **more}
    eager = {name: value for name, value in more.items() if not name.startswith("compile.")}
    expected = run(mesh, settings() | eager, WIDE, act=histories)
    ours = run(mesh, settings() | compiled, WIDE, trainer=CountingTrainer, timeout=300.0,
               act=histories)  # fmt: skip
    assert_equal(ours, expected)
    assert_same_histories(ours, expected)


class Reductions(TorchDispatchMode):
    """The shapes of what all-reduces are given that are no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::allreduce_":
            self.shapes.append(list(args[0][0].shape))
        return func(*args, **(kwargs or {}))


def train_and_count(trainer: RecordingTrainer) -> list[list[int]]:
    with Reductions() as seen:
        trainer.train()
    return seen.shapes


@pytest.mark.parametrize(
    ("mesh", "linears"),
    [(Mesh(dp_shard=2), 28), pytest.param(Mesh(pp=2, dp_shard=2), 14, marks=SLOW)],
    ids=str,
)
def test_one_collective_a_step_carries_what_all_linears_saw(mesh: Mesh, linears: int) -> None:
    dynamic = run(mesh, settings(**{SCALING: "dynamic"}), WIDE, act=train_and_count)
    ours = run(mesh, settings(), WIDE, act=train_and_count)
    for shapes, other in zip(ours.returned, dynamic.returned, strict=True):
        assert shapes.count([linears, 3]) == 3
        assert len(shapes) == len(other) + 3


class Skipping(RecordingTrainer):
    """Skips the last step."""

    def gradient_norm(self) -> float:
        return math.inf if self.step == 2 else super().gradient_norm()


def test_a_skipped_step_notes_nothing() -> None:
    skipped = run(Mesh(), settings(), WIDE, trainer=Skipping, act=histories)
    two_steps = run(Mesh(), settings(**{"training.steps": 2}), WIDE, act=histories)
    assert_same_histories(skipped, two_steps)


# --- after a load --------------------------------------------------------------------------------


SAVING = {"checkpoint.enable": True, "lr_scheduler.total_steps": 4}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Mesh(dp_shard=2), Mesh(tp=2)),
        pytest.param(Mesh(pp=2), Mesh(dp_shard=2, tp=2), marks=SLOW),
        pytest.param(Mesh(tp=2), Mesh(pp=2), marks=SLOW),
    ],
    ids=str,
)
def test_another_mesh_goes_on_with_the_same_histories(
    first: Mesh, second: Mesh, tmp_path: Path
) -> None:
    saved = of_all_ranks(run(first, settings(**SAVING), WIDE, act=histories, folder=tmp_path))
    more = settings(**SAVING, **{"training.steps": 4})
    loaded = run(second, more, WIDE, act=look_and_train, folder=tmp_path)
    seen: dict[str, Tensor] = {}
    later: dict[str, Tensor] = {}
    for before, after in loaded.returned:
        seen |= before
        later |= after
    assert seen.keys() == later.keys() == saved.keys()
    for name, history in saved.items():
        assert torch.equal(seen[name], history)
        assert torch.equal(later[name][:, 1:], history[:, :-1]) and later[name][:, 0].all()


@SLOW
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    more = settings(**SAVING, **{"training.steps": 4})
    unstopped = run(Mesh(), more, WIDE, act=histories)
    run(Mesh(), settings(**SAVING), WIDE, act=histories, folder=tmp_path)
    went_on = run(Mesh(), more, WIDE, act=histories, folder=tmp_path)
    assert_same_histories(went_on, unstopped)
    for name, parameter in unstopped.parameters.items():
        assert torch.equal(went_on.parameters[name], parameter), name


def look_and_train(trainer: RecordingTrainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    assert trainer.step == 3
    before = {name: history.clone() for name, history in trainer.model.scaling.state().items()}
    return before, histories(trainer)


class Warned(RecordingTrainer):
    """Keeps what is told while a checkpoint is compared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lines: list[str] = []

        def keep(form: str, *args: Any) -> None:
            self.lines.append(form % args)

        with mock.patch.object(compare.logger, "warning", keep):
            super().__init__(*args, **kwargs)


def look_and_tell(trainer: Warned) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    return *look_and_train(trainer), trainer.lines


@pytest.mark.parametrize(
    "first",
    [{SCALING: "dynamic"}, {"quantize.linear.float8.amax_history_length": 5}],
    ids=["dynamic", "length"],
)
def test_histories_that_a_checkpoint_lacks_begin_anew(
    first: dict[str, Any], tmp_path: Path
) -> None:
    run(Mesh(), settings(**SAVING, **first), WIDE, act=histories, folder=tmp_path)
    more = settings(**SAVING, **{"training.steps": 4})
    went_on = run(Mesh(), more, WIDE, trainer=Warned, act=look_and_tell, folder=tmp_path)
    ((before, after, lines),) = went_on.returned
    assert not any(history.any() for history in before.values())
    assert all(history[:, 0].all() and not history[:, 1:].any() for history in after.values())
    assert any("begins anew: trainer.amax_history.layers.0" in line for line in lines)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_recipes_with_a_scale_a_block_are_refused(name: str) -> None:
    argv = [f"--quantize.linear.float8.recipe_name={name}", f"--{SCALING}=delayed"]
    (line,) = problems(argv)
    assert line == (
        f'{SCALING} = "delayed" (from --{SCALING}): the steps before are known of a whole tensor, '
        "and this recipe has a scale a block; use tensorwise, or dynamic scaling"
    )
    assert problems([argv[1], "--quantize.linear.float8.recipe_name=tensorwise"]) == []
