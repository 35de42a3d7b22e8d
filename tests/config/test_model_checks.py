"""What must hold between a configuration and its model, or the weights that it begins with."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.config.cases import Shape, degrees, problems, warnings
from torchtitan_lite import device
from torchtitan_lite.device import device_type
from torchtitan_lite.ops.grouped import best_kernel

STATE_SPACE = Shape(layer_type="state_space", max_position_embeddings=1024)
LEARNED = Shape(learned_positions=True, max_position_embeddings=1024)
VALIDATION = ["--validation.enable", "--validation.dataset=synthetic"]


def test_a_state_space_model_is_not_cut_over_tensor_parallel_ranks() -> None:
    (line,) = problems(degrees(tp=2), world=2, shape=STATE_SPACE)
    assert line.startswith("parallelism.tensor_parallel_degree = 2")
    assert "a state-space layer cannot be cut over 2 ranks" in line
    assert problems(degrees(pp=2), world=2, shape=STATE_SPACE) == []


def test_a_row_is_no_longer_than_the_positions_that_are_learned() -> None:
    argv = [*VALIDATION, "--training.seq_len=1024", "--validation.seq_len=1025"]
    (line,) = problems(argv, shape=LEARNED)
    assert line.startswith("validation.seq_len = 1025")
    assert "an embedding for 1024 positions" in line
    assert problems(argv[2:3], shape=LEARNED) == []
    (line,) = problems(["--training.seq_len=1025"], shape=LEARNED)
    assert line.startswith("training.seq_len = 1025")
    assert problems(["--training.seq_len=1025"], shape=Shape()) == []


def test_a_state_space_model_extrapolates_no_position() -> None:
    long = ["--training.seq_len=1025"]
    assert warnings(long, shape=STATE_SPACE) == []
    (line,) = warnings(long, shape=Shape(max_position_embeddings=1024))
    assert "extrapolated" in line


def test_the_kind_of_folder_and_the_key_agree(tmp_path: Path) -> None:
    argv = ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}"]
    in_hf = [*argv, "--checkpoint.initial_load_in_hf"]
    (line,) = problems(in_hf)
    assert "there is no config.json in it" in line
    assert problems(argv) == []
    (tmp_path / "config.json").write_text("{}")
    assert problems(in_hf) == []
    (line,) = problems(argv)
    assert line.endswith("it is a Hugging Face folder; set checkpoint.initial_load_in_hf to true")
    (line,) = problems([*in_hf, "--checkpoint.no_initial_load_model_only"])
    assert line.startswith("checkpoint.initial_load_model_only = false")
    assert "holds weights alone" in line


EXPERTS = Shape(num_experts=8)


def test_experts_are_shared_among_ranks_that_divide_them() -> None:
    (line,) = problems(
        [*degrees(), "--parallelism.expert_parallel_degree=3"], world=6, shape=EXPERTS
    )
    assert line.startswith("parallelism.expert_parallel_degree = 3")
    assert line.endswith("3 does not divide the model's 8 experts; set it to 1 or 2")
    argv = [*degrees(pp=2, tp=2), "--parallelism.expert_parallel_degree=8"]
    (line,) = problems(argv, world=8, shape=EXPERTS)
    assert "dp_shard x cp x tp = 4 ranks, which 8 does not divide" in line
    assert line.endswith("set it to 1, 2 or 4")
    assert (
        problems([*argv[:-1], "--parallelism.expert_parallel_degree=4"], world=8, shape=EXPERTS)
        == []
    )
    (line,) = problems(["--parallelism.expert_parallel_degree=2"], world=2)
    assert "the model has no experts to share among 2 ranks" in line


@pytest.mark.skipif(device_type() != "cpu", reason="other devices have other kernels")
def test_a_grouped_kernel_that_is_asked_for_by_name_is_there() -> None:
    """As ops/grouped.py chooses; the widths that the message names pass, and so does loop."""
    argv, halves = ["--moe.kernel=grouped"], "--training.mixed_precision_param="
    passed = 0
    for dtype, hidden, width in itertools.product(("bfloat16", "float32"), (64, 68), (36, 34, 3)):
        shape = Shape(num_experts=4, hidden_size=hidden, moe_intermediate_size=width)
        lines = problems([*argv, halves + dtype], shape=shape)
        fits = best_kernel(torch.device("cpu"), getattr(torch, dtype), (hidden, width)) == "grouped"
        assert fits == (not lines)
        for line in lines:
            assert line.startswith('moe.kernel = "grouped" (from --moe.kernel): in ' + dtype)
        if len(lines) == 1 and "moe_intermediate_size is" in lines[0]:
            assert f"moe_intermediate_size is {width}; set it to loop or auto, or" in lines[0]
            for better in re.findall(r"\d+", lines[0].split("moe_intermediate_size to ")[1]):
                fixed = dataclasses.replace(shape, moe_intermediate_size=int(better))
                assert problems([*argv, halves + dtype], shape=fixed) == []
                passed += 1
        assert problems(["--moe.kernel=loop", halves + dtype], shape=shape) == []
    assert passed
    odd = Shape(num_experts=4, moe_intermediate_size=36)
    (line,) = problems(argv, shape=odd)
    assert line.endswith(
        "in bfloat16 it takes multiples of 8, and moe_intermediate_size is 36; set it to loop or "
        "auto, or moe_intermediate_size to 32 or 40"
    )
    assert problems(argv, shape=dataclasses.replace(odd, num_experts=0)) == []


def test_a_device_without_a_grouped_kernel_is_told_with_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "device_type", lambda: "xpu")
    (line,) = problems(["--moe.kernel=grouped"], shape=EXPERTS)
    assert line.endswith("there is no such kernel on xpu in bfloat16; set it to loop or auto")
    monkeypatch.setattr(device, "grouped_kernel_dtypes", lambda kind: ("bfloat16",))
    assert problems(["--moe.kernel=grouped"], shape=EXPERTS) == []
    single = "--training.mixed_precision_param=float32"
    (line,) = problems(["--moe.kernel=grouped", single], shape=EXPERTS)
    assert line.endswith("loop or auto, or training.mixed_precision_param to bfloat16")


def test_tensor_parallelism_asks_only_for_what_it_cuts() -> None:
    """Latent attention has no KV heads of its own; with experts in every layer there is no MLP."""
    latent = Shape(kv_lora_rank=16, num_key_value_heads=3)
    assert problems(degrees(tp=8), world=8, shape=latent) == []
    (line,) = problems(degrees(tp=8), world=8, shape=Shape(num_key_value_heads=3))
    assert "8 does not divide the model's num_key_value_heads 3;" in line
    mixture = Shape(num_experts=8, num_key_value_heads=8, intermediate_size=770)
    assert problems(degrees(tp=8), world=8, shape=mixture) == []
    one_dense = dataclasses.replace(mixture, first_k_dense_replace=1)
    for shape in (one_dense, dataclasses.replace(mixture, num_experts=0)):
        (line,) = problems(degrees(tp=8), world=8, shape=shape)
        assert "8 does not divide the model's intermediate_size 770;" in line
        assert line.endswith("degrees that divide all are 1 or 2")


def test_keys_of_experts_act_where_there_are_some() -> None:
    argv = ["--moe.aux_loss_weight=0.1", "--moe.aux_loss_form=global"]
    assert warnings(argv, shape=EXPERTS) == []
    assert len(warnings(argv)) == 2 and all("has no experts" in line for line in warnings(argv))
    (line,) = warnings(argv[1:], shape=EXPERTS)
    assert line.endswith("has no effect; moe.aux_loss_weight is 0.0")
    speed = ["--moe.bias_update_speed=0.01"]
    (line,) = warnings(speed, shape=EXPERTS)
    assert "routers have no bias" in line
    assert warnings(speed, shape=Shape(num_experts=8, router_bias=True)) == []


def test_tensor_parallel_ranks_share_the_experts() -> None:
    argv = [*degrees(tp=2), "--parallelism.zero_stage=1"]
    assert warnings(argv, world=2, shape=EXPERTS) == []
    (line,) = warnings(argv, world=2)
    assert "there is one rank to share" in line
