"""Context parallelism beside one process: the same attention, the same gradients, in fp64.

Rows of 32 tokens are cut over 2 and 4 ranks in both orders; documents are of one token, of exactly
a chunk, and lie across chunks and ranks; windows close inside a chunk, at its end and far behind.
Query heads share KV heads four to one, and values are wider than keys.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.comparison import CONFIG, random
from tests.world import run_ranks
from torchtitan_lite.build import initialise
from torchtitan_lite.mesh import Degrees, build_mesh
from torchtitan_lite.models.attention import CoreAttention, RowMask, document_numbers
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.ops.attention import attend, attend_backward
from torchtitan_lite.parallel import exchange
from torchtitan_lite.parallel.chunks import Order
from torchtitan_lite.parallel.context import apply_context_parallel
from torchtitan_lite.parallel.exchange import METHODS

BATCH, SEQ = 2, 32
HEADS, KV_HEADS, DIM, VALUE_DIM = 16, 4, 6, 10
TOLERANCE = 1e-12
IN_FP32 = 1e-6  # of a decoder, whose rotary embedding and loss are in fp32 whatever its weights
LENGTHS = {  # of the documents of each row
    "one": None,
    "ragged": ((1, 7, 5, 1, 1, 9, 8), (13, 2, 17)),
    "chunks": ((4,) * 8, (8, 8, 16)),  # of cp 4; of cp 2 half a chunk
}
WINDOWS = (None, 3, 9)


def positions_of(lengths: tuple[tuple[int, ...], ...] | None) -> Tensor:
    """(batch, seq), restarting at each document."""
    rows = lengths or ((SEQ,),) * BATCH
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def errors_of_exchange(method: str, balanced: bool, documents: str, window: int | None) -> float:
    """The largest relative error of a rank's out and gradients."""
    mesh = build_mesh(Degrees(cp=dist.get_world_size()), "cpu", dist.get_rank()).cp
    order, rank, group = Order(mesh.size(), balanced), mesh.get_local_rank(), mesh.get_group()
    config = dataclasses.replace(CONFIG, sliding_window=window)
    core = CoreAttention(config, 0)
    whole = [
        random(BATCH, heads, SEQ, dim, seed=seed)
        for seed, (heads, dim) in enumerate([(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)])
    ]
    grad = random(BATCH, HEADS, SEQ, VALUE_DIM, seed=9)
    parts = [order.take(t, rank, 2).requires_grad_() for t in whole]
    for tensor in whole:
        tensor.requires_grad_()
    positions = positions_of(LENGTHS[documents])
    numbers = None if LENGTHS[documents] is None else document_numbers(positions)
    row_mask = RowMask(numbers, num_keys=SEQ, device=positions.device)
    expected = core(*whole, row_mask)
    ours = METHODS[method](core, core.forward, order, group, *parts, row_mask, None)
    expected.backward(grad)
    ours.backward(order.take(grad, rank, 2))
    pairs = [(ours, expected), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
    return max(
        float((a - order.take(b, rank, 2)).norm() / b.norm()) if a is not None else math.inf
        for a, b in pairs
    )


def exchanges(method: str) -> dict[str, float]:
    cases = itertools.product((True, False), LENGTHS, WINDOWS)
    return {str(case): errors_of_exchange(method, *case) for case in cases}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_exchange_gives_the_attention_of_whole_rows(method: str, ranks: int) -> None:
    for found in run_ranks(exchanges, ranks, method):
        wrong = {case: error for case, error in found.items() if not error < TOLERANCE}
        assert not wrong


def error_without(lost: str, method: str) -> float:
    """The error of an exchange that forgets a part of what makes it right."""
    if lost == "the log-sum-exp":
        exchange.merge = lambda out, lse, more, more_lse: (out + more, lse)  # type: ignore[assignment]
    elif lost == "the merged result in backward":
        exchange.attend_backward = _with_own_sums  # type: ignore[assignment]
    else:
        Order.join = lambda self, parts, dim: torch.cat(tuple(parts), dim)  # type: ignore[method-assign, assignment]
    return errors_of_exchange(method, True, "one", None)


def _with_own_sums(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **rule: Any) -> Any:
    return attend_backward(grad, q, k, v, *attend(q, k, v, **rule), **rule)


@pytest.mark.parametrize(
    ("lost", "method"),
    [
        ("the log-sum-exp", "ring"),
        ("the merged result in backward", "allgather"),
        ("the order of the chunks", "allgather"),
        ("the order of the chunks", "ulysses"),
    ],
)
def test_an_exchange_that_forgets_would_be_seen(lost: str, method: str) -> None:
    assert min(run_ranks(error_without, 2, lost, method)) > 1e-3


# --- whole decoders -------------------------------------------------------------------------------


def make_decoder(window: int | None = None) -> Decoder:
    """In fp64, with the weights that a seed names, and documents kept apart."""
    config = dataclasses.replace(CONFIG, sliding_window=window, max_position_embeddings=SEQ)
    decoder = Decoder(config).double()
    initialise(decoder, seed=3, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter *= 5  # so that attention is far from even
    decoder.document_mask = True
    return decoder


def make_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions of rows of ragged documents."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=generator)
    positions = positions_of(LENGTHS["ragged"])
    labels = tokens.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100  # the end of a document
    return tokens, labels, positions


@pytest.mark.parametrize("window", [None, 4])
def test_packed_rows_have_the_losses_and_gradients_of_their_documents_apart(
    window: int | None,
) -> None:
    tokens, labels, positions = make_rows()
    packed, apart = make_decoder(window), make_decoder(window)
    loss = packed(tokens, positions=positions, labels=labels)[0]
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS["ragged"] or ()):
        for piece in torch.arange(SEQ).split(lengths):
            part = apart(tokens[row : row + 1, piece], labels=labels[row : row + 1, piece])[0]
            part.backward()
            total += part.detach()
    assert loss.item() == pytest.approx(total.item(), rel=IN_FP32)
    assert gradient_error(packed, apart) < IN_FP32


def gradient_error(ours: Decoder, expected: Decoder) -> float:
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)  # type: ignore[operator, union-attr]


def errors_of_plan(method: str, balanced: bool, window: int | None) -> dict[str, float]:
    """Of the loss, and of the gradients, both summed over the ranks."""
    mesh = build_mesh(Degrees(cp=dist.get_world_size()), "cpu", dist.get_rank()).cp
    plain, ours = make_decoder(window), make_decoder(window)
    apply_context_parallel(ours, mesh, order=Order(mesh.size(), balanced), method=method)
    tokens, labels, positions = make_rows()
    losses = []
    for decoder in (plain, ours):
        loss = decoder(tokens, positions=positions, labels=labels)[0]
        loss.backward()
        losses.append(loss.detach())
    dist.all_reduce(losses[1])
    for parameter in ours.parameters():
        dist.all_reduce(parameter.grad)
    return {
        "loss": float((losses[1] - losses[0]).abs() / losses[0]),
        "gradient": gradient_error(ours, plain),
    }


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_whose_rows_are_shared_is_a_plain_one(method: str, balanced: bool) -> None:
    for errors in run_ranks(errors_of_plan, 2, method, balanced, 5):
        assert max(errors.values()) < IN_FP32, errors
