"""The state-space layer: transformers' numbers, exact gradients, documents apart, fp32 inside.

The oracle of the values is transformers' slow path; that of the gradients is the recurrence
written down token by token in fp64, which runs each document by itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.models import mamba
from torchtitan_lite.models.attention import Context
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.mamba import MambaLayer, MambaMixer, selective_scan
from torchtitan_lite.parallel.data import compute_in

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=20,
    intermediate_size=40,
    num_hidden_layers=3,
    layer_type="state_space",
    state_size=6,
    conv_kernel=4,
    time_step_rank=3,
    residual_in_fp32=True,
    tie_word_embeddings=True,
)
BATCH = 2
ONE_PRIME_SQUARE_AND_ODD = [1, 2, 3, 13, 16, 17, 30]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"state_space_bias": True},
    "no convolution bias": {"conv_bias": False},
    "short kernel": {"conv_kernel": 2},
    "kernel of one": {"conv_kernel": 1},
    "gelu": {"hidden_act": "gelu"},
}


def _randomise(module: nn.Module) -> None:
    """Weights that let nothing hide: no bias is 0, states last several tokens, outputs are O(1)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            parameter.add_({"A_log": 0.5, "D": 1.0}.get(name.split(".")[-1], 0.0))
            parameter.sub_(2.0 if name.endswith("dt_proj.bias") else 0.0)


def mixer_with(**changes: Any) -> MambaMixer:
    mixer = MambaMixer(dataclasses.replace(TINY, **changes))
    _randomise(mixer)
    return mixer


def some_hidden(seq: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, seq, TINY.hidden_size, generator=torch.Generator().manual_seed(1))


def _positions(lengths: list[int]) -> Tensor:
    """(seq,) of documents of these lengths, one after the other."""
    return torch.cat([torch.arange(length) for length in lengths])


def _error(ours: Tensor, expected: Tensor) -> float:
    difference = (ours.detach().double() - expected.detach().double()).norm()
    return (difference / expected.detach().double().norm()).item()


# --- against transformers ---------------------------------------------------------------------


def _transformers_model(config: ModelConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            state_size=config.state_size,
            num_hidden_layers=config.num_hidden_layers,
            conv_kernel=config.conv_kernel,
            time_step_rank=config.time_step_rank,
            use_bias=config.state_space_bias,
            use_conv_bias=config.conv_bias,
            hidden_act=config.hidden_act,
        )
    ).eval()
    _randomise(model)
    return model


