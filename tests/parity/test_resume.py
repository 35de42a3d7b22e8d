"""A run that was stopped goes on as if it had not been: on the same mesh bit by bit, on any other
within the tolerance of a mesh.

The real Trainer saves, ends, and a fresh one on fresh ranks resumes from the folder. Six steps of
eight rows read the twenty rows of the source more than twice, so steps 1 and 2 end in the first
epoch, 3 and 4 in the second, and step 5 on the very end of it. The twins at the end leave one
thing behind (the moments, the place in the data, the step) and the comparison turns red.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.test_manifest import flip_a_byte
from tests.parity.harness import (
    SEQ_LEN,
    TINY,
    TOLERANCE,
    Mesh,
    RecordingTrainer,
    Run,
    relative_error,
    run,
    whole,
)
from tests.world import RankFailure
from torchtitan_lite.checkpoint.state import optimizer_state
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.observe.logging import logger
from torchtitan_lite.observe.metrics import read_metrics

STEPS = 6
ONE, DP2 = Mesh(), Mesh(dp_shard=2)
SCHEDULE = {"lr_scheduler.total_steps": STEPS, "lr_scheduler.decay_type": "cosine"}
EVERY_SECOND = {"checkpoint.interval": 2}
VALIDATION: dict[str, Any] = {
    "validation.enable": True,
    "validation.dataset": "synthetic",
    "validation.freq": 2,
    "validation.local_batch_size": 2,
}


class Listening(RecordingTrainer):
    """Keeps what it logs, from its building on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(  # type: ignore[method-assign]
            record.getMessage()
        )
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        super().__init__(*args, **kwargs)


@dataclasses.dataclass
class Seen:
    """What a rank knows of itself: its full moments, where it is, what it said."""

    moments: dict[str, Tensor]
    step: int
    tokens_seen: int
    consumed_samples: int
    said: list[str]


def look(trainer: Listening) -> Seen:
    state = optimizer_state(trainer.optimizer, trainer.model.named_parameters)
    return Seen(
        moments={name: whole(value) for name, value in state.items()},
        step=trainer.step,
        tokens_seen=trainer.tokens_seen,
        consumed_samples=trainer.loader.consumed_samples,
        said=trainer.said,
    )


def train_and_look(trainer: Listening) -> Seen:
    trainer.train()
    return look(trainer)


def train(
    folder: Path | None = None,
    options: dict[str, Any] | None = None,
    *,
    until: int = STEPS,
    mesh: Mesh = ONE,
    trainer: type[Listening] = Listening,
    act: Any = train_and_look,
    model: ModelConfig = TINY,
) -> Run:
    """Train to step `until`; with a folder, resume from what is there and save at the end."""
    settings = {
        **SCHEDULE,
        "training.steps": until,
        "checkpoint.enable": folder is not None,
        **(options or {}),
    }
    return run(mesh, settings, model, folder=folder, trainer=trainer, act=act)


@functools.cache
def unstopped(mesh: Mesh = ONE, validated: bool = False, model: ModelConfig = TINY) -> Run:
    """Six steps in one go, without checkpoints."""
    return train(options=VALIDATION if validated else {}, mesh=mesh, model=model)


def moments(result: Run) -> dict[str, Tensor]:
    """Of all ranks together."""
    return {name: tensor for seen in result.returned for name, tensor in seen.moments.items()}


def tensors(result: Run) -> dict[str, Tensor]:
    return {**result.parameters, **moments(result)}


def said(result: Run) -> str:
    """What rank 0 said."""
    return "\n".join(result.returned[0].said)


NUMBERS = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens_seen", "validation_loss")


def curve(result: Run, names: tuple[str, ...] = NUMBERS) -> list[dict[str, Any]]:
    """The logged steps, less what is measured by the clock."""
    return [{name: record.get(name) for name in names} for record in result.metrics]


def is_bitwise(ours: Run, expected: Run) -> bool:
    """The same curve, weights and moments, to the last bit."""
    mine, theirs = tensors(ours), tensors(expected)
    assert mine.keys() == theirs.keys()
    equal = all(torch.equal(mine[name], theirs[name]) for name in theirs)
    return equal and curve(ours) == curve(expected)


def largest_error(ours: Run, expected: Run) -> float:
    """Of curve, weights and moments; the learning rate must be equal to the last bit."""
    assert ours.series("lr") == expected.series("lr")
    assert ours.series("tokens_seen") == expected.series("tokens_seen")
    found = []
    for name in ("loss", "grad_norm", "validation_loss"):
        pairs = zip(ours.series(name), expected.series(name), strict=True)
        found += [abs(a - b) / abs(b) for a, b in pairs]
    mine, theirs = tensors(ours), tensors(expected)
    assert mine.keys() == theirs.keys()
    return max(found + [relative_error(mine[name], theirs[name]) for name in theirs])


