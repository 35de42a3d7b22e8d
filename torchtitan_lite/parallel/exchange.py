"""How the tokens of a row meet when ranks share it: three exchanges around one attention.

                  forward                              backward
    ring          keys and values travel round the     they travel again, and behind them their
                  ranks, one rank a step               gradients, to which each rank adds
    allgather     all keys and values are gathered     they are gathered again; their gradients
                                                       are reduced and scattered
    ulysses       all-to-all: some tokens of all       the same way back
                  heads -> all tokens of some heads;
                  attention; and back

Ring and allgather compute the same: a rank's chunks of queries against the chunks of keys that they
see (chunks.py), each with the log-sum-exp of its scores, by which the results are merged
(ops/attention.py). Only KV heads travel, and only what came from the rank's own tokens is kept for
the backward. Under ulysses a rank runs the core attention that was there, with every mask and
kernel that it has, on whole rows.

Numbers that a rank sends, of R ranks with T tokens each; a token has Q numbers of queries, K of
keys and values, O of outputs:

    ring       forward (R-1) T K             backward (R-1) T K twice, the gradients in fp32
    allgather  forward (R-1) T K             backward the same
    ulysses    forward (R-1)/R T (Q+K+O)     backward the same

Proven in tests/parallel/test_context.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_lite.models.attention import CoreAttention, RowMask
from torchtitan_lite.ops.attention import attend, attend_backward, merge
from torchtitan_lite.ops.collectives import all_to_all, gather, scatter_sum
from torchtitan_lite.parallel.chunks import Order, Sight, Stretch

SEQ = 2  # of (batch, heads, seq, head_dim)


@dataclass(frozen=True)
class Share:
    """A rank's two chunks of queries, against whatever chunks of keys it is handed."""

    order: Order
    group: ProcessGroup
    sight: Sight
    scale: float

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def attend(
        self, found: list[Any], q: Tensor, k: Tensor, v: Tensor, held: Sequence[int]
    ) -> None:
        """Merge into `found`, (out, lse) of each chunk of q or None, what it sees of `held`."""
        for number, (query, own) in enumerate(self._queries(q)):
            for stretch in self.sight.stretches(query, held):
                keys, values = (self._of(stretch, t) for t in (k, v))
                block = attend(own, keys, values, **self._options(stretch))
                so_far = found[number]
                found[number] = block if so_far is None else merge(so_far[0], so_far[1], *block)

    def attend_backward(
        self,
        grads: Sequence[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        held: Sequence[int],
        *,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Add to `grads`, those of q, k and v in fp32, what comes through the chunks `held`."""
        of_chunks = [t.chunk(2, dim=SEQ) for t in (grad, out, lse, grads[0])]
        for number, (query, own) in enumerate(self._queries(q)):
            own_grad, own_out, own_lse, grad_q = (chunks[number] for chunks in of_chunks)
            for stretch in self.sight.stretches(query, held):
                keys, values = (self._of(stretch, t) for t in (k, v))
                block = attend_backward(
                    own_grad, own, keys, values, own_out, own_lse, **self._options(stretch)
                )
                grad_q += block[0]
                for whole, more in zip(grads[1:], block[1:], strict=True):
                    self._of(stretch, whole).add_(more)

    def _queries(self, q: Tensor) -> zip[tuple[int, Tensor]]:
        return zip(self.order.chunks(self.rank), q.chunk(2, dim=SEQ), strict=True)

    def _of(self, stretch: Stretch, x: Tensor) -> Tensor:
        length = self.sight.length
        return x[:, :, stretch.first * length : stretch.stop * length]

    def _options(self, stretch: Stretch) -> dict[str, Any]:
        return {"mask": stretch.mask, "causal": stretch.causal, "scale": self.scale}


Round = tuple[Tensor, Tensor, Sequence[int]]  # keys, values, and the chunks that they are of


def _attended(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share, rounds: Iterable[Round]
) -> Tensor:
    """The chunks' results as one, in the dtype of q; kept for backward with what is the rank's."""
    found: list[Any] = [None, None]
    for keys, values, held in rounds:
        share.attend(found, q, keys, values, held)
    outs, sums = zip(*found, strict=True)
    out, lse = torch.cat(outs, dim=SEQ).type_as(q), torch.cat(sums, dim=SEQ)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.share = share
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        return _attended(ctx, q, k, v, share, _rounds(k, v, share))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        share: Share = ctx.share
        grad_q, home = _zeros(q), (_zeros(k), _zeros(v))
        behind: Callable[[], tuple[Tensor, ...]] = tuple  # gradients, one rank behind; none yet
        for step, (keys, values, held) in enumerate(_rounds(k, v, share)):
            of_kv = home if step == 0 else (_zeros(k), _zeros(v))
            share.attend_backward(
                (grad_q, *of_kv), q, keys, values, held, grad=grad, out=out, lse=lse
            )
            if step > 0:
                _add(of_kv, behind())
                behind = _pass_on(of_kv, share.group)  # the last time to where they belong
        _add(home, behind())
        return grad_q.type_as(q), home[0].type_as(k), home[1].type_as(v), None


def _add(sums: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for mine, theirs in zip(sums, more, strict=False):  # `more` may be empty
        mine += theirs


def _rounds(k: Tensor, v: Tensor, share: Share) -> Iterator[Round]:
    """The keys and values of each rank, its own first.

    The next ones travel while the caller computes with those it has.
    """
    for step in range(share.order.size):
        is_last = step == share.order.size - 1
        arriving = None if is_last else _pass_on((k, v), share.group)
        yield k, v, share.order.chunks((share.rank - step) % share.order.size)
        if arriving is not None:
            k, v = arriving()


def _pass_on(tensors: Sequence[Tensor], group: ProcessGroup) -> Callable[[], tuple[Tensor, ...]]:
    """Send `tensors` to the next rank; the function returned waits for those of the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, after, group) for tensor in sent]
        + [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    )

    def wait(sent: list[Tensor] = sent) -> tuple[Tensor, ...]:  # `sent` lives until then
        for work in works:
            work.wait()
        return tuple(received)

    return wait


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        return _attended(ctx, q, k, v, share, [_gathered(k, v, share)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        share: Share = ctx.share
        keys, values, held = _gathered(k, v, share)
        grad_q, grad_kv = _zeros(q), _zeros(torch.cat((keys, values), dim=-1))
        widths = [k.shape[-1], v.shape[-1]]
        grads = (grad_q, *grad_kv.split(widths, dim=-1))
        share.attend_backward(grads, q, keys, values, held, grad=grad, out=out, lse=lse)
        parts = [share.order.take(grad_kv, rank, SEQ) for rank in range(share.order.size)]
        own = scatter_sum(torch.cat(parts), 0, share.group)
        grad_k, grad_v = own.split(widths, dim=-1)
        return grad_q.type_as(q), grad_k.type_as(k), grad_v.type_as(v), None


def _gathered(k: Tensor, v: Tensor, share: Share) -> Round:
    """Keys and values of whole rows, from one collective."""
    parts = gather(torch.cat((k, v), dim=-1), 0, share.group).chunk(share.order.size)
    row = share.order.join(parts, SEQ)
    return row[..., : k.shape[-1]], row[..., k.shape[-1] :], range(share.order.num_chunks)


def _zeros(like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _by_chunks(
    function: type[torch.autograd.Function],
    core: CoreAttention,
    compute: Callable[..., Tensor],
    order: Order,
    group: ProcessGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_mask: RowMask,
    keys: Tensor | None = None,
) -> Tensor:
    """Stands for `compute`, the forward of `core`: q, k and v are of this rank's tokens."""
    scale = 1 / math.sqrt(q.shape[-1]) if core.scale is None else core.scale
    sight = Sight(row_mask, core.window, order.num_chunks)
    return function.apply(q, k, v, Share(order, group, sight, scale))


def _by_heads(
    core: CoreAttention,
    compute: Callable[..., Tensor],
    order: Order,
    group: ProcessGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_mask: RowMask,
    keys: Tensor | None = None,
) -> Tensor:
    """As _by_chunks; the ranks must divide the query heads and the KV heads that a rank has."""
    one_each = [1] * order.size
    # (batch, heads, tokens, dim) -> (ranks, batch, heads / ranks, tokens, dim)
    by_rank = [t.unflatten(1, (order.size, -1)).transpose(0, 1) for t in (q, k, v)]
    sent = torch.cat([t.flatten(1) for t in by_rank], dim=1)
    received = all_to_all(sent, send=one_each, receive=one_each, group=group)
    parts = received.split([t[0].numel() for t in by_rank], dim=1)
    rows = [
        order.join(part.view(t.shape).unbind(), SEQ) for part, t in zip(parts, by_rank, strict=True)
    ]
    out = compute(*rows, row_mask, keys)  # (batch, heads / ranks, seq, dim)
    sent = torch.stack([order.take(out, rank, SEQ) for rank in range(order.size)])
    received = all_to_all(sent, send=one_each, receive=one_each, group=group)
    return received.transpose(0, 1).flatten(1, 2)  # (batch, heads, tokens, dim)


METHODS: dict[str, Callable[..., Tensor]] = {
    "ring": partial(_by_chunks, _Ring),
    "allgather": partial(_by_chunks, _AllGather),
    "ulysses": _by_heads,
}
