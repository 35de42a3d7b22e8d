"""What a fresh state-space model starts from: its decays, time steps, spreads, zeros and ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_mamba import TINY
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.init import draw_parameter

WIDE = dataclasses.replace(
    TINY, hidden_size=256, intermediate_size=512, state_size=16, time_step_rank=16
)


def _draw(name: str, config: ModelConfig = WIDE, seed: int = 0) -> Tensor:
    shape = Decoder(config).get_parameter(name).shape
    return draw_parameter(name, shape, config, seed=seed, device=torch.device("cpu"))


def test_state_n_starts_with_a_decay_rate_of_n() -> None:
    rates = _draw("layers.1.mixer.A_log").exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 17.0).expand(512, 16))


def test_time_steps_start_log_uniform_between_a_thousandth_and_a_tenth() -> None:
    name, shape = "layers.1.mixer.dt_proj.bias", torch.Size((100_000,))
    bias = draw_parameter(name, shape, WIDE, seed=0, device=torch.device("cpu"))
    decades = F.softplus(bias.double()).log10()
    for quantile in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert abs(decades.quantile(quantile) - (2 * quantile - 3)) < 0.01
    assert decades.min() > -3.0001 and decades.max() < -0.9999


@pytest.mark.parametrize(("name", "inputs"), [("dt_proj", 16), ("conv1d", 4)])
def test_time_step_and_convolution_weights_start_uniform(name: str, inputs: int) -> None:
    weight, bound = _draw(f"layers.1.mixer.{name}.weight"), inputs**-0.5
    assert 0.99 * bound < weight.abs().max() <= bound
    assert abs(weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.05
    assert abs(weight.mean().item()) < 0.1 * bound


def test_projections_start_normal_and_the_one_into_the_residual_stream_smaller() -> None:
    for name, writes in (("in_proj", 1), ("x_proj", 1), ("out_proj", WIDE.num_hidden_layers)):
        std = 0.02 / math.sqrt(writes)
        assert abs(_draw(f"layers.1.mixer.{name}.weight").std().item() / std - 1) < 0.03, name


def test_biases_start_at_zero_and_norms_and_skips_at_one() -> None:
    config = dataclasses.replace(WIDE, state_space_bias=True, norm_type="layer")
    for name, _ in Decoder(config).named_parameters():
        if name.endswith(("norm.weight", "mixer.D")):
            assert (_draw(name, config) == 1).all(), name
        elif name.endswith(".bias") and "dt_proj" not in name:
            assert (_draw(name, config) == 0).all(), name
        else:
            assert _draw(name, config).std() > 0, name


def test_what_is_drawn_differs_between_layers_and_seeds() -> None:
    for name in ("dt_proj.bias", "dt_proj.weight", "conv1d.weight", "in_proj.weight"):
        first = _draw(f"layers.1.mixer.{name}")
        assert torch.equal(first, _draw(f"layers.1.mixer.{name}"))
        assert not torch.equal(first, _draw(f"layers.2.mixer.{name}"))
        assert not torch.equal(first, _draw(f"layers.1.mixer.{name}", seed=1))


def test_a_fresh_model_neither_dies_nor_explodes() -> None:
    config = dataclasses.replace(WIDE, tie_word_embeddings=False)
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, config))
    tokens = torch.randint(61, (1, 256), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, labels=tokens.roll(-1, 1))[0] / 256
    assert abs(loss.item() - math.log(61)) < 0.2
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name
