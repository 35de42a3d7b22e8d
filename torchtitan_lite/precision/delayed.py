"""Delayed scaling: a cast takes its scale from the steps before instead of from its own numbers.

    amax_history  (3, steps)   largest input, weight and gradient of a linear in the last steps
    amax          (3,)         the same of the step that runs, over its micro-batches

    cast      scale from the largest of the history; what lies beyond it ends at the format's end
    step      one all-reduce (max) of all linears' amax over the ranks that share them, which then
              takes the place of the oldest in the history

So the scale is known before the numbers are, and a kernel need not read them twice. It also is the
same on all ranks, whatever the mesh. Nothing is known at the first step, whose casts are dynamic.

A number that grew past the history is cut until the next step knows it; an infinity or a NaN is
not cut, so that a bad gradient is seen, and it is never noted: the scale stays as it was. Neither
does a step that was skipped note anything. To note is to take a maximum, so a forward that is
computed again, or a backward that runs twice, changes nothing.

Histories are in the checkpoint by the name of their linear, `trainer.amax_history.<name>`, so any
mesh goes on from any other's. Proven in tests/precision/test_delayed.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config import Config

INPUT, WEIGHT, GRADIENT = range(3)
DIGITS = (16, 16, 8)  # values of the mantissa, its leading one included, of E4M3 and E5M2


def add_history(module: nn.Module, length: int, device: torch.device) -> None:
    """Give a linear the buffers that `largest` reads and notes in; no weights of a model."""
    module.register_buffer("amax_history", torch.zeros(3, length, device=device), False)
    module.register_buffer("amax", torch.zeros(3, device=device), False)


def largest(x: Tensor, kind: int, history: Tensor | None, running: Tensor | None) -> Tensor | None:
    """What the cast of x is to take for its largest number; notes in `running` what that is.

    None, to leave it to the cast, where there is no history (3, steps) at all.
    """
    if history is None or running is None:
        return None
    own = _note(x, kind, running)
    past = history[kind].amax()
    return torch.where(past > 0, past, own)


@torch.library.custom_op("torchtitan_lite::note_amax", mutates_args=())
def _note(x: Tensor, kind: int, running: Tensor) -> Tensor:
    """The largest of x in fp32; `running` notes it, rounded as float8 rounds it.

    Rounded, it is the same where x has been gathered in float8. Of the note a compiled graph is not
    told, as no graph reads it: autograd would take that of one micro-batch for a change of what
    another, whose backward is to come, has kept.
    """
    own = torch.linalg.vector_norm(x, torch.inf).float()  # without a copy, as of x.abs()
    mantissa, exponent = torch.frexp(torch.where(own.isfinite(), own, 0.0))
    digits = DIGITS[kind]
    rounded = torch.ldexp((mantissa * digits).round() / digits, exponent)
    running.data[kind] = torch.maximum(running[kind], rounded)
    return own


@_note.register_fake
def _(x: Tensor, kind: int, running: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


class DelayedScaling:
    """Keeps the histories of this rank's linears; without any it does nothing.

    The ranks of a pipeline stage lie side by side, `ranks_per_stage` of them, and share its
    linears. Building it is a collective of the world where there are several stages.
    """

    def __init__(self, parts: Iterable[nn.Module], config: Config, *, ranks_per_stage: int) -> None:
        float8 = config.quantize.linear.float8
        on = float8.recipe_name != "" and float8.scaling == "delayed"
        named = [(name, module) for part in parts for name, module in part.named_modules()]
        self.linears = {name: m for name, m in named if "amax_history" in m._buffers}
        self.group, self.num_ranks = None, ranks_per_stage
        if on and 1 < ranks_per_stage < dist.get_world_size():
            self.group, _ = dist.new_subgroups(ranks_per_stage)

    def begin(self) -> None:
        """Before the first micro-batch of a global batch; forgets what validation noted."""
        for module in self.linears.values():
            module.amax.zero_()

    @torch.no_grad()
    def end(self) -> None:
        """After a step of the optimizer; a collective of the ranks that share a stage."""
        if not self.linears:
            return
        amax = torch.stack([module.amax for module in self.linears.values()])
        if self.num_ranks > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        histories = list(self.state().values())
        before = torch.stack(histories)  # (linears, 3, steps)
        rolled = torch.cat((amax[..., None], before[..., :-1]), dim=-1)
        # Where no finite number was seen, the old ones stay.
        torch._foreach_copy_(histories, list(torch.where(amax[..., None] > 0, rolled, before)))

    def state(self) -> dict[str, Tensor]:
        """The histories, for a checkpoint; they share memory with the model."""
        return {
            f"trainer.amax_history.{name}": module.amax_history
            for name, module in self.linears.items()
        }
