"""Context parallelism trains what one process trains: a table of meshes and methods, a case a row.

As in test_parity.py: four optimizer steps of the real Trainer; losses, gradient norms, the first
step's gradients and the last parameters equal one process's to a relative 1e-5. Rows of 24 tokens
hold documents of ragged lengths: of one token, of exactly a chunk, and across chunks and ranks.
Four query heads share a KV head, and half of the layers see a window of 5 tokens.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import TINY, Mesh, Run, assert_equal, errors, make_source, run
from tests.parity.test_experts import BALANCED, MIXTURE
from torchtitan_lite.data.sources import IGNORE_LABEL, Row
from torchtitan_lite.parallel.chunks import Order

METHOD, ORDER = "parallelism.context_parallel_method", "parallelism.context_parallel_load_balancer"
EP, ZERO = "parallelism.expert_parallel_degree", "parallelism.zero_stage"
DOCUMENTS = {"training.document_mask": True}
GROUPED = dataclasses.replace(TINY, num_key_value_heads=4, sliding_window=5, max_window_layers=2)
LENGTHS = ((1, 6, 3, 10, 4), (5, 1, 1, 17), (24,), (3, 3, 12, 6), (23, 1))


class DocumentRows:
    """The harness's rows, cut in documents of LENGTHS; the last token of each has no label."""

    def __init__(self) -> None:
        self.rows = make_source()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Row:
        tokens, labels, *_ = self.rows[row]
        lengths = LENGTHS[row % len(LENGTHS)]
        positions = torch.cat([torch.arange(n) for n in lengths])
        ends = torch.tensor(lengths).cumsum(0) - 1
        return Row(tokens, labels.index_fill(0, ends, IGNORE_LABEL), positions)


ROWS: list[tuple[str, Mesh, dict[str, Any]]] = [
    ("cp2", Mesh(cp=2), {}),
    ("cp4", Mesh(cp=4), {}),
    ("cp2-plain-order", Mesh(cp=2), {ORDER: "none"}),
    ("cp4-plain-order", Mesh(cp=4), {ORDER: "none"}),
    ("cp2-tp2", Mesh(cp=2, tp=2), {}),
    ("cp2-tp2-no-sp", Mesh(cp=2, tp=2), {"parallelism.enable_sequence_parallel": False}),
    ("cp2-pp2", Mesh(cp=2, pp=2), {}),
    ("cp2-dp2", Mesh(cp=2, dp_shard=2), {}),
    ("cp2-dp2-zero0", Mesh(cp=2, dp_shard=2), {ZERO: 0}),
    ("cp2-hsdp", Mesh(cp=2, dp_replicate=2), {ZERO: 1}),
    ("cp2-dp2-tp2", Mesh(cp=2, dp_shard=2, tp=2), {}),
    ("cp2-pp2-tp2", Mesh(cp=2, pp=2, tp=2), {"activation_checkpoint.mode": "full"}),
]
METHODS = ("allgather", "ring", "ulysses")
QUICK = {
    ("cp2", "allgather"), ("cp2", "ring"), ("cp2", "ulysses"), ("cp4", "allgather"),
    ("cp4", "ring"),
    ("cp4-plain-order", "ring"), ("cp2-tp2", "ulysses"), ("cp2-pp2", "allgather"),
    ("cp2-dp2", "ring"),
}  # fmt: skip


@cache
def alone(documents: bool) -> Run:
    if documents:
        return run(Mesh(), DOCUMENTS, GROUPED, source=DocumentRows())
    return run(Mesh(), {}, GROUPED)


def cases() -> list[Any]:
    return [
        pytest.param(
            mesh, {METHOD: method, **options}, id=f"{name}-{method}",
            marks=() if (name, method) in QUICK else pytest.mark.slow,
        )
        for name, mesh, options in ROWS
        for method in METHODS
    ]  # fmt: skip


@pytest.mark.parametrize(("mesh", "options"), cases())
def test_rows_of_documents_shared_by_ranks_equal_one_process(
    mesh: Mesh, options: dict[str, Any]
) -> None:
    ours = run(mesh, {**DOCUMENTS, **options}, GROUPED, source=DocumentRows())
    assert_equal(ours, alone(documents=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(cp=2), id="cp2"),
        pytest.param(Mesh(cp=2, dp_shard=2, tp=2), id="cp2-dp2-tp2", marks=pytest.mark.slow),
    ],
)
def test_rows_of_one_document_shared_by_ranks_equal_one_process(mesh: Mesh, method: str) -> None:
    assert_equal(run(mesh, {METHOD: method}, GROUPED), alone(documents=False))


MIXTURES = {
    "ep2-of-cp2": (Mesh(cp=2), {EP: 2}, "allgather"),
    "ep4-of-cp2-tp2": (Mesh(cp=2, tp=2), {EP: 4}, "ring"),
    "ep2-of-dp2-cp2": (Mesh(cp=2, dp_shard=2), {EP: 2}, "ulysses"),
}


@pytest.mark.parametrize(
    ("mesh", "options", "method"),
    [
        pytest.param(
            mesh, options, method, id=f"{name}-{method}",
            marks=() if method == quick else pytest.mark.slow,
        )
        for name, (mesh, options, quick) in MIXTURES.items()
        for method in METHODS
    ],
)  # fmt: skip
def test_a_mixture_whose_sequences_are_shared_equals_one_process(
    mesh: Mesh, options: dict[str, Any], method: str
) -> None:
    ours = run(mesh, {**BALANCED, **options, METHOD: method}, MIXTURE)
    expected = mixture_alone()
    assert ours.series("expert_tokens") == expected.series("expert_tokens")
    assert ours.series("moe_aux_loss") == pytest.approx(expected.series("moe_aux_loss"), rel=1e-6)
    assert_equal(ours, expected)


@cache
def mixture_alone() -> Run:
    return run(Mesh(), BALANCED, MIXTURE)


def test_the_validation_loss_is_the_same_on_every_mesh() -> None:
    options = {
        "validation.enable": True,
        "validation.dataset": "synthetic",
        "validation.freq": 2,
        "validation.local_batch_size": 2,
    }
    expected = run(Mesh(), options, GROUPED)
    assert len(expected.series("validation_loss")) == 2
    assert_equal(run(Mesh(cp=2, pp=2), options, GROUPED), expected)


def test_two_positions_swapped_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Order.take

    def swapped(self: Order, row: Tensor, rank: int, dim: int = 1) -> Tensor:
        part = take(self, row, rank, dim)
        if row.dtype == torch.int64 and (row[:, 0] == 0).all():  # positions alone
            part[:, [1, 2]] = part[:, [2, 1]]
        return part

    monkeypatch.setattr(Order, "take", swapped)
    found = errors(run(Mesh(cp=2), {}, GROUPED), alone(documents=False))
    assert found["loss"] > 1e-4 and found["grad_norm"] > 1e-4
