"""Activation checkpointing: what is kept and what is computed again, counted op by op.

A dispatch mode counts matmuls and attention calls in backward; a second one adds up the bytes of
all storages that a forward leaves alive. A layer has seven matmuls in forward, in the order
q k v o gate up down, and twice as many in backward: for the input and for the weight.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity.harness import Mesh, RecordingTrainer, run
from torchtitan_lite import precision
from torchtitan_lite.config import load_config
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Router
from torchtitan_lite.ops.dropout import sample_keys
from torchtitan_lite.parallel import activation
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.precision.linear import Float8Linear, apply_float8

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    max_position_embeddings=24,
)
BATCH, SEQ = 2, 24
TOKENS = BATCH * SEQ
FLOAT = 4  # bytes

NONE, FULL, EVERY_2ND, EVERY_3RD, PER_OP = (
    ("none", "2"),
    ("full", "2"),
    ("selective", "2"),
    ("selective", "3"),
    ("selective", "op"),
)
MODES = [NONE, FULL, EVERY_2ND, EVERY_3RD, PER_OP]

MATMUL = torch.ops.aten.mm.default
SCALED_MATMUL = torch.ops.torchtitan_lite.scaled_matmul.default
OF_EXPERTS = torch.ops.aten._grouped_mm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
VIEWS = {  # which cost nothing, and of which autograd makes some of its own
    getattr(torch.ops.aten, name).default for name in ("t", "view", "detach", "_unsafe_view")
} | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class OperatorCounter(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def counts_here(self) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += self.counts_here()
        return func(*args, **(kwargs or {}))


class BackwardCounter(OperatorCounter):
    """How often each operator runs inside a backward."""

    def counts_here(self) -> bool:
        return torch._C._current_graph_task_id() != -1


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside the mode that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_plain(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if _is_plain(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor)


def make(
    mode: tuple[str, str], num_layers: int = 4, modules: list[str] | None = None, **changes: Any
) -> Decoder:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, num_hidden_layers=num_layers, **changes)
    model = Decoder(config, modules)
    apply_activation_checkpointing(model, mode=mode[0], selective_option=mode[1])
    return model


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=generator)


def run_backward(model: Decoder) -> Counter[Any]:
    loss = model(_tokens(), labels=_tokens())[0]
    with BackwardCounter() as counter:
        loss.backward()
    return counter.counts


def bytes_kept(mode: tuple[str, str], num_layers: int = 4) -> int:
    model = make(mode, num_layers)
    tokens = _tokens()
    with LiveBytes() as live:
        loss = model(tokens, labels=tokens)[0]
    assert loss.requires_grad
    return live.num_bytes


# --- what is computed again -------------------------------------------------------------------

# Recomputation stops at the last tensor that backward needs, down_proj's input: 6 of 7 matmuls.
RECOMPUTED = {NONE: 0, FULL: 4 * 6, EVERY_2ND: 2 * 6, EVERY_3RD: 2 * 6, PER_OP: 4 * 3}
ATTENTION_AGAIN = {NONE: 0, FULL: 4, EVERY_2ND: 2, EVERY_3RD: 2, PER_OP: 0}


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_backward_computes_again_what_the_mode_says_and_no_more(mode: tuple[str, str]) -> None:
    """Every third of four layers: 0 and 3. Per op: every second matmul, and never attention."""
    counts = run_backward(make(mode))
    assert counts[MATMUL] == 4 * 14 + RECOMPUTED[mode]
    assert counts[ATTENTION] == ATTENTION_AGAIN[mode]


def test_a_layer_is_chosen_by_its_index_in_the_whole_model() -> None:
    """A stage of layers 1 to 3 recomputes layer 2, as the whole model does, not its first."""
    model = make(EVERY_2ND, modules=["layers.1", "layers.2", "layers.3"])
    x = torch.randn(BATCH, SEQ, CONFIG.hidden_size, requires_grad=True)
    out = model(x, torch.arange(SEQ)[None])
    with BackwardCounter() as counter:
        out.sum().backward()
    assert counter.counts[MATMUL] == 3 * 14 + 6
    recomputed = [name for name, layer in model.layers.items() if "forward" in vars(layer)]
    assert recomputed == ["2"]


def test_two_forwards_before_their_backwards_are_counted_apart() -> None:
    """As in a pipeline: which matmuls are kept must not depend on what else is in flight."""
    model = make(PER_OP)
    first, second = model(_tokens(), labels=_tokens())[0], model(_tokens(), labels=_tokens())[0]
    for loss in (first, second):
        with BackwardCounter() as counter:
            loss.backward()
        assert counter.counts[MATMUL] == 4 * 14 + RECOMPUTED[PER_OP]


def test_an_attention_operator_missing_from_the_list_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "_ATTENTION", activation._ATTENTION - {ATTENTION})
    assert run_backward(make(PER_OP))[ATTENTION] == 4


def test_the_products_of_blockwise_float8_are_matmuls_like_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device whose kernel multiplies blocks: one operator a product, here its reference."""
    monkeypatch.setattr(precision.float8, "has_triton", lambda device_type: True)
    config = dataclasses.replace(CONFIG, hidden_size=48, intermediate_size=64, head_dim=8)
    model = Decoder(config)
    options = ["--quantize.linear.float8.recipe_name=blockwise"]
    apply_float8(model, load_config(options))
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.recipe = dataclasses.replace(module.recipe, emulate=False)
    counts = {}
    for mode in (NONE, PER_OP):
        part = copy.deepcopy(model)
        apply_activation_checkpointing(part, mode=mode[0], selective_option=mode[1])
        counts[mode] = run_backward(part)[SCALED_MATMUL]
    # The last of the seven too: it keeps its input only when it is done.
    assert counts == {NONE: 4 * 14, PER_OP: 4 * (14 + 4)}


