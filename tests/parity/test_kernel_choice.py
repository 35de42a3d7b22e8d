"""A grouped kernel that does not exist for the model is refused before a weight is made."""

from __future__ import annotations

import dataclasses

import pytest

from tests.parity.harness import TINY, Mesh, run
from tests.world import RankFailure

NARROW = dataclasses.replace(TINY, num_experts=4, moe_intermediate_size=22)


def test_a_grouped_kernel_that_is_not_there_is_refused_with_the_widths() -> None:
    with pytest.raises(
        RankFailure, match=r"moe.kernel = grouped: .* 40 x 22 in float32; .* of 4 in"
    ):
        run(Mesh(), {"moe.kernel": "grouped"}, model=NARROW)


def test_auto_takes_the_loop_there() -> None:
    losses = [
        run(Mesh(), {"moe.kernel": kernel}, model=NARROW).series("loss")
        for kernel in ("auto", "loop")
    ]
    assert losses[0] == losses[1]
