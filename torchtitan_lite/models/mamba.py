"""The state-space layer (Mamba, arXiv:2312.00752): a recurrence where attention would be.

Each channel carries `state_size` numbers h from token to token:

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t          y_t = C_t h_t + D x_t

A < 0 and D are parameters; the step dt and the vectors B and C are projections of the token, so a
token chooses what the state forgets, takes in and shows (section 3.2, algorithm 2; B is
discretised by Euler's rule, as in the authors' code).

One token after the other takes seq steps, each too small for a device. So the sequence is cut
into about sqrt(seq) chunks, and walked twice with a short walk between, 3 sqrt(seq) steps in all:

    tokens      0 1 2 | 3 4 5 | 6 7 8
    1. ends     0-->e0  0-->e1  0-->e2      all chunks at once, each from a state of zero
    2. starts   s0----->s1----->s2          s_(k+1) = e_k + (decay over chunk k) s_k
    3. states   s0-->   s1-->   s2-->       all chunks at once, each from its own start

Every decay is exp of a sum that is at most 0: nothing can overflow, and nothing is divided.

Where documents are packed, position 0 begins one. Nothing reaches over that border: the decay
into it is 0, and a tap of the convolution that looks p tokens back counts from position p on.

Proven in tests/models/test_mamba*.py against transformers and a plain loop over the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.attention import Context
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import ACTIVATIONS, build_norm

# A step after which nothing is left. Finite, so that its share of A's gradient is 0, not 0 * inf.
FOREVER = 1e30


def selective_scan(
    x: Tensor,
    time_step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence without D, in fp32 -> y (batch, seq, inner), and the state at the end.

    x and time_step: (batch, seq, inner), A: (inner, state_size) below 0, B and C: (batch, seq,
    state_size), state before the first token: (batch, inner, state_size). `begins` (batch, seq)
    is True where a token must not see what was before it.
    """
    seq = x.shape[1]
    num_chunks = math.isqrt(seq - 1) + 1
    length = -(-seq // num_chunks)
    x, time_step, A, B, C, state = (t.float() for t in (x, time_step, A, B, C, state))
    taken = time_step * x
    if begins is not None:
        time_step = time_step.masked_fill(begins[..., None], FOREVER)

    def cut(t: Tensor) -> tuple[Tensor, ...]:
        """(batch, seq, width) -> for each place in a chunk (batch, num_chunks, width).

        Padding is a step of 0 that takes in nothing: it leaves the state as it is.
        """
        t = F.pad(t, (0, 0, 0, num_chunks * length - seq))
        return t.unflatten(1, (num_chunks, length)).unbind(2)

    steps = cut(time_step)
    decays = [torch.exp(step[..., None] * A) for step in steps]  # (batch, chunks, inner, state)
    inputs = [u[..., None] @ b[..., None, :] for u, b in zip(cut(taken), cut(B), strict=True)]
    starts = [state]
    if num_chunks > 1:
        ends = inputs[0]
        for decay, new in zip(decays[1:], inputs[1:], strict=True):
            ends = torch.addcmul(new, decay, ends)
        chunk_decays = torch.exp(torch.stack(steps).sum(0)[..., None] * A)
        for end, decay in list(zip(ends.unbind(1), chunk_decays.unbind(1), strict=True))[:-1]:
            starts.append(torch.addcmul(end, decay, starts[-1]))
    h = torch.stack(starts, dim=1)
    outputs = []
    for decay, new, c in zip(decays, inputs, cut(C), strict=True):
        h = torch.addcmul(new, decay, h)
        outputs.append((h @ c[..., None]).squeeze(-1))
    return torch.stack(outputs, dim=2).flatten(1, 2)[:, :seq], h[:, -1]


@dataclass
class MambaState:
    """What a mixer keeps of the tokens before, while text is generated."""

    inputs: Tensor  # (batch, conv_kernel - 1, inner): the convolution's last inputs
    hidden: Tensor  # (batch, inner, state_size), fp32

    @classmethod
    def empty(
        cls, config: ModelConfig, batch_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> MambaState:
        """The state before the first token; `dtype` is that of the hidden states."""
        width = config.intermediate_size
        return cls(
            torch.zeros(batch_size, config.conv_kernel - 1, width, dtype=dtype, device=device),
            torch.zeros(batch_size, width, config.state_size, device=device),
        )


class CausalConvolution(nn.Conv1d):
    """For each channel, a filter over the last `conv_kernel` tokens of its document."""

    def __init__(self, config: ModelConfig) -> None:
        width = config.intermediate_size
        super().__init__(width, width, config.conv_kernel, groups=width, bias=config.conv_bias)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, conv_kernel - 1 + seq, inner), earlier tokens first -> (batch, seq, inner)."""
        taps = self.weight[:, 0].float().unbind(1)  # (inner,) each, the newest token's last
        reach = len(taps) - 1
        seq = x.shape[1] - reach
        out = torch.zeros((), device=x.device) if self.bias is None else self.bias.float()
        for first, tap in enumerate(taps):
            term = x[:, first : first + seq] * tap
            if positions is not None:
                term = term * (positions >= reach - first)[..., None]
            out = out + term
        return out.type_as(x)


class TimeStepProjection(nn.Linear):
    """Step sizes softplus(W x + b): (batch, seq, time_step_rank) -> (batch, seq, inner), fp32.

    The bias joins in fp32: it is about -5, and a bf16 sum would round off what the token says.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(F.linear(x, self.weight).float() + self.bias.float())


class MambaMixer(nn.Module):
    """Project in, convolve, scan, gate, project out (figure 3 of the paper).

    While `state` is set, a call continues from it, whatever its number of tokens, and updates it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.state: MambaState | None = None
        self.activation = ACTIVATIONS[config.hidden_act]
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.state_space_bias
        self.widths = (config.time_step_rank, config.state_size, config.state_size)
        self.in_proj = nn.Linear(hidden, 2 * width, bias=bias)
        self.conv1d = CausalConvolution(config)
        self.x_proj = nn.Linear(width, sum(self.widths), bias=False)
        self.dt_proj = TimeStepProjection(config.time_step_rank, width)
        self.A_log = nn.Parameter(torch.zeros(width, config.state_size))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seq, hidden) -> the same; `positions` of the tokens of this call, or None.

        A token at position p sees the p tokens before it, also those of earlier calls; without
        positions it sees all of them.
        """
        x, gate = self.in_proj(x).chunk(2, dim=-1)  # (batch, seq, inner)
        before = self.state or MambaState.empty(
            self.config, x.shape[0], dtype=x.dtype, device=x.device
        )
        seen = torch.cat((before.inputs.type_as(x), x), dim=1)
        x = self.activation(self.conv1d(seen, positions))
        rank, B, C = self.x_proj(x).split(self.widths, dim=-1)
        y, hidden = selective_scan(
            x,
            self.dt_proj(rank),
            -torch.exp(self.A_log.float()),
            B,
            C,
            state=before.hidden,
            begins=None if positions is None else positions == 0,
        )
        if self.state is not None:  # copies: a view would keep the whole call's tensors alive
            self.state.inputs = seen[:, gate.shape[1] :].clone()
            self.state.hidden = hidden.clone()
        y = (y + self.D.float() * x) * F.silu(gate)
        return self.out_proj(y.type_as(x))


class MambaLayer(nn.Module):
    """A mixer, behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.norm = build_norm(config)
        self.mixer = MambaMixer(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + self.mixer(self.norm(x), context.positions)
