"""Where a grouped kernel does not exist for the model, the loop takes its place.

That asking for it is refused is in tests/config/test_model_checks.py.
"""

from __future__ import annotations

import dataclasses

from tests.parity.harness import TINY, Mesh, run

NARROW = dataclasses.replace(TINY, num_experts=4, moe_intermediate_size=22)


def test_auto_takes_the_loop_there() -> None:
    losses = [
        run(Mesh(), {"moe.kernel": kernel}, model=NARROW).series("loss")
        for kernel in ("auto", "loop")
    ]
    assert losses[0] == losses[1]