@pytest.mark.parametrize("seq", [1, 13, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixer_with_their_weights_computes_what_theirs_does(variant: str, seq: int) -> None:
    config = dataclasses.replace(TINY, **VARIANTS[variant])
    theirs = _transformers_model(config).backbone.layers[0].mixer
    ours = MambaMixer(config)
    ours.load_state_dict(theirs.state_dict())  # strict: the names are theirs too
    with torch.no_grad():
        torch.testing.assert_close(
            ours(some_hidden(seq)), theirs(some_hidden(seq)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("seq", [1, 200])
def test_logits_equal_transformers(seq: int) -> None:
    theirs = _transformers_model(TINY)
    ours = Decoder(TINY)
    renamed = {"backbone.": "", "embeddings.": "embed_tokens.", "norm_f.": "norm."}
    for name, weight in theirs.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        with torch.no_grad():
            ours.get_parameter(name)[: weight.shape[0]] = weight
    tokens = torch.randint(61, (2, seq), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max().item()
    assert difference < 1e-5 * expected.abs().max().item()


# --- values and gradients against the recurrence, token by token ------------------------------


def _one_after_the_other(mixer: MambaMixer, x: Tensor) -> Tensor:
    """The mixer over one document x (seq, hidden), as the paper writes it."""
    kernel, rank, size = mixer.config.conv_kernel, *mixer.widths[:2]
    inner, gate = mixer.in_proj(x).chunk(2, dim=-1)
    h, outputs = x.new_zeros(inner.shape[1], size), []
    for t in range(len(x)):
        taken = torch.zeros_like(inner[t])
        for back in range(min(kernel, t + 1)):
            taken = taken + mixer.conv1d.weight[:, 0, kernel - 1 - back] * inner[t - back]
        if mixer.conv1d.bias is not None:
            taken = taken + mixer.conv1d.bias
        taken = mixer.activation(taken)
        chosen = mixer.x_proj(taken)
        low, B, C = chosen[:rank], chosen[rank : rank + size], chosen[rank + size :]
        step = F.softplus(F.linear(low, mixer.dt_proj.weight, mixer.dt_proj.bias))
        decay = torch.exp(-step[:, None] * mixer.A_log.exp())
        h = decay * h + (step * taken)[:, None] * B
        outputs.append((h * C).sum(1) + mixer.D * taken)
    return mixer.out_proj(torch.stack(outputs) * F.silu(gate))


def _reference(mixer: MambaMixer, x: Tensor, lengths: list[int]) -> Tensor:
    documents = [row.split(lengths) for row in x]
    return torch.stack(
        [torch.cat([_one_after_the_other(mixer, d) for d in row]) for row in documents]
    )


def _gradients(out: Tensor, mixer: MambaMixer, x: Tensor) -> dict[str, Tensor]:
    """Of a sum with random weights, for the input and each parameter."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    named = {"x": x, **dict(mixer.named_parameters())}
    grads = torch.autograd.grad((out * weights).sum(), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(named.items(), grads, strict=True)
    }


def _errors(mixer: MambaMixer, lengths: list[int], *, packed: bool) -> dict[str, float]:
    """Of output and gradients, fp32 against the loop in fp64; 0 where both are zero."""
    x = some_hidden(sum(lengths)).requires_grad_()
    positions = _positions(lengths).expand(BATCH, -1) if packed else None
    out = mixer(x, positions)
    exact, exact_x = copy.deepcopy(mixer).double(), x.detach().double().requires_grad_()
    expected = _reference(exact, exact_x, lengths)
    ours, theirs = _gradients(out, mixer, x), _gradients(expected, exact, exact_x)
    found = {"output": _error(out, expected)}
    for name, gradient in theirs.items():
        if gradient.norm() == 0:
            assert ours[name].norm() == 0, name
        else:
            found[name] = _error(ours[name], gradient)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seq", ONE_PRIME_SQUARE_AND_ODD)
def test_values_and_gradients_are_those_of_the_recurrence(seq: int, variant: str) -> None:
    errors = _errors(mixer_with(**VARIANTS[variant]), [seq], packed=False)
    assert max(errors.values()) < 2e-6, errors


# 25 tokens are five chunks of five: borders inside a chunk, between two, several in one, none.
PACKED = [[25], [7, 18], [5, 20], [1, 1, 2, 3, 5, 13], [10, 3, 2, 10], [1] * 25]


@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_values_and_gradients_of_packed_documents_are_those_of_each_alone(
    lengths: list[int],
) -> None:
    errors = _errors(mixer_with(), lengths, packed=True)
    assert max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize("time_step", [1e-6, 1.0, 1e3])
def test_no_step_is_too_small_or_too_large(time_step: float) -> None:
    """Over 400 tokens decays multiply up to exp(-400,000 * 16), or hardly fade."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(1, 400, 8, generator=generator) for _ in range(4)]
    u, (B, C) = draw[0], (t[..., :4] for t in draw[1:3])
    step = draw[3].exp() * time_step
    A, state = -torch.tensor([1.0, 2.0, 8.0, 16.0]).expand(8, 4).clone(), torch.zeros(1, 8, 4)
    inputs = [t.requires_grad_() for t in (u, step, A, B, C)]
    y, _ = selective_scan(*inputs, state=state)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    u, step, A, B, C = exact
    h, outputs = torch.zeros(1, 8, 4, dtype=torch.float64), []
    for t in range(400):
        decay = torch.exp(step[:, t, :, None] * A)
        h = decay * h + (step[:, t] * u[:, t])[..., None] * B[:, t, None]
        outputs.append((h * C[:, t, None]).sum(-1))
    expected = torch.stack(outputs, 1)
    assert _error(y, expected) < 1e-6
    ours = torch.autograd.grad(y.square().sum(), inputs)
    theirs = torch.autograd.grad(expected.square().sum(), exact)
    for grad, exact_grad in zip(ours, theirs, strict=True):
        assert grad.isfinite().all()
        # Where a state is gone after one token, the gradient of A is too small for fp32.
        assert exact_grad.norm() < 1e-30 or _error(grad, exact_grad) < 1e-5


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("seq", "steps"), [(1, 1), (100, 9 + 9 + 10), (10_000, 99 + 99 + 100)])
def test_a_scan_takes_three_square_roots_of_the_sequence_in_steps(seq: int, steps: int) -> None:
    x, B = torch.zeros(1, seq, 1), torch.zeros(1, seq, 1)
    with _Counter() as counter:
        selective_scan(x, x, -torch.ones(1, 1), B, B, state=torch.zeros(1, 1, 1))
    assert counter.counts[torch.ops.aten.addcmul.default] == steps


# --- documents --------------------------------------------------------------------------------


@torch.no_grad()
def _distance_from_apart(mixer: MambaMixer, lengths: list[int]) -> float:
    x, positions = some_hidden(sum(lengths)), _positions(lengths)
    apart = torch.cat([mixer(document) for document in x.split(lengths, dim=1)], dim=1)
    return (mixer(x, positions.expand(BATCH, -1)) - apart).abs().max().item()


@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_packed_documents_compute_what_they_do_apart(lengths: list[int]) -> None:
    assert _distance_from_apart(mixer_with(), lengths) < 1e-6


def _drop_border_of_convolution(mixer: MambaMixer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mixer.conv1d.forward
    monkeypatch.setattr(mixer.conv1d, "forward", lambda x, positions: whole(x))


def _drop_border_of_scan(mixer: MambaMixer, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*args: Tensor, state: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(*args, state=state)

    monkeypatch.setattr(mamba, "selective_scan", whole)


@pytest.mark.parametrize("drop", [_drop_border_of_convolution, _drop_border_of_scan])
def test_an_ignored_border_would_be_seen(drop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = mixer_with()
    drop(mixer, monkeypatch)
    for lengths in PACKED[1:]:
        assert _distance_from_apart(mixer, lengths) > 1e-2, lengths


def test_a_decoder_keeps_documents_apart_when_told_to() -> None:
    model, lengths = Decoder(TINY), [7, 1, 12]
    _randomise(model)
    tokens = torch.randint(61, (BATCH, 20), generator=torch.Generator().manual_seed(1))
    positions = _positions(lengths).expand(BATCH, -1)
    with torch.no_grad():
        apart = torch.cat([model(document) for document in tokens.split(lengths, dim=1)], dim=1)
        assert (model(tokens, positions) - apart).abs().max() > 1e-2
        model.document_mask = True
        torch.testing.assert_close(model(tokens, positions), apart, rtol=0, atol=1e-6)


def test_rows_may_be_packed_differently_or_all_alike() -> None:
    mixer, x = mixer_with(), some_hidden(25)
    first, second = _positions([7, 18]), _positions([5, 20])
    together = mixer(x, torch.stack((first, second)))
    for row, positions in enumerate((first, second)):
        alone = mixer(x[row : row + 1], positions[None])[0]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(mixer(x, first[None]), mixer(x, first.expand(2, -1)))


# --- dtypes -----------------------------------------------------------------------------------


def test_a_bf16_scan_computes_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, step, B, C = (torch.rand(2, 50, 6, generator=generator).bfloat16() for _ in range(4))
    A, state = -torch.rand(6, 6, generator=generator), torch.rand(2, 6, 6, generator=generator)
    y, end = selective_scan(x, step, A, B, C, state=state)
    exact, exact_end = selective_scan(*(t.float() for t in (x, step, A, B, C)), state=state)
    assert y.dtype == end.dtype == torch.float32
    assert torch.equal(y, exact) and torch.equal(end, exact_end)


def test_a_bf16_mixer_takes_decay_rates_and_convolution_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixer, seen = mixer_with().bfloat16(), []

    def spy(x: Tensor, step: Tensor, A: Tensor, *args: Tensor, **options: Any) -> Any:
        seen.append(A)
        return selective_scan(x, step, A, *args, **options)

    monkeypatch.setattr(mamba, "selective_scan", spy)
    out = mixer(some_hidden(9).bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(seen[0], -mixer.A_log.float().exp())
    x = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = copy.deepcopy(mixer.conv1d).float()(x.float())
    assert torch.equal(mixer.conv1d(x), exact.bfloat16())


def test_the_bias_of_a_bf16_time_step_does_not_round_off_its_token() -> None:
    projection = mixer_with().dt_proj.bfloat16()
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(3)).bfloat16() / 8
    plain = nn.Linear(3, 40).bfloat16()
    plain.load_state_dict(projection.state_dict())
    with torch.no_grad():
        exact = F.softplus(plain.double()(x.double()))
        assert _error(projection(x), exact) < 3e-4
        assert _error(F.softplus(plain.bfloat16()(x)), exact) > 1e-3, "the twin"


def test_a_bf16_layer_keeps_the_residual_in_fp32_and_reads_parameters_where_they_are_cast() -> None:
    """Parameters cast while their own module runs give what a layer stored in bf16 gives."""
    layer = MambaLayer(TINY, 0)
    _randomise(layer)
    stored = copy.deepcopy(layer).bfloat16()
    for module in layer.modules():
        compute_in(module, torch.bfloat16)
    x, context = some_hidden(17), Context(None, None, None, None, None)
    out = layer(x, context)
    assert out.dtype == torch.float32
    assert torch.equal(out, stored(x, context))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