# --- the same curve ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "async_mode"),
    [
        (ONE, "disabled"),
        (DP2, "disabled"),
        (DP2, "async"),
        pytest.param(Mesh(dp_replicate=2, tp=2), "disabled", marks=pytest.mark.slow),
        (Mesh(pp=2), "async"),
    ],
    ids=lambda value: str(value),
)
def test_three_steps_and_three_more_are_six_bit_by_bit(
    mesh: Mesh, async_mode: str, tmp_path: Path
) -> None:
    options = {"checkpoint.async_mode": async_mode}
    train(tmp_path, options, until=3, mesh=mesh)
    resumed = train(tmp_path, options, mesh=mesh)
    assert len(resumed.metrics) == STEPS
    assert is_bitwise(resumed, unstopped(mesh))


@pytest.mark.parametrize(
    ("stops", "legs"),
    [
        # Twice in the first epoch, then over two epochs' ends.
        ((1, 2), [(DP2, 3), (Mesh(cp=2, tp=2), 3), (Mesh(pp=2, dp_replicate=2), 3)]),
        # Once inside the second epoch, once on the very end of it.
        ((3, 5), [(DP2, 0), (DP2, 3), (DP2, 1)]),
    ],
    ids=["three-meshes", "three-zero-stages"],
)
def test_a_chain_of_meshes_gives_the_curve_of_one_process(
    stops: tuple[int, int], legs: list[tuple[Mesh, int]], tmp_path: Path
) -> None:
    for until, (mesh, zero_stage) in zip((*stops, STEPS), legs, strict=True):
        options = {**VALIDATION, "parallelism.zero_stage": zero_stage}
        result = train(tmp_path, options, until=until, mesh=mesh)
    # A leg validates at its own last step too.
    validated = [record for record in result.metrics if "validation_loss" in record]
    due = [record for record in validated if record["step"] % 2 == 0]
    assert [record["step"] for record in validated] == sorted({2, 4, 6, *stops})
    result.metrics = [record for record in result.metrics if record not in validated] + due
    assert largest_error(result, unstopped(validated=True)) < TOLERANCE


def test_a_tied_embedding_goes_through_a_pipeline_and_back(tmp_path: Path) -> None:
    """The head's copy on the last stage is neither saved nor stale after a load."""
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    for until, mesh in ((2, Mesh(tp=2)), (4, Mesh(pp=2)), (STEPS, ONE)):
        result = train(tmp_path, until=until, mesh=mesh, model=tied)
    assert "lm_head.weight" not in result.parameters
    assert largest_error(result, unstopped(model=tied)) < TOLERANCE


def test_moments_are_the_same_bits_on_every_mesh_that_loads_them(tmp_path: Path) -> None:
    saved = train(tmp_path, until=3, mesh=DP2)
    assert len(moments(saved)) == 3 * len(saved.parameters)  # two moments and a count each
    for mesh in (ONE, Mesh(tp=2), Mesh(pp=2)):
        loaded = train(tmp_path, mesh=mesh, act=look)
        assert moments(loaded).keys() == moments(saved).keys()
        for name, tensor in moments(saved).items():
            assert torch.equal(moments(loaded)[name], tensor), name
        for seen in loaded.returned:
            assert (seen.step, seen.consumed_samples) == (3, 24)


def test_a_damaged_newest_step_costs_its_steps_and_nothing_else(tmp_path: Path) -> None:
    train(tmp_path, EVERY_SECOND, until=4)
    flip_a_byte(next((tmp_path / "checkpoint" / "step-4").glob("*.distcp")))
    resumed = train(tmp_path, EVERY_SECOND)
    assert "step-4: __0_0.distcp" in said(resumed)
    assert "step-4 is replaced" in said(resumed)  # and replaced, when its turn comes
    assert is_bitwise(resumed, unstopped())
    assert train(tmp_path, {"checkpoint.load_step": 4}, act=look).returned[0].step == 4


# --- the files of a run --------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, int]:
    """Every file of a folder, and when it was written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_steps_trained_again_are_appended_and_the_later_lines_count(tmp_path: Path) -> None:
    train(tmp_path, EVERY_SECOND, until=4)
    train(tmp_path, {"checkpoint.load_step": 2, "optimizer.lr": 1e-3}, until=5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 3, 4, 5]
    assert [record["lr"] for record in read_metrics(tmp_path)[2:]] == [
        json.loads(line)["lr"] for line in lines[4:]
    ]


def test_the_last_step_is_written_once_and_a_finished_run_trains_nothing(tmp_path: Path) -> None:
    finished = train(tmp_path, EVERY_SECOND, until=2)
    assert said(finished).count("saved ") == 1
    before, lines = tree(tmp_path / "checkpoint"), (tmp_path / "metrics.jsonl").read_text()
    again = train(tmp_path, EVERY_SECOND, until=2)
    assert "nothing to train: the run is at step 2 and training.steps is 2" in said(again)
    assert is_bitwise(again, finished)
    assert tree(tmp_path / "checkpoint") == before
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    train(tmp_path, until=1)
    before = tree(tmp_path)
    shallower = dataclasses.replace(TINY, num_hidden_layers=3)
    reason = r"ConfigError: .*checkpoint of another model: num_hidden_layers 4, not 3"
    with pytest.raises(RankFailure, match=reason):
        train(tmp_path, mesh=DP2, model=shallower)
    assert tree(tmp_path) == before


def test_the_last_save_can_be_weights_alone_in_another_precision(tmp_path: Path) -> None:
    options = {
        **EVERY_SECOND,
        "checkpoint.last_save_model_only": True,
        "checkpoint.export_dtype": "bfloat16",
    }
    trained = train(tmp_path, options, until=3)
    steps = tmp_path / "checkpoint"
    stored = FileSystemReader(steps / "step-3").read_metadata().state_dict_metadata
    assert stored.keys() == trained.parameters.keys()
    assert {entry.properties.dtype for entry in stored.values()} == {  # type: ignore[union-attr]
        torch.bfloat16
    }
    whole_step = FileSystemReader(steps / "step-2").read_metadata().state_dict_metadata
    assert "trainer.step" in whole_step

    with pytest.raises(RankFailure, match=r"weights alone.* or resume from one of \[2\]"):
        train(tmp_path)
    path = {"checkpoint.initial_load_path": str(steps / "step-3")}
    from_weights = train(tmp_path / "other", path, act=look)
    for name, parameter in from_weights.parameters.items():
        assert torch.equal(parameter, trained.parameters[name].bfloat16().float()), name


# --- what a run starts from ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run of three steps, saved on two ranks."""
    folder = tmp_path_factory.mktemp("origin")
    return folder, train(folder, until=3, mesh=DP2)


