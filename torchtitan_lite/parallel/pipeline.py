"""Pipeline parallelism: which stage holds what, and one schedule call a global batch.

The model is cut into consecutive stages. `pp` ranks hold them looped, or, for the V schedules, so
that a rank's two stages lie opposite each other and the first and the last share a rank:

    looped  rank 0: stages 0, 4     1: 1, 5     2: 2, 6     3: 3, 7
    V       rank 0: stages 0, 7     1: 1, 6     2: 2, 5     3: 3, 4

A rank's whole share of the global batch goes through one schedule call, cut into micro-batches:
accumulation is more micro-batches, not more calls, so the pipeline fills and drains once a step.
The schedule scales nothing: the loss is divided by the global token count before backward.

Proven in tests/parity/ for every schedule, with and without FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.derived import SINGLE_STAGE_SCHEDULES, V_SCHEDULES


def balanced_stages(costs: list[float], num_stages: int, *, last: float) -> list[list[int]]:
    """Cut consecutive layers into stages so that the costliest stage costs least.

    `costs` are per layer; `last` is what the head adds to the final stage. Every stage gets at
    least one layer. Among equals the most even cut wins, and then the one with fewer layers in
    front, where 1F1B keeps the most micro-batches in flight.
    """
    num_layers = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squares, ends) of the cut of layers[start:] from `stage` on."""
        if stage == num_stages - 1:
            cost = prefix[num_layers] - prefix[start] + last
            return cost, cost**2, (num_layers,)
        cuts = []
        for end in range(start + 1, num_layers - (num_stages - stage - 2)):
            cost = prefix[end] - prefix[start]
            largest, squares, ends = best(stage + 1, end)
            cuts.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        return min(cuts)

    ends = best(0, 0)[2]
    return [list(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]


def stages_of_rank(schedule: str, *, pp_rank: int, pp_degree: int, num_stages: int) -> list[int]:
    """The stages that a pipeline rank holds, in order of the forward pass."""
    if schedule in V_SCHEDULES:
        return [pp_rank, num_stages - 1 - pp_rank]
    return list(range(pp_rank, num_stages, pp_degree))


class Pipeline:
    """This rank's stages, and the schedule that drives them.

    `stages` maps the stage index to its module. `activation` describes what travels between
    stages: (hidden size, dtype, factor by which the sequence is cut while it travels).
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        *,
        num_stages: int,
        schedule: str,
        group: ProcessGroup,
        device: torch.device,
        activation: tuple[int, torch.dtype, int],
    ) -> None:
        self.stages = stages
        self.num_stages = num_stages
        self.schedule = schedule
        self.group = group
        self.device = device
        self.activation = activation
        self.has_first = 0 in stages
        self.has_last = num_stages - 1 in stages
        self._runners: dict[tuple[int, int, int, bool], Any] = {}

    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        num_micro_batches: int,
        train: bool,
    ) -> None:
        """All rows (rows, seq) of this rank's global batch, forward and (`train`) backward.

        `loss_fn(sums, labels)` is called for each micro-batch on the rank of the last stage.
        """
        rows, seq_len = tokens.shape
        assert rows % num_micro_batches == 0, "shapes are static: rows must divide"
        key = (rows // num_micro_batches, seq_len, num_micro_batches, train)
        if key not in self._runners:
            self._runners[key] = self._build_runner(*key[:3], loss_fn)
        runner = self._runners[key]
        positions = torch.arange(seq_len, device=tokens.device).expand(rows, -1)
        step = runner.step if train else runner.eval
        step(
            *((tokens,) if self.has_first else ()),
            target=labels if self.has_last else None,
            losses=[] if self.has_last else None,
            return_outputs=False,
            positions=positions,
            labels=labels,
        )

    def _build_runner(
        self, rows: int, seq_len: int, num_micro_batches: int, loss_fn: Callable[..., Tensor]
    ) -> Any:
        """A schedule over fresh PipelineStages of static shape around the same modules."""
        hidden_size, dtype, cut = self.activation
        hidden = torch.empty(
            rows, seq_len // cut, hidden_size, dtype=dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        sums = torch.empty(3, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                module,
                index,
                self.num_stages,
                self.device,
                input_args=(tokens if index == 0 else hidden,),
                output_args=(sums if index == self.num_stages - 1 else hidden,),
                group=self.group,
            )
            for index, module in self.stages.items()
        ]
        single = self.schedule in SINGLE_STAGE_SCHEDULES
        return get_schedule_class(self.schedule)(
            stages[0] if single else stages,
            num_micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )


class TiedHead:
    """A head tied to an embedding that another stage holds.

    The embedding is the weight: it alone is optimised, counted in the gradient norm and saved. The
    head is a copy that hands over its gradient before the norm and takes the value after the
    step, by one message each way between the two ranks (none, where one rank holds both).
    """

    def __init__(
        self,
        embedding: nn.Parameter | None,
        head: nn.Parameter | None,
        *,
        group: ProcessGroup,
        embedding_rank: int,
        head_rank: int,
    ) -> None:
        self.embedding = embedding
        self.head = head
        self.group = group
        self.embedding_rank = dist.get_global_rank(group, embedding_rank)
        self.head_rank = dist.get_global_rank(group, head_rank)

    def add_gradient_to_embedding(self) -> None:
        """embedding.grad += head.grad, shard by shard."""
        theirs = self._transfer(
            None if self.head is None else _local(self.head.grad),
            None if self.embedding is None else _local(self.embedding.grad),
            source=self.head_rank,
            destination=self.embedding_rank,
        )
        if self.embedding is not None:
            assert theirs is not None
            _local(self.embedding.grad).add_(theirs)
        if self.head is not None:
            self.head.grad = None

    @torch.no_grad()
    def copy_weight_to_head(self) -> None:
        """head = embedding, shard by shard."""
        weight = self._transfer(
            None if self.embedding is None else _local(self.embedding),
            None if self.head is None else _local(self.head),
            source=self.embedding_rank,
            destination=self.head_rank,
        )
        if self.head is not None:
            assert weight is not None
            _local(self.head).copy_(weight)

    def _transfer(
        self, value: Tensor | None, like: Tensor | None, *, source: int, destination: int
    ) -> Tensor | None:
        """The source's `value`, on the destination, where it has the shape of `like`."""
        if source == destination:
            return value
        if value is not None:
            dist.send(value.detach().contiguous(), dst=destination, group=self.group)
            return None
        if like is not None:
            received = torch.empty_like(like, memory_format=torch.contiguous_format)
            dist.recv(received, src=source, group=self.group)
            return received
        return None


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
