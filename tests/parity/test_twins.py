"""For each guarantee of test_parity.py, a break of it that the comparison must see.

A break is a subclass of the Trainer or one function replaced before the ranks are forked. Each
test says which quantities turn red, so it also shows which of them a fault would leave green:
gradients of twice the size pass every loss and every parameter, once the clip is active.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.parity.harness import (
    TINY,
    TOLERANCE,
    Mesh,
    RecordingTrainer,
    Run,
    assert_equal,
    errors,
    make_source,
    reference,
    run,
)
from torchtitan_lite.data.loader import Batch, Loader
from torchtitan_lite.data.sources import IGNORE_LABEL
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.optim.clip import gradient_norm
from torchtitan_lite.parallel import activation, pipeline, tensor
from torchtitan_lite.parallel.pipeline import TiedHead

SHORT = {"training.steps": 2}
CLIPPED = {"training.max_norm": 0.1}
ACCUMULATING = {"training.local_batch_size": 2}
TIED = {"tie_word_embeddings": True}
TIED_MODEL = dataclasses.replace(TINY, tie_word_embeddings=True)
RED = 1e-3  # a break must be a hundred times what is let through


def red(
    broken: Run, options: dict[str, Any] | None = None, model_changes: dict[str, Any] | None = None
) -> dict[str, float]:
    """What is off by more than RED. Nothing may lie between the tolerance and that."""
    found = errors(broken, reference(options or {}, model_changes))
    return {name: error for name, error in found.items() if not error < RED}


def kinds(wrong: dict[str, float]) -> set[str]:
    """loss, grad_norm, gradient, parameter: whatever has at least one name in `wrong`."""
    return {name.split(" of ")[0] for name in wrong}


# --- a constant factor ---------------------------------------------------------------------------


class TwiceTheGradient(RecordingTrainer):
    """As if the loss were divided by half the tokens, while the log shows the right one."""

    def forward_backward(self, batch: Batch) -> None:
        super().forward_backward(batch)
        for parameter in self.model.named_parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)


def test_twice_the_gradient_hides_behind_the_clip_and_shows_in_norm_and_gradients() -> None:
    found = errors(run(Mesh(dp_shard=2), CLIPPED, trainer=TwiceTheGradient), reference(CLIPPED))
    assert found.pop("loss") < TOLERANCE
    assert found.pop("grad_norm") == pytest.approx(1.0, rel=1e-3)
    for name, error in found.items():
        if name.startswith("gradient of"):
            assert error == pytest.approx(1.0, rel=1e-3), name
        else:
            assert error < TOLERANCE, name


def test_twice_the_gradient_shows_in_every_parameter_under_plain_descent() -> None:
    options = {"optimizer.name": "SGD", "optimizer.lr": 1.0, **SHORT}
    found = errors(run(Mesh(dp_shard=2), options, trainer=TwiceTheGradient), reference(options))
    off = [error for name, error in found.items() if name.startswith("parameter of")]
    assert len(off) == len(reference(options).parameters)
    # The smallest is that of a norm, whose weights move little.
    assert min(off) > 5 * TOLERANCE


# --- what the loss is divided by -----------------------------------------------------------------


class MeanOfLocalMeans(RecordingTrainer):
    """Each rank divides by its own labels; the ranks' means are averaged."""

    def forward_backward(self, batch: Batch) -> None:
        share = int((batch.labels != IGNORE_LABEL).sum()) * self.mesh.degrees.batch
        self.loss.begin = lambda *_: GlobalBatchLoss.begin(  # type: ignore[method-assign]
            self.loss, share, share
        )
        super().forward_backward(batch)


def test_a_mean_of_the_ranks_means_is_noticed_where_labels_are_ragged() -> None:
    wrong = red(run(Mesh(dp_shard=2), SHORT, trainer=MeanOfLocalMeans), SHORT)
    assert kinds(wrong) == {"loss", "grad_norm", "gradient", "parameter"}


