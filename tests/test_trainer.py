"""What a run promises beside being right on every mesh: bad gradients, numbers, precision, files.

Every test runs the real Trainer on the tiny decoder of the parity harness.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.harness import (
    GLOBAL_BATCH_SIZE,
    SEQ_LEN,
    TINY,
    Mesh,
    RecordingTrainer,
    assert_equal,
    reference,
    run,
)
from tests.parity.test_resume import Listening
from torchtitan_lite import device
from torchtitan_lite.data.loader import Batch
from torchtitan_lite.data.sources import IGNORE_LABEL, SyntheticRows
from torchtitan_lite.optim.clip import gradient_norm
from torchtitan_lite.trainer import TrainingStopped

PAIRS = [Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- devices -------------------------------------------------------------------------------------


def said_when_built(mesh: Mesh) -> list[str]:
    """What rank 0 says while it builds a Trainer."""
    return run(mesh, trainer=Listening, act=lambda trainer: trainer.said).returned[0]


def test_ranks_on_different_kinds_of_devices_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's generator fills a tensor by as many threads as the device runs at once."""
    drawn = "devices of different kinds draw different weights"
    assert not any(drawn in line for line in said_when_built(PAIRS[0]))
    monkeypatch.setattr(device, "device_name", lambda: f"NVIDIA H{int(os.environ['RANK']) + 1}00")
    said = said_when_built(PAIRS[0])
    assert any(line.endswith("on 2 x NVIDIA H100 or NVIDIA H200") for line in said)
    assert any(drawn in line for line in said)


# --- gradients that are not finite ---------------------------------------------------------------


class Poisoned(RecordingTrainer):
    """One element of one shard of rank 1 is not a number, in step 2; watches what that changes."""

    poisoned_steps: tuple[int, ...] = (2,)
    unchanged: dict[int, bool]

    def forward_backward(self, batch: Batch) -> None:
        super().forward_backward(batch)
        if self.mesh.rank == 1 and self.step + 1 in self.poisoned_steps:
            last = list(self.model.named_parameters.values())[-1]
            assert last.grad is not None
            local(last.grad).view(-1)[0] = math.nan

    def train_step(self) -> dict[str, Any]:
        before = self.bits()
        record = super().train_step()
        after = self.bits()
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        self.__dict__.setdefault("unchanged", {})[self.step] = len(before) == len(after) and same
        return record

    def bits(self) -> list[Tensor]:
        """This rank's parts of weights and moments."""
        held: list[Tensor] = []
        for parameter in self.model.named_parameters.values():
            held += [local(parameter).clone()]
            held += [local(value).clone() for value in self.optimizer.state[parameter].values()]
        return held


def train_watched(trainer: Poisoned) -> tuple[dict[int, bool], int]:
    trainer.train()
    return trainer.unchanged, trainer.skipped_steps


@pytest.mark.parametrize("mesh", PAIRS, ids=str)
def test_a_bad_gradient_on_one_rank_changes_no_bit_on_any_and_the_run_goes_on(mesh: Mesh) -> None:
    result = run(mesh, {"checkpoint.enable": True}, trainer=Poisoned, act=train_watched)
    for unchanged, skipped in result.returned:
        assert unchanged == {1: False, 2: True, 3: False, 4: False}
        assert skipped == 1
    assert [record.get("event") for record in result.metrics] == [None, "skipped", None, None]
    assert [record["skipped_steps"] for record in result.metrics] == [0, 1, 1, 1]
    assert result.metrics[1]["grad_norm"] is None  # JSON knows no NaN
    assert all(math.isfinite(record["loss"]) for record in result.metrics)
    assert all(parameter.isfinite().all() for parameter in result.parameters.values())


class PoisonedAndAlone(Poisoned):
    """Each rank looks at its own gradients only."""

    def gradient_norm(self) -> float:
        return gradient_norm(
            self.model.named_parameters.values(),
            ranks_per_stage=self.mesh.ranks_per_stage,
            group=self.mesh.tp.get_group(),
        )


def test_ranks_that_do_not_ask_each_other_would_step_apart() -> None:
    result = run(Mesh(dp_shard=2), trainer=PoisonedAndAlone, act=train_watched)
    assert [unchanged[2] for unchanged, _ in result.returned] == [False, True]


class AlwaysPoisoned(Poisoned):
    poisoned_steps = (2, 3, 4)


