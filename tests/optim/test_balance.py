"""Counts, shares, biases and metrics of the experts, from one sum a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.parity.harness import TINY, Mesh, make_config
from tests.world import run_ranks
from torchtitan_lite.config import resolve
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.optim.balance import ExpertBalance, routers_of

MODEL = dataclasses.replace(
    TINY, num_experts=4, num_experts_per_tok=1, first_k_dense_replace=2, router_bias=True
)


def balance_of_stage(modules: list[str] | None = None) -> ExpertBalance:
    config = make_config(Mesh(), "unused", {"moe.bias_update_speed": 0.5})
    resolve(config, 1)
    return ExpertBalance([Decoder(MODEL, modules)], MODEL, config, torch.device("cpu"))


def step(balance: ExpertBalance, counts: list[int], *, applied: bool = True) -> None:
    balance.begin()
    for router in balance.routers.values():
        assert router.is_counting
        router.counts += torch.tensor(counts)
    balance.end(applied=applied)


def on_two_stages() -> tuple[dict, list[list[float]], list[float]]:
    """Rank r holds layer 2 + r alone, and counts what the other does not see."""
    rank = torch.distributed.get_rank()
    balance = balance_of_stage([f"layers.{2 + rank}"])
    assert list(balance.routers) == [2 + rank]
    step(balance, [[6, 2, 4, 0], [3, 3, 3, 3]][rank])
    (router,) = balance.routers.values()
    assert not router.is_counting
    return balance.report(), balance.shares.tolist(), router.e_score_correction_bias.tolist()


def test_every_rank_learns_the_counts_of_every_layer() -> None:
    (report, shares, bias), (other_report, other_shares, other_bias) = run_ranks(on_two_stages, 2)
    assert report == other_report and shares == other_shares
    assert report["expert_tokens"] == {"2": [6, 2, 4, 0], "3": [3, 3, 3, 3]}
    assert report["expert_load_max"] == 2.0
    assert shares[2] == pytest.approx([0.5, 1 / 6, 1 / 3, 0.0]) and shares[3] == [0.25] * 4
    assert bias == [-0.5, 0.5, -0.5, 0.5] and other_bias == [0.0] * 4


def skip_a_step() -> tuple[list[float], list[float]]:
    balance = balance_of_stage()
    step(balance, [9, 0, 0, 0], applied=False)
    router = balance.routers[2]
    return balance.shares[2].tolist(), router.e_score_correction_bias.tolist()


def test_a_skipped_step_moves_nothing() -> None:
    assert run_ranks(skip_a_step, 1) == [([0.25] * 4, [0.0] * 4)]


def lose_tokens() -> float:
    balance = balance_of_stage()
    pairs = balance.num_pairs
    step(balance, [pairs - 6, 0, 0, 0])
    return balance.report()["expert_dropped"] * pairs


def test_a_token_that_reaches_no_expert_would_be_told() -> None:
    assert run_ranks(lose_tokens, 1) == [pytest.approx(6)]


def train_dense_layers_alone() -> tuple[dict, bool]:
    model, config = dataclasses.replace(MODEL, first_k_dense_replace=9), make_config(Mesh(), "", {})
    resolve(config, 1)
    balance = ExpertBalance([Decoder(model)], model, config, torch.device("cpu"))
    step(balance, [])
    return balance.report(), bool(balance.shares.isfinite().all())


def test_a_mixture_whose_layers_are_all_dense_has_nothing_to_tell() -> None:
    assert run_ranks(train_dense_layers_alone, 1) == [({}, True)]


def test_routers_are_found_by_the_index_of_their_layer() -> None:
    assert list(routers_of([Decoder(MODEL, ["layers.1", "layers.3", "norm"])])) == [3]
    assert routers_of([Decoder(TINY)]) == {}
