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

from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from torchtitan_lite.config import ConfigError
from torchtitan_lite.config.derived import (
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
)


def balanced_stages(costs: list[float], num_stages: int, *, last: float) -> list[list[int]]:
    """Cut consecutive layers into stages so that the costliest stage costs least.

    `costs` are per layer; `last` is what the head adds to the final stage. Every stage gets at
    least one layer. Among equals the most even cut wins, and then the one with fewer layers in
    front, where 1F1B keeps the most micro-batches in flight.
    """
    num_layers = len(costs)
    prefix = [0.0, *accumulate(costs)]

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
    return [list(range(a, b)) for a, b in pairwise((0, *ends))]


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
        stages: Mapping[int, nn.Module],
        *,
        num_stages: int,
        schedule: str,
        group: ProcessGroup,
        device: torch.device,
        activation: tuple[int, torch.dtype, int],
    ) -> None:
        if schedule in SPLIT_BACKWARD_SCHEDULES and torch.__version__ < "2.13":
            raise ConfigError(
                f"parallelism.pipeline_parallel_schedule = {schedule}: before torch 2.13 its split "
                f"backward cannot pass an operator of our own, and this is torch "
                f"{torch.__version__}; use 1F1B or Interleaved1F1B"
            )
        self.stages = stages
        self.num_stages = num_stages
        self.schedule = schedule
        self.group = group
        self.device = device
        self.activation = activation
        self.has_last = num_stages - 1 in stages
        self._runner: Any = None
        self._shape: tuple[int, ...] = ()

    def train(
        self,
        tokens: Tensor,
        labels: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        num_micro_batches: int,
    ) -> None:
        """Forward and backward of all rows (rows, seq) of this rank's global batch.

        `loss_fn(sums, labels)` is called for each micro-batch on the rank of the last stage;
        `keys` (rows,) and `positions` (rows, seq; None: 0, 1, 2, ...) go to every stage.
        """
        rows, seq_len = tokens.shape
        assert rows % num_micro_batches == 0, "shapes are static: rows must divide"
        shape = (rows // num_micro_batches, seq_len, num_micro_batches)
        if shape != self._shape:
            self._runner, self._shape = self._build_runner(*shape, loss_fn), shape
        self._runner.step(
            *((tokens,) if 0 in self.stages else ()),
            target=labels if self.has_last else None,
            losses=[] if self.has_last else None,
            return_outputs=False,
            positions=_positions(tokens) if positions is None else positions,
            labels=labels,
            **({} if keys is None else {"keys": keys}),
        )

    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Forward of one micro-batch (rows, seq) through all stages, whatever the schedule.

        torch's schedules with a split backward cannot run without one. Every rank visits its
        stages in the order of the forward pass, so a receive always waits for a send that comes
        earlier in the one order (micro-batch, stage): no two ranks wait for each other.
        """
        x, positions = tokens, _positions(tokens) if positions is None else positions
        for index, module in self.stages.items():
            if index > 0 and index - 1 not in self.stages:
                x = self._hidden(*tokens.shape, device=self.device)
                dist.recv(x, src=self._rank_of(index - 1), group=self.group)
            x = module(x, positions=positions, labels=labels)
            if index == self.num_stages - 1:
                loss_fn(x, labels)
            elif index + 1 not in self.stages:
                dist.send(x.contiguous(), dst=self._rank_of(index + 1), group=self.group)

    def _rank_of(self, stage: int) -> int:
        """The global rank that holds `stage`, beside this rank in its pipeline."""
        degree = dist.get_world_size(self.group)
        held = (
            stages_of_rank(self.schedule, pp_rank=r, pp_degree=degree, num_stages=self.num_stages)
            for r in range(degree)
        )
        return dist.get_global_rank(self.group, [stage in stages for stages in held].index(True))

    def _hidden(self, rows: int, seq_len: int, *, device: torch.device | str) -> Tensor:
        """Like what travels between stages: (rows, seq, hidden), or (rows, seq / tp, hidden)."""
        hidden_size, dtype, cut = self.activation
        return torch.empty(rows, seq_len // cut, hidden_size, dtype=dtype, device=device)

    def _build_runner(
        self, rows: int, seq_len: int, num_micro_batches: int, loss_fn: Callable[..., Tensor]
    ) -> Any:
        """A schedule over fresh PipelineStages of static shape around the same modules."""
        hidden = self._hidden(rows, seq_len, device="meta").requires_grad_()
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


def _positions(tokens: Tensor) -> Tensor:  # (rows, seq)
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
