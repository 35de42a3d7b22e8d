"""AdamW with both moments in bfloat16: 4 bytes a parameter in the place of 8.

A number in bfloat16 has 8 bits, so two neighbours lie up to 2^-7 of their size apart. The second
moment moves by (1 - beta2) (g^2 - v) a step. Where that is less than half the distance to the next
neighbour, rounding to nearest gives back v, at this step and at each one after it: with beta2 =
0.999 it never shrinks again, with 0.95 it stops some percent away from the mean of squares. So what
is stored is rounded stochastically: up with the probability that makes the mean right,

    fp32   sign exponent | 7 bits  | 16 bits that bfloat16 lacks
           + a random number below 2^16, then cut: a carry into the 7 bits is a step up

(Croci et al.: Stochastic rounding: implementation, error analysis and applications, 2022). The
update itself is computed in fp32, from moments that are not rounded yet.

The random bits are a hash of (seed, step, name of the parameter, index of the element in the whole
parameter), the one of ops/dropout.py. So they do not depend on which rank holds an element: the
same gradients give the same bits of state on any mesh, and after a resume on another one.

Proven in tests/optim/test_low_precision.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from torchtitan_lite.ops.dropout import STEP, hash_of_name, sample_keys, scramble

# Elements that are updated at once: what is computed on the way takes some 40 bytes of each.
BLOCK_SIZE = 1 << 22


class LowPrecisionAdamW(Optimizer):
    """torch's AdamW, the state of which is kept in `state_dtype`; groups hold "names" too."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        state_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.seed, self.state_dtype = seed, state_dtype
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._offsets = {parameter: _global_offset(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, group)

    def _update(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0)  # on the host, where it is read
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=self.state_dtype)
        state["step"] += 1
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"])
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        if local[0].numel() == 0:
            return
        device, width = local[0].device, local[0].shape[-1]
        step = int(state["step"])
        key = _key(self.seed, step, name, device)
        starts = _row_starts(local[0].shape, parameter.shape, self._offsets[parameter], device)
        columns = torch.arange(width, device=device)
        num_rows = max(1, BLOCK_SIZE // width)
        rows = (tensor.view(-1, width).split(num_rows) for tensor in local)
        for start, *block in zip(starts.split(num_rows), *rows, strict=True):
            indices = start[:, None] + columns  # (rows, width), in the whole parameter
            _update_block(block, scramble(key + indices * STEP), step, group)


def _update_block(block: list[Tensor], bits: Tensor, step: int, group: dict[str, Any]) -> None:
    """In place, all of one shape; the formula of torch.optim.AdamW, in its order of operations."""
    parameter, gradient, exp_avg, exp_avg_sq = block
    lr, (beta1, beta2) = group["lr"], group["betas"]
    new, gradient = parameter.float(), gradient.float()
    new *= 1 - lr * group["weight_decay"]
    m = exp_avg.float().lerp(gradient, 1 - beta1)
    v = (exp_avg_sq.float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    new.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
    parameter.copy_(new)  # nothing to do in fp32, which `new` shares
    exp_avg.copy_(round_stochastically(m, bits, exp_avg.dtype))
    exp_avg_sq.copy_(round_stochastically(v, bits >> 16, exp_avg.dtype))


def round_stochastically(value: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `value` as `dtype`: a neighbour in bfloat16, chosen by the 16 lowest of random `bits`.

    What bfloat16 holds exactly, zero and infinity too, stays as it is.
    """
    if dtype == torch.float32:
        return value
    assert dtype == torch.bfloat16, dtype
    raised = value.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (raised & -0x10000).view(torch.float32).to(dtype)


def _key(seed: int, step: int, name: str, device: torch.device) -> Tensor:
    """(1,) int64"""
    return scramble(sample_keys(seed, step, 1, device) + hash_of_name(name))


def _global_offset(parameter: Tensor) -> tuple[int, ...]:
    """Where in the whole parameter this rank's part of it begins, by dim."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    placements = (parameter.device_mesh, parameter.placements)
    return compute_local_shape_and_global_offset(parameter.shape, *placements)[1]


def _row_starts(
    local: torch.Size, whole: torch.Size, offsets: tuple[int, ...], device: torch.device
) -> Tensor:
    """(rows,) int64: where in the whole parameter each row of the last dim begins."""
    starts = torch.full((1,), offsets[-1], device=device)
    for dim, (size, offset) in enumerate(zip(local[:-1], offsets[:-1], strict=True)):
        places = torch.arange(offset, offset + size, device=device)
        starts = starts[..., None] + places * math.prod(whole[dim + 1 :])
    return starts.reshape(-1)
