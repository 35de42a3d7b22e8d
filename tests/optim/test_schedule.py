"""The learning-rate factor: values by hand at the borders, and its shape in between."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from torchtitan_lite.optim.schedule import DECAY_SHAPES, lr_factor


def schedule(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "total_steps": 10,
        "warmup_steps": 4,
        "decay_ratio": None,
        "decay_type": "linear",
        "min_lr_factor": 0.0,
    }
    return {**keys, **changes}


def curve(num_steps: int, **changes: Any) -> list[float]:
    return [lr_factor(step, **schedule(**changes)) for step in range(num_steps)]


def test_warm_up_starts_at_one_step_and_reaches_one_at_its_end() -> None:
    assert curve(4) == [0.25, 0.5, 0.75, 1.0]


def test_without_a_ratio_the_decay_begins_right_after_the_warm_up() -> None:
    # T = 10, W = 4, D = 6: step 4 is at the peak, step 10 (virtual) at the minimum.
    expected = [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0]
    assert curve(11)[4:] == pytest.approx(expected, abs=1e-15)


def test_with_a_ratio_the_peak_lasts_until_the_decay() -> None:
    # D = round(10 * 0.3) = 3: steps 4 to 7 at the peak, then thirds.
    assert curve(11, decay_ratio=0.3)[4:] == pytest.approx([1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_sqrt_and_cosine_by_hand() -> None:
    # D = 4: progress is 1/4, 2/4, 3/4 at steps 7, 8, 9.
    sqrt = curve(11, decay_ratio=0.4, decay_type="sqrt")[6:]
    assert sqrt == pytest.approx([1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0])
    cosine = curve(11, decay_ratio=0.4, decay_type="cosine")[6:]
    root = math.sqrt(0.5)
    assert cosine == pytest.approx([1, (1 + root) / 2, 0.5, (1 - root) / 2, 0])


def test_the_minimum_is_a_floor_that_the_whole_decay_scales_to() -> None:
    assert curve(11, min_lr_factor=0.4)[4:] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])


def test_constant_stays_at_one_for_ever() -> None:
    assert curve(30, decay_type="constant", min_lr_factor=0.1)[3:] == [1.0] * 27


SCHEDULES = [
    schedule(total_steps=total, warmup_steps=warmup, decay_ratio=ratio, decay_type=shape)
    | {"min_lr_factor": floor}
    for total, warmup, ratio, shape, floor in itertools.product(
        (1, 2, 7, 100), (0, 1, 3, 100, 500), (None, 0.0, 0.25, 1.0), DECAY_SHAPES, (0.0, 0.1)
    )
]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_any_schedule_climbs_stays_and_falls_without_a_jump(floor: float) -> None:
    for keys in SCHEDULES:
        if keys["min_lr_factor"] != floor:
            continue
        total = keys["total_steps"]
        factors = [lr_factor(step, **keys) for step in range(total + 3)]
        peak = factors.index(max(factors))
        assert factors[:peak] == sorted(factors[:peak]), keys
        assert factors[peak:] == sorted(factors[peak:], reverse=True), keys
        assert max(factors) == 1.0 and all(factor > 0 for factor in factors[:total]), keys
        _assert_no_jump(keys, factors)


def _assert_no_jump(keys: dict[str, Any], factors: list[float]) -> None:
    total, warmup = keys["total_steps"], min(keys["warmup_steps"], keys["total_steps"])
    ratio = keys["decay_ratio"]
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    # The steepest single step of each shape, in units of the progress 1 / decay.
    one = 1 / max(decay, 1)
    steepest = {"constant": 0.0, "linear": one, "sqrt": math.sqrt(one), "cosine": math.pi / 2 * one}
    rises = [later - earlier for earlier, later in itertools.pairwise(factors)]
    assert max(rises) <= 1 / max(warmup, 1) + 1e-12, keys
    assert -min(rises) <= steepest[keys["decay_type"]] + 1e-12, keys


def test_any_decay_ends_at_its_minimum_and_stays_there() -> None:
    for keys in SCHEDULES:
        decays = keys["decay_type"] != "constant" and keys["warmup_steps"] < keys["total_steps"]
        ratio = keys["decay_ratio"]
        if not decays or (ratio is not None and round(keys["total_steps"] * ratio) == 0):
            assert lr_factor(keys["total_steps"] + 50, **keys) == 1.0, keys
            continue
        for beyond in (0, 1, 1000):
            end = lr_factor(keys["total_steps"] + beyond, **keys)
            assert end == pytest.approx(keys["min_lr_factor"], abs=1e-15), keys


def test_neither_warm_up_nor_decay_is_a_factor_of_one_and_not_the_rate_again() -> None:
    assert curve(10, warmup_steps=0, decay_ratio=0.0) == [1.0] * 10


def test_one_step_trains_at_the_full_rate() -> None:
    for warmup, ratio in itertools.product((0, 1, 9), (None, 0.0, 0.5, 1.0)):
        keys = schedule(total_steps=1, warmup_steps=warmup, decay_ratio=ratio)
        assert lr_factor(0, **keys) == 1.0


def test_a_warm_up_longer_than_the_run_ends_with_it() -> None:
    assert curve(4, total_steps=4, warmup_steps=9) == [0.25, 0.5, 0.75, 1.0]


def test_the_check_for_jumps_sees_a_warm_up_that_starts_late_and_a_decay_that_ends_early() -> None:
    keys = schedule()
    good = [lr_factor(step, **keys) for step in range(12)]
    _assert_no_jump(keys, good)
    for broken in ([0.0, 0.0, *good[2:]], [*good[:9], 0.0, 0.0, 0.0]):
        with pytest.raises(AssertionError):
            _assert_no_jump(keys, broken)
