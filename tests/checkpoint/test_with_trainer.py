"""What the Trainer saves before its optimizer ever stepped, a later run can resume from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.parity.harness import Mesh, RecordingTrainer, run
from tests.world import RankFailure


class FirstNormIsNan(RecordingTrainer):
    def gradient_norm(self) -> float:
        norm = super().gradient_norm()
        return math.nan if self.step == 0 else norm


@pytest.mark.parametrize(("optimizer", "mesh"), [("AdamW", Mesh(dp_shard=2)), ("SGD", Mesh())])
def test_a_run_whose_first_step_was_skipped_resumes_bit_by_bit(
    tmp_path: Path, optimizer: str, mesh: Mesh
) -> None:
    options = {
        "optimizer.name": optimizer,
        "training.steps": 3,
        "lr_scheduler.total_steps": 3,
        "checkpoint.enable": True,
        "checkpoint.async_mode": "async",
    }
    whole = run(mesh, options, folder=tmp_path / "whole", trainer=FirstNormIsNan)
    first = {**options, "training.steps": 1}
    stopped = run(mesh, first, folder=tmp_path / "parts", trainer=FirstNormIsNan)
    resumed = run(mesh, options, folder=tmp_path / "parts", trainer=FirstNormIsNan)
    assert [record.get("event") for record in whole.metrics] == ["skipped", None, None]
    assert [record["step"] for record in resumed.metrics] == [1, 2, 3]
    for name, weight in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], weight)
        assert not torch.equal(stopped.parameters[name], weight)


def test_a_run_that_saved_no_optimizer_state_would_not_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"training.steps": 1, "checkpoint.enable": True}
    with monkeypatch.context() as patch:
        patch.setattr("torchtitan_lite.trainer.materialise_state", lambda optimizer: None)
        run(Mesh(), options, folder=tmp_path, trainer=FirstNormIsNan)
    with pytest.raises(RankFailure, match="another optimizer .* missing there .optimizer.state"):
        run(Mesh(), options, folder=tmp_path)