def kept_per_op(trainer: RecordingTrainer) -> int:
    """Bytes that a forward of one row leaves alive on this rank."""
    (part,) = trainer.model.parts
    row = torch.arange(SEQ)[None]
    with LiveBytes() as live:
        loss = part(row, labels=row)[0]
    assert loss.requires_grad
    return live.num_bytes


def kept_under(method: str) -> list[int]:
    options = {
        "parallelism.context_parallel_method": method,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    }
    return run(Mesh(cp=2), options, act=kept_per_op).returned


def test_attention_in_pieces_is_not_kept_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ulysses the one result is kept; ring and allgather have several of its size."""
    whole = kept_under("ulysses")
    for method in ("ring", "allgather"):
        pieces = kept_under(method)
        assert all(own < other for own, other in zip(pieces, whole, strict=True)), method
    choose = activation.selective_contexts
    monkeypatch.setattr(activation, "selective_contexts", lambda keep_attention: choose())
    assert all(own > other for own, other in zip(kept_under("ring"), whole, strict=True))


def test_of_each_operator_a_layer_in_full_repeats_its_forward_and_no_more() -> None:
    """All but what nothing in backward reads: down_proj, and the residual that it is added to."""
    plain = make(NONE, 1)
    x = torch.randn(BATCH, SEQ, CONFIG.hidden_size, requires_grad=True)
    layer, context = plain.layers["0"], plain._context(torch.arange(SEQ)[None], None, None)
    with OperatorCounter() as forward:
        layer(x, context)
    again = run_backward(make(FULL))
    again.subtract(run_backward(make(NONE)))
    skipped = Counter({MATMUL: 1, torch.ops.aten.add.Tensor: 1})
    for operator, count in forward.counts.items():
        if operator not in VIEWS:
            assert again[operator] == 4 * (count - skipped[operator]), operator
    assert {op for op, count in again.items() if count > 0} <= set(forward.counts) | VIEWS


# --- a mixture of experts ---------------------------------------------------------------------

# Of a layer's q k v o, router, gate up down of the experts every second is kept: not the experts'
# up. Recomputation goes on to the last of them, which the weights of the router multiply.
EXPERTS_AGAIN = {NONE: 0, FULL: 4 * 3, EVERY_2ND: 2 * 3, EVERY_3RD: 2 * 3, PER_OP: 4 * 1}


def make_mixture(mode: tuple[str, str]) -> tuple[Decoder, list[Router]]:
    model = make(mode, num_experts=6, moe_intermediate_size=16)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for parameter in model.parameters():
        if parameter.dim() == 3:
            torch.nn.init.normal_(parameter, std=0.02)
    for router in routers:
        torch.nn.init.normal_(router.weight)
        router.balance.z_weight = 0.1
    return model, routers


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_a_router_counts_each_token_once_and_goes_on_counting(mode: tuple[str, str]) -> None:
    model, routers = make_mixture(mode)
    for counting in (True, False, True):
        for router in routers:
            router.is_counting = counting
            router.counts.zero_()
            router.losses.zero_()
        loss = model(_tokens(), labels=_tokens())[0]
        counted = [(router.counts.clone(), router.losses.clone()) for router in routers]
        loss.backward()
        for router, (counts, losses) in zip(routers, counted, strict=True):
            assert int(counts.sum()) == counting * TOKENS * model.config.num_experts_per_tok
            assert torch.equal(router.counts, counts) and torch.equal(router.losses, losses)
            assert router.is_counting == counting


def test_a_router_that_counts_while_computed_again_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "_ComputedAgain", lambda layer, context: context)
    with pytest.raises(AssertionError):
        test_a_router_counts_each_token_once_and_goes_on_counting(PER_OP)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_the_products_of_experts_are_matmuls_like_any(mode: tuple[str, str]) -> None:
    plain, _ = make_mixture(NONE)
    model, _ = make_mixture(mode)
    run_backward(plain)
    assert run_backward(model)[OF_EXPERTS] == 4 * 6 + EXPERTS_AGAIN[mode]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


# --- what is kept -----------------------------------------------------------------------------


def test_a_recomputed_layer_keeps_its_input_alone() -> None:
    one_more = bytes_kept(FULL, 4) - bytes_kept(FULL, 3)
    assert one_more == TOKENS * CONFIG.hidden_size * FLOAT


def test_per_op_a_layer_keeps_its_input_attention_and_every_second_matmul() -> None:
    q_width = CONFIG.num_attention_heads * CONFIG.head_dim
    kv_width = CONFIG.num_key_value_heads * CONFIG.head_dim
    kept = {
        "input": CONFIG.hidden_size,
        "k_proj": kv_width,
        "attention": q_width + CONFIG.num_attention_heads,  # and its logsumexp
        "o_proj": CONFIG.hidden_size,
        "up_proj": CONFIG.intermediate_size,
    }
    one_more = bytes_kept(PER_OP, 4) - bytes_kept(PER_OP, 3)
    assert one_more == TOKENS * sum(kept.values()) * FLOAT


def test_the_more_is_computed_again_the_less_is_kept() -> None:
    kept = [bytes_kept(mode) for mode in (NONE, EVERY_2ND, PER_OP, FULL)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


# --- what does not change ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_names_and_gradients_are_those_of_the_plain_model(mode: tuple[str, str]) -> None:
    plain, wrapped = make(NONE), make(mode)
    run_backward(plain)
    run_backward(wrapped)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    expected = dict(plain.named_parameters())
    assert [name for name, _ in wrapped.named_parameters()] == list(expected)
    for name, parameter in wrapped.named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        assert ours is not None and theirs is not None
        assert torch.equal(ours, theirs), name


# What else a layer may be: each has operators of its own, some of them with randomness.
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "dropout": {"residual_dropout": 0.1, "attention_dropout": 0.1},
    "latent": {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 6, "v_head_dim": 10,
               "num_key_value_heads": 8},
    "state_space": {"layer_type": "state_space", "intermediate_size": 80, "state_size": 4,
                    "time_step_rank": 3, "conv_kernel": 4},
}  # fmt: skip


def gradients(mode: tuple[str, str], kind: str) -> list[Tensor]:
    model = make(mode, 2, **KINDS[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        if kind == "bfloat16":
            parameter.data = parameter.data.bfloat16()
    keys = sample_keys(0, 0, BATCH, torch.device("cpu"))
    loss = model(_tokens(), labels=_tokens(), keys=keys)[0]
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_mode_gives_the_bits_of_none_for_each_kind_of_layer(kind: str) -> None:
    expected = gradients(NONE, kind)
    for mode in MODES[1:]:
        for ours, theirs in zip(gradients(mode, kind), expected, strict=True):
            assert torch.equal(ours, theirs), mode