def test_a_mean_over_micro_batches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_means(self: GlobalBatchLoss, sums: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        self.totals += sums.detach()
        return sums[0] / int((labels != IGNORE_LABEL).sum()) / 8

    monkeypatch.setattr(GlobalBatchLoss, "__call__", mean_of_means)
    wrong = red(run(Mesh(pp=2), SHORT), SHORT)
    # The first loss is right: only what is trained goes wrong.
    assert kinds(wrong) >= {"grad_norm", "gradient", "parameter"}


# --- data parallelism ----------------------------------------------------------------------------


class AveragingLayer(RecordingTrainer):
    """One FSDP group divides by the ranks, which is what torch does when it is not told."""

    def forward_backward(self, batch: Batch) -> None:
        (part,) = self.model.parts
        layer = part.layers["1"]
        assert isinstance(layer, FSDPModule)
        layer.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        super().forward_backward(batch)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_one_group_that_averages_is_noticed_and_named(zero_stage: int) -> None:
    options = {**SHORT, "parallelism.zero_stage": zero_stage}
    wrong = red(run(Mesh(dp_shard=2), options, trainer=AveragingLayer), options)
    halved = {name: error for name, error in wrong.items() if name.startswith("gradient of")}
    assert len(halved) == 9 and all(".1." in name for name in halved)
    assert list(halved.values()) == pytest.approx([0.5] * 9, rel=1e-3)


class LastMicroBatchOnly(RecordingTrainer):
    """Forgets what the earlier micro-batches accumulated."""

    def forward_backward(self, batch: Batch) -> None:
        last = self.config.training.local_batch_size
        earlier = torch.full_like(batch.labels[:-last], IGNORE_LABEL)
        kept = torch.cat([earlier, batch.labels[-last:]])
        super().forward_backward(Batch(batch.tokens, kept))


def test_a_lost_micro_batch_is_noticed() -> None:
    wrong = red(run(Mesh(dp_shard=2), {**SHORT, **ACCUMULATING}, trainer=LastMicroBatchOnly), SHORT)
    assert kinds(wrong) == {"loss", "grad_norm", "gradient", "parameter"}


# --- the gradient norm and the clip --------------------------------------------------------------


class NormOfTheStage(RecordingTrainer):
    """Clips each pipeline stage by its own norm."""

    def gradient_norm(self) -> float:
        super().gradient_norm()
        return gradient_norm(
            self.model.named_parameters.values(),
            ranks_per_stage=self.mesh.ranks_per_stage,
            group=self.mesh.fsdp.get_group(),
        )


def test_a_norm_of_one_stage_is_noticed() -> None:
    options = {**SHORT, **CLIPPED}
    wrong = red(run(Mesh(pp=2), options, trainer=NormOfTheStage), options)
    assert kinds(wrong) >= {"grad_norm", "parameter"}
    assert "gradient" not in kinds(wrong)


class TiedWeightTwice(RecordingTrainer):
    """Counts the tied weight for the embedding, and once more for the head."""

    def gradient_norm(self) -> float:
        super().gradient_norm()
        counted: list[Tensor] = list(self.model.named_parameters.values())
        embedding = self.model.named_parameters.get("embed_tokens.weight")
        if embedding is not None:
            head = nn.Parameter(embedding.detach().clone())
            head.grad = embedding.grad
            counted.append(head)
        return gradient_norm(counted, ranks_per_stage=self.mesh.ranks_per_stage)


def test_a_tied_weight_that_the_norm_counts_twice_is_noticed() -> None:
    options = {**SHORT, **CLIPPED}
    wrong = red(run(Mesh(pp=2), options, TIED_MODEL, trainer=TiedWeightTwice), options, TIED)
    assert kinds(wrong) - {"parameter"} == {"grad_norm"}


def test_a_tied_head_that_keeps_its_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: TiedHead) -> None:
        if self.head is not None:
            self.head.grad = None

    monkeypatch.setattr(TiedHead, "add_gradient_to_embedding", forget)
    wrong = red(run(Mesh(pp=2), SHORT, TIED_MODEL), SHORT, TIED)
    gradients = {name for name in wrong if name.startswith("gradient of")}
    assert gradients == {"gradient of embed_tokens.weight"}


def test_a_tied_head_that_is_not_told_the_update_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TiedHead, "copy_weight_to_head", lambda self: None)
    wrong = red(run(Mesh(pp=2), SHORT, TIED_MODEL), SHORT, TIED)
    assert "loss" in kinds(wrong) and "gradient" not in kinds(wrong)


# --- tensor parallelism --------------------------------------------------------------------------


def test_norm_gradients_of_a_part_of_the_sequence_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnTokensOnly(tensor.Replicated):
        def __init__(self, sees_part: bool) -> None:
            self.sees_part = False

    monkeypatch.setattr(tensor, "Replicated", OwnTokensOnly)
    wrong = red(run(Mesh(tp=2), SHORT), SHORT)
    gradients = {name for name in wrong if name.startswith("gradient of")}
    norms = {name for name in reference(SHORT).gradients if name.endswith("norm.weight")}
    assert gradients == {f"gradient of {name}" for name in norms}


def test_input_gradients_that_stay_with_their_rank_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor, "copy_to_ranks", lambda x, *, group: x)
    options = {**SHORT, "parallelism.enable_sequence_parallel": False}
    assert kinds(red(run(Mesh(tp=2), options), options)) >= {"grad_norm", "gradient"}