def initial(origin: Path) -> dict[str, Any]:
    return {"checkpoint.initial_load_path": str(origin / "checkpoint" / "step-3")}


def test_weights_alone_start_a_run_at_step_zero(origin: tuple[Path, Run], tmp_path: Path) -> None:
    folder, trained = origin
    started = train(tmp_path, initial(folder), act=look)
    (seen,) = started.returned
    assert (seen.step, seen.tokens_seen, seen.consumed_samples) == (0, 0, 0)
    assert all(tensor.eq(0).all() for tensor in seen.moments.values())
    for name, parameter in started.parameters.items():
        assert torch.equal(parameter, trained.parameters[name]), name


def test_a_whole_checkpoint_of_another_folder_goes_on_from_its_step(
    origin: tuple[Path, Run], tmp_path: Path
) -> None:
    options = {**initial(origin[0]), "checkpoint.initial_load_model_only": False}
    result = train(tmp_path, options, mesh=DP2)
    assert result.series("step") == [4, 5, 6]
    expected = unstopped(DP2)
    assert is_bitwise(result, dataclasses.replace(expected, metrics=expected.metrics[3:]))


def test_the_own_folder_comes_before_the_initial_path(
    origin: tuple[Path, Run], tmp_path: Path
) -> None:
    own = train(tmp_path, until=1)
    resumed = train(tmp_path, initial(origin[0]), act=look)
    assert resumed.returned[0].step == 1
    assert "checkpoint.initial_load_path has no effect: the run resumes" in said(resumed)
    for name, parameter in resumed.parameters.items():
        assert torch.equal(parameter, own.parameters[name]), name


def test_neither_folder_nor_path_means_fresh_weights(tmp_path: Path) -> None:
    fresh = train(tmp_path, act=look)
    assert "no checkpoint to load: fresh weights" in said(fresh)
    never_loaded = run(ONE, act=lambda trainer: None)
    for name, parameter in fresh.parameters.items():
        assert torch.equal(parameter, never_loaded.parameters[name]), name


def test_an_initial_path_that_is_no_step_is_refused(
    origin: tuple[Path, Run], tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match=r"initial_load_path = .*did you mean .*/checkpoint\?"):
        train(tmp_path, {"checkpoint.initial_load_path": str(origin[0])})
    train(tmp_path, {"checkpoint.initial_load_path": str(origin[0] / "checkpoint")}, until=1)


# --- twins: leave one thing behind ---------------------------------------------------------------


@pytest.mark.parametrize("part", ["optimizer", "dataloader"])
def test_a_part_that_is_not_loaded_is_noticed(part: str, tmp_path: Path) -> None:
    """And checkpoint.exclude_from_loading leaves that part alone behind."""
    train(tmp_path, until=3)
    options = {"checkpoint.exclude_from_loading": [part]}
    (seen,) = train(tmp_path, options, act=look).returned
    is_fresh = all(tensor.eq(0).all() for tensor in seen.moments.values())
    assert (seen.step, seen.tokens_seen) == (3, 24 * SEQ_LEN)
    assert is_fresh == (part == "optimizer")
    assert seen.consumed_samples == (0 if part == "dataloader" else 24)
    assert largest_error(train(tmp_path, options), unstopped()) > 100 * TOLERANCE


class ScheduleFromZero(Listening):
    """Counts the steps of the learning rate from the resume on."""

    def learning_rate(self, step: int) -> float:
        return super().learning_rate(step - 3)


def test_a_schedule_that_begins_again_is_noticed(tmp_path: Path) -> None:
    train(tmp_path, until=3)
    resumed = train(tmp_path, trainer=ScheduleFromZero)
    assert resumed.series("lr") != unstopped().series("lr")
    assert not is_bitwise(resumed, unstopped())
