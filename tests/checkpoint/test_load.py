"""What a load refuses, in one line that names the key, the reason and the fix."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manifest import flip_a_byte
from tests.checkpoint.worlds import SHAPES, Run, full, same, train_and_save
from tests.world import run_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import cast_state, materialise_state, part_of
from torchtitan_lite.config import ConfigError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole steps 2 and 4, weights alone at 6."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(_write_saved, 1, folder)
    return folder


def _write_saved(folder: Path) -> None:
    train_and_save(folder, {"fsdp": 1}, [2, 4])
    run = Run({"fsdp": 1}, seed="exported")
    CheckpointManager(folder).save(6, run.state(), model_only=True)


def refusals(cases: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The ConfigError of each case; all in one world, since starting one takes the most time."""
    messages = {}
    for name, case in cases.items():
        with pytest.raises(ConfigError) as caught:
            case()
        messages[name] = str(caught.value)
        assert "\n" not in messages[name]
    return messages


def wrong_requests(folder: Path) -> dict[str, str]:
    run, manager = Run({"fsdp": 1}), CheckpointManager(folder)
    materialise_state(run.optimizer)
    state, elsewhere = run.state(), CheckpointManager(folder / "nowhere")
    before = run.full()
    messages = refusals(
        {
            "absent step": lambda: manager.load(state, step=3),
            "empty folder": lambda: elsewhere.load(state, step=3),
            "weights alone, newest": lambda: manager.load(state),
            "weights alone, asked for": lambda: manager.load(state, step=6),
            "run folder": lambda: manager.load_from(folder, state, model_only=True),
            "no folder": lambda: manager.load_from(folder / "x", state, model_only=True),
            "whole of weights": lambda: manager.load_from(
                folder / "step-6", state, model_only=False
            ),
        }
    )
    assert same(run.full(), before)
    return messages


def test_wrong_requests_are_refused_with_the_fix_and_nothing_is_changed(saved: Path) -> None:
    found = run_ranks(wrong_requests, 1, saved)[0]
    for words, name in [
        (("load_step = 3", "there are [2, 4, 6]", "-1 takes the newest"), "absent step"),
        (("load_step = 3", "it holds no checkpoint"), "empty folder"),
        (("initial_load_path", "weights alone", "[2, 4]"), "weights alone, newest"),
        (("load_step = 6", "initial_load_path", "[2, 4]"), "weights alone, asked for"),
        (("initial_load_path", "name one of its steps: [2, 4, 6]"), "run folder"),
        (("initial_load_path", "name a whole folder step-N"), "no folder"),
        (("initial_load_path", "initial_load_model_only = true"), "whole of weights"),
    ]:
        assert all(word in found[name] for word in words), (name, found[name])


def other_models(folder: Path) -> dict[str, str]:
    def loading(shapes: dict, **options: Any) -> Callable[[], Any]:
        run = Run({"fsdp": 1}, shapes=shapes, optimizer=options.pop("optimizer", "foreach"))
        return lambda: run.load(CheckpointManager(folder), step=4, **options)

    more = {f"layers.{i}.mlp.up_proj.weight": (16, 8) for i in range(8)}
    fewer = {name: shape for name, shape in SHAPES.items() if "embed" not in name}
    wider = {**SHAPES, "embed_tokens.weight": (10, 9)}
    without = ["optimizer"]
    messages = refusals(
        {
            "more layers": loading({**SHAPES, **more}, exclude=without),
            "no embedding": loading(fewer, exclude=without),
            "wider": loading(wider, exclude=without),
            "all at once": loading(
                {**fewer, "norm.weight": (8,), "layers.0.mlp.up_proj.weight": (4, 4)},
                exclude=without,
            ),
            "other optimizer": loading(SHAPES, optimizer="sgd"),
        }
    )
    assert loading(SHAPES, optimizer="sgd", exclude=without)() == 4  # with the fix it loads
    return messages