def test_a_whole_gradient_that_is_summed_like_a_share_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather = tensor.all_gather

    def as_share(x: Tensor, *, dim: int, group: Any, grad_is_partial: bool) -> Tensor:
        return gather(x, dim=dim, group=group, grad_is_partial=True)

    monkeypatch.setattr(tensor, "all_gather", as_share)
    options = {**SHORT, "parallelism.disable_loss_parallel": True}
    assert kinds(red(run(Mesh(tp=2), options), options)) >= {"grad_norm", "gradient"}


# --- the pipeline --------------------------------------------------------------------------------


def test_a_schedule_that_divides_by_the_micro_batches_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule_class = pipeline.get_schedule_class

    def dividing(name: str) -> Any:
        def build(*args: Any, scale_grads: bool, **kwargs: Any) -> Any:
            return schedule_class(name)(*args, scale_grads=True, **kwargs)

        return build

    monkeypatch.setattr(pipeline, "get_schedule_class", dividing)
    wrong = red(run(Mesh(pp=2), SHORT), SHORT)
    gradients = [error for name, error in wrong.items() if name.startswith("gradient of")]
    assert gradients == pytest.approx([1 - 1 / 8] * len(reference(SHORT).gradients), rel=1e-3)


class ShardedUnderZeroBubble(RecordingTrainer):
    """Past the check that refuses it: a split backward looks parameters up before their gather."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.parallelism.zero_stage = 3
        super().__init__(config, *args, **kwargs)

    def gradient_norm(self) -> float:
        for parameter in self.model.named_parameters.values():
            if parameter.grad is None:  # so that there is something to compare
                parameter.grad = torch.zeros_like(parameter)
        return super().gradient_norm()


def test_parameters_resharded_under_a_split_backward_are_noticed() -> None:
    options = {
        **SHORT,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
        "parallelism.zero_stage": 2,
    }
    mesh = Mesh(pp=2, dp_shard=2)
    assert_equal(run(mesh, options), reference(options))
    assert "gradient" in kinds(red(run(mesh, options, trainer=ShardedUnderZeroBubble), options))


# --- recomputation -------------------------------------------------------------------------------


def test_a_checkpointed_layer_that_cuts_the_graph_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(forward: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        # Half of the gradient passes: a graph cut off whole would leave no gradient to compare.
        return forward((x + x.detach()) / 2, *args)

    monkeypatch.setattr(activation, "checkpoint", cut)
    options = {**SHORT, "activation_checkpoint.mode": "full"}
    wrong = red(run(Mesh(), options), options)
    assert kinds(wrong) >= {"gradient", "parameter"}


# --- the data ------------------------------------------------------------------------------------


class SwappedRows(RecordingTrainer):
    """Reads the same rows of each global batch, in another order."""

    def forward_backward(self, batch: Batch) -> None:
        order = [5, *range(1, 5), 0, 6, 7]
        super().forward_backward(Batch(batch.tokens[order], batch.labels[order]))


class RowOfAnotherBatch(RecordingTrainer):
    """From its second batch on, the first row is once more that of the batch before."""

    last: tuple[Tensor, Tensor] | None = None

    def forward_backward(self, batch: Batch) -> None:
        before, self.last = self.last, (batch.tokens[:1], batch.labels[:1])
        if before is not None:
            tokens, labels = (
                torch.cat([old, rows[1:]]) for old, rows in zip(before, batch[:2], strict=True)
            )
            batch = batch._replace(tokens=tokens, labels=labels)
        super().forward_backward(batch)


def read_each_others_rows(trainer: RecordingTrainer) -> None:
    """Train, each rank of two on the rows that are the other's."""
    trainer.loader = Loader(
        make_source(),
        global_batch_size=trainer.config.training.global_batch_size,
        batch_rank=1 - trainer.mesh.batch_rank,
        batch_degree=2,
        seed=trainer.config.debug.seed,
    )
    trainer.train()


def test_the_order_inside_a_global_batch_is_free() -> None:
    assert_equal(run(Mesh(), trainer=SwappedRows), reference({}))
    assert_equal(run(Mesh(dp_shard=2), act=read_each_others_rows), reference({}))


def test_a_single_row_of_another_batch_is_noticed() -> None:
    wrong = red(run(Mesh(), trainer=RowOfAnotherBatch))
    # The first batch, and so the first gradients, are those of the reference.
    assert kinds(wrong) == {"loss", "grad_norm", "parameter"}


class GreedyValidation(RecordingTrainer):
    """Takes the training loader a batch further each time it validates."""

    def validate(self) -> float:
        next(self.loader)
        return super().validate()


def test_a_validation_that_moves_the_training_is_noticed() -> None:
    options = {
        "validation.enable": True,
        "validation.dataset": "synthetic",
        "validation.freq": 2,
        "validation.local_batch_size": 2,
    }
    wrong = red(run(Mesh(), options, trainer=GreedyValidation), options)
    assert {"loss", "parameter"} <= kinds(wrong)