def train_until_stopped(trainer: RecordingTrainer) -> tuple[str, int]:
    try:
        trainer.train()
    except TrainingStopped as error:
        return str(error), trainer.step
    return "", trainer.step


def test_bad_steps_in_a_row_stop_every_rank_with_the_reason(tmp_path: Path) -> None:
    options = {"training.max_skipped_steps": 2, "training.steps": 9}
    result = run(
        Mesh(dp_shard=2), options, trainer=AlwaysPoisoned, act=train_until_stopped, folder=tmp_path
    )
    for message, step in result.returned:
        assert step == 3
        assert "not finite in 2 steps in a row, the last of them step 3" in message
        assert "lower optimizer.lr" in message and "training.max_skipped_steps" in message


class PoisonedNowAndThen(Poisoned):
    poisoned_steps = (1, 3, 4, 6)


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run() -> None:
    options = {"training.max_skipped_steps": 3, "training.steps": 7}
    result = run(Mesh(dp_shard=2), options, trainer=PoisonedNowAndThen, act=train_until_stopped)
    assert result.returned == [("", 7)] * 2
    assert result.series("skipped_steps") == [1, 1, 2, 3, 3, 4, 4]


# --- the numbers of a run ------------------------------------------------------------------------


def test_the_first_step_of_a_warm_up_learns_and_so_does_the_last() -> None:
    rates = reference({}).series("lr")
    assert rates[:2] == pytest.approx([1.5e-3, 3e-3])
    assert rates[-1] > 0
    start = run(Mesh(), act=lambda trainer: None).parameters
    trained = run(Mesh(), {"training.steps": 1, "lr_scheduler.total_steps": 4}).parameters
    assert all(not torch.equal(trained[name], start[name]) for name in start)


def test_tokens_are_counted_over_the_whole_global_batch() -> None:
    for mesh in (Mesh(dp_shard=2), Mesh(pp=2)):
        tokens = run(mesh, {"training.steps": 3}).series("tokens_seen")
        assert tokens == [GLOBAL_BATCH_SIZE * SEQ_LEN * step for step in (1, 2, 3)]


def train_and_average(trainer: RecordingTrainer) -> float:
    """This rank's own mean loss of the last batch."""
    trainer.train()
    return trainer.loss.totals[1].item() / trainer.loss.num_local_tokens


def test_loss_max_is_the_worst_rank_of_those_that_read_rows() -> None:
    result = run(Mesh(dp_shard=2), {"training.steps": 1}, act=train_and_average)
    (record,) = result.metrics
    assert len(set(result.returned)) == 2
    assert record["loss_max"] == max(result.returned) > record["loss"] > min(result.returned)
    (alone,) = run(Mesh(), {"training.steps": 1}).metrics
    assert alone["loss_max"] == pytest.approx(alone["loss"], rel=1e-12)
    (piped,) = run(Mesh(pp=2), {"training.steps": 1}).metrics
    assert piped["loss_max"] == pytest.approx(alone["loss"], rel=1e-6)


def test_z_loss_is_trained_on_and_reported_apart() -> None:
    weight = 0.05
    with_z = run(Mesh(tp=2), {"loss.z_loss_weight": weight})
    without = reference({})
    assert not without.series("z_loss")
    # The first forward is the same: the logged loss is the cross-entropy alone.
    assert with_z.series("loss")[0] == pytest.approx(without.series("loss")[0], rel=1e-6)
    # Fresh logits are small, so log Z is about the log of the vocabulary.
    expected = weight * math.log(TINY.vocab_size) ** 2
    assert with_z.series("z_loss")[0] == pytest.approx(expected, rel=0.05)
    assert with_z.series("z_loss")[-1] < with_z.series("z_loss")[0]
    assert with_z.series("grad_norm")[0] != pytest.approx(without.series("grad_norm")[0], rel=1e-3)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_shard=2)], ids=str)
def test_a_batch_without_a_single_label_has_no_loss_and_no_gradient(mesh: Mesh) -> None:
    unlabelled = SyntheticRows(TINY.vocab_size, SEQ_LEN, num_rows=20, seed=5, ignore_fraction=1.0)
    assert unlabelled[0][1].eq(IGNORE_LABEL).all()
    result = run(mesh, {"training.steps": 2}, source=unlabelled)
    assert result.series("loss") == [0.0, 0.0]
    assert result.series("grad_norm") == [0.0, 0.0]
    assert all(parameter.isfinite().all() for parameter in result.parameters.values())