def test_a_checkpoint_of_another_model_is_refused_with_all_differences(saved: Path) -> None:
    found = run_ranks(other_models, 1, saved)[0]
    for name in set(found) - {"other optimizer"}:
        assert found[name].startswith(f"checkpoint of another model: {saved / 'step-4'}: "), name
    assert "7 missing there (layers.1.mlp.up_proj.weight, " in found["more layers"]
    assert "layers.5.mlp.up_proj.weight and 2 more)" in found["more layers"]
    assert "1 not in this model (embed_tokens.weight)" in found["no embedding"]
    assert "1 of another shape (embed_tokens.weight [10, 8] there, [10, 9] here)" in found["wider"]
    for words in ("missing there (norm.weight)", "not in this model (embed", "[4, 4] here"):
        assert words in found["all at once"]
    assert found["other optimizer"].startswith("checkpoint of another optimizer or trainer")
    assert "momentum_buffer" in found["other optimizer"]
    assert "exclude_from_loading" in found["other optimizer"]


def stage_of_another_model(folder: Path) -> str:
    """Only the stage on rank 1 differs; both ranks must say so."""
    rank = torch.distributed.get_rank()
    names = list(SHAPES)
    mine = names[:2] if rank == 0 else names[2:]
    state = {name: torch.zeros(SHAPES[name]) for name in mine}
    if rank == 1:
        state["lm_head.weight"] = torch.zeros(10, 8)
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(folder).load_from(folder / "step-6", state, model_only=True)
    return str(caught.value)


def test_a_difference_on_one_stage_is_told_by_all_ranks(saved: Path) -> None:
    messages = run_ranks(stage_of_another_model, 2, saved)
    assert messages[0] == messages[1]
    assert "1 missing there (lm_head.weight)" in messages[0]
    assert "not in this model" not in messages[0]  # what the other stage holds is no surplus


def starts(folder: Path) -> list[Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan_lite").addHandler(handler)
    manager, run = CheckpointManager(folder), Run({"fsdp": 1})
    materialise_state(run.optimizer)
    state = run.state()
    nothing = CheckpointManager(folder / "nowhere").load(state)
    manager.load_from(folder / "step-4", state, model_only=True)
    weights_only = [name for name, tensor in run.full().items() if tensor.any()]
    manager.load_from(folder / "step-4", state, model_only=False)
    whole = [name for name, tensor in state.items() if full(tensor).any()]
    run_without = Run({"fsdp": 1}, seed="another")
    before = run_without.full()
    run_without.load(manager, step=4, exclude=["model", "train_state"])
    kept = [
        name
        for name, tensor in run_without.full().items()
        if name in before and torch.equal(tensor, before[name])
    ]
    explicit = run.load(manager, step=2)
    return [nothing, weights_only, whole, kept, explicit, lines]


def test_what_is_asked_for_is_loaded_and_nothing_else(saved: Path) -> None:
    nothing, weights_only, whole, kept, explicit, lines = run_ranks(starts, 1, saved)[0]
    assert nothing is None and explicit == 2
    assert weights_only == list(SHAPES)
    assert len(whole) == len(SHAPES) * 4 + 2
    assert kept == [*SHAPES, "trainer.step", "trainer.tokens_seen"]
    assert any("load_step = 2: [4, 6] are replaced" in line for line in lines)


def all_damaged(folder: Path) -> str:
    return refusals({"all": lambda: Run({"fsdp": 1}).load(CheckpointManager(folder))})["all"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(
    saved: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    for step in (2, 4, 6):
        flip_a_byte(folder / f"step-{step}" / "__0_0.distcp")
    message = run_ranks(all_damaged, 1, folder)[0]
    assert "load_step = -1: damaged: " in message and message.count("__0_0.distcp: ") == 3


def from_half_precision(folder: Path) -> bool:
    run = Run({"fsdp": 1})
    half = cast_state(
        {k: v for k, v in run.state().items() if part_of(k) == "model"}, torch.bfloat16
    )
    CheckpointManager(folder).save(1, half, model_only=True)
    loaded = Run({"fsdp": 1}, seed="another")
    CheckpointManager(folder).load_from(folder / "step-1", loaded.state(), model_only=True)
    return all(
        torch.equal(weight.full_tensor(), half[name].full_tensor().float())  # type: ignore
        for name, weight in loaded.named_parameters.items()
    )


def test_weights_saved_in_half_precision_load_into_full(tmp_path: Path) -> None:
    assert run_ranks(from_half_precision, 1, tmp_path) == [True]
