r"""The learning rate is a pure function of the step.

Nothing is counted up, stored in a checkpoint or loaded from one: a run that resumes at step s
asks for the factor of step s and gets what the run never stopped got. The learning rate of a
parameter group is `lr * lr_multiplier * lr_factor(step, ...)`.

    factor
      1 |      _____________
        |     /|           |\
        |    / |           | \
        |   /  |           |  \
    min |  /   |           |   \_______
        +--+---+-----------+---+------> step, from 0
           0   W-1         T-D T
           warm-up  stable  decay

Warm-up (W steps) climbs by 1/W a step and starts at 1/W, never at 0: a first step at rate zero
would train nothing. K steps at 1 follow, then D steps of decay:

- `decay_ratio` None: D = T - W, the decay begins right after the warm-up;
- a number: D = round(T * decay_ratio), warm-up, stable, decay (WSD); D is at most T - W.

K = T + 1 - W - D: the one is a virtual step after the last, so that the minimum belongs to step
T and the last trained step, T - 1, still learns. The formula is torchtitan's.
Proven in tests/optim/test_schedule.py, values by hand at each border.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Share of the way down that is still left, by share p of the decay that is done.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1.0 - p,
    "sqrt": lambda p: 1.0 - math.sqrt(p),
    "cosine": lambda p: (1.0 + math.cos(math.pi * p)) / 2.0,
}


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
) -> float:
    """Factor on the learning rate of the 0-based `step`, in (0, 1] while the run lasts.

    A schedule without a decay (`constant`, or no step left for one) stays at 1 for ever; any
    other is at `min_lr_factor` from step `total_steps` on. A warm-up longer than the run ends
    with it (the configuration warns of that).
    """
    assert step >= 0 and total_steps >= 1 and warmup_steps >= 0, (step, total_steps, warmup_steps)
    warmup = min(warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    decay = total_steps - warmup
    if decay_ratio is not None:
        decay = min(round(total_steps * decay_ratio), decay)
    last_at_peak = total_steps - decay
    if decay == 0 or step <= last_at_peak or decay_type == "constant":
        return 1.0
    progress = min(1.0, (step - last_at_peak) / decay)
    return min_lr_factor + (1.0 - min_lr_factor) * DECAY_SHAPES[decay_type](progress)