# --- precision -----------------------------------------------------------------------------------


def train_and_list_types(trainer: RecordingTrainer) -> dict[str, set[torch.dtype]]:
    seen: dict[str, set[torch.dtype]] = {"output": set(), "parameter": set(), "gradient": set()}
    for part in trainer.model.parts:
        for layer in part.layers.values():
            layer.register_forward_hook(lambda module, args, out: seen["output"].add(out.dtype))
    trainer.forward_backward(next(trainer.loader))
    for parameter in trainer.model.named_parameters.values():
        assert parameter.grad is not None
        seen["parameter"].add(parameter.dtype)
        seen["gradient"].add(parameter.grad.dtype)
    trainer.optimizer.step()
    seen["moment"] = {state["exp_avg"].dtype for state in trainer.optimizer.state.values()}
    return seen


@pytest.mark.parametrize("mesh", [Mesh(), *PAIRS], ids=str)
def test_a_layer_computes_in_bf16_and_keeps_fp32_on_every_mesh(mesh: Mesh) -> None:
    options = {"training.mixed_precision_param": "bfloat16"}
    for seen in run(mesh, options, act=train_and_list_types).returned:
        assert seen.pop("output") == {torch.bfloat16}
        assert set.union(*seen.values()) == {torch.float32}
    for seen in run(mesh, act=train_and_list_types).returned:
        assert set.union(*seen.values()) == {torch.float32}


def test_bf16_trains_about_what_fp32_trains() -> None:
    options = {"training.mixed_precision_param": "bfloat16"}
    losses, exact = run(Mesh(tp=2), options).series("loss"), reference({}).series("loss")
    assert losses == pytest.approx(exact, rel=5e-3)
    assert losses != pytest.approx(exact, rel=1e-6)


def test_parameters_stored_in_bf16_have_bf16_gradients_and_moments() -> None:
    options = {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
    (seen,) = run(Mesh(), options, act=train_and_list_types).returned
    assert set.union(*seen.values()) == {torch.bfloat16}


def test_offloading_to_the_cpu_changes_nothing() -> None:
    options = {"training.enable_cpu_offload": True, "training.max_norm": 0.1}
    assert_equal(run(Mesh(dp_shard=2), options), reference({"training.max_norm": 0.1}))


def is_deterministic(trainer: RecordingTrainer) -> bool:
    trainer.train()
    return torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_algorithms_are_asked_for_only_on_request(wanted: bool) -> None:
    options = {"debug.deterministic": wanted, "training.steps": 1}
    assert run(Mesh(dp_shard=2), options, act=is_deterministic).returned == [wanted] * 2


# --- the files of a run --------------------------------------------------------------------------


def test_a_trace_and_both_trackers_are_written_beside_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = {
        "metrics.enable_tensorboard": True,
        "metrics.enable_wandb": True,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": 3,
        "profiling.profiler_warmup": 1,
    }
    run(Mesh(dp_shard=2), options, folder=tmp_path)
    for rank in (0, 1):
        trace = tmp_path / "profile_traces" / "iteration_3" / f"rank{rank}_trace.json"
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("FSDP" in str(name) for name in names)
    assert len(list((tmp_path / "tb").glob("events.out.tfevents.*"))) == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1


def train_and_hand_over_what_is_whole(trainer: RecordingTrainer) -> dict[str, Tensor]:
    """Of the parameters that this rank holds whole, as the other one does."""
    trainer.train()
    return {
        name: local(parameter).clone()
        for name, parameter in trainer.model.named_parameters.items()
        if local(parameter).shape == parameter.shape
    }


@pytest.mark.parametrize(("mesh", "num_whole"), [(Mesh(dp_shard=2), 39), (Mesh(tp=2), 9)], ids=str)
def test_what_two_ranks_both_hold_stays_the_same_bits(mesh: Mesh, num_whole: int) -> None:
    options = {"training.max_norm": 0.1, "parallelism.zero_stage": 0}
    first, second = run(mesh, options, act=train_and_hand_over_what_is_whole).returned
    assert len(first) == num_whole
    assert all(torch.equal(first[name], second[name]) for name in first)
