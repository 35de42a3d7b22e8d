"""Context parallelism: the ranks of `cp` share the tokens of every row.

The plan has two places. Where a part of the model begins, whole rows are cut (chunks.py): tokens,
for the first stage, positions and labels. From there on all that works on each token alone needs no
change: the rotary embedding follows the positions, the loss is a sum over tokens, and FSDP adds up
the gradients of cp with the others. And `core_attention`, the one step in which tokens meet, is
given one of three exchanges (exchange.py).

Proven in tests/parallel/test_context.py and tests/parity/test_context.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.models.attention import CoreAttention, RowMask
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Router
from torchtitan_lite.ops.collectives import all_reduce
from torchtitan_lite.parallel.chunks import Order
from torchtitan_lite.parallel.exchange import METHODS


def apply_context_parallel(model: Decoder, mesh: DeviceMesh, *, order: Order, method: str) -> None:
    """Cut the rows of `model` over the 1-D `mesh`, and let its attention exchange their tokens."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    model.register_forward_pre_hook(partial(_cut_rows, order, rank), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, CoreAttention):
            exchange = partial(METHODS[method], module, module.forward, order, group)
            module.forward = exchange  # type: ignore[method-assign]
        elif isinstance(module, Router):
            module.extra["sum_over_sequence"] = _summed_over(group, module.extra)


def _cut_rows(
    order: Order, rank: int, model: Decoder, args: tuple[Tensor], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor], dict[str, Any]]:
    """Whole rows -> this rank's part; what a former stage sent is one already."""
    (x,), positions, labels = args, kwargs.get("positions"), kwargs.get("labels")
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)[None]
    kwargs["row_mask"] = RowMask.of(positions, documents=model.document_mask)
    kwargs["positions"] = order.take(positions, rank)
    kwargs["labels"] = None if labels is None else order.take(labels, rank)
    return (x if model.embed_tokens is None else order.take(x, rank),), kwargs


def _summed_over(group: ProcessGroup, extra: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The sum over the ranks that share a sequence, whichever plan cut it before."""
    inner = extra.get("sum_over_sequence", lambda load: load)
    return lambda load: all_reduce(inner(load), group=group)
