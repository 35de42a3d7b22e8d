"""What a mixture of experts costs on CPU: its kernels, and the bytes that its ranks exchange.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_moe.py --rounds 9
    PYTHONPATH=. torchrun --standalone --nproc_per_node 4 scripts/bench_moe.py

One process compares one grouped kernel for all experts with a loop over them, in turns. A layer of
experts with random weights sees the same rows, forward and backward, with either kernel; a row
goes to `--top_k` experts. The weights of all layers are of one size, so that more experts are
narrower ones. Both must give the same result. Printed is CPU time a token (time.process_time), the
median of the rounds, and the median of the rounds' ratios, so that a busy machine tells the same
as a quiet one.

Several ranks share out the experts of each layer, and print what all of them hand to an exchange,
counts included, over the least there is: each row once each way, in forward and in backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.launch import process_group, world_size
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.moe import MoE
from torchtitan_lite.parallel.expert import apply_expert_parallel

KERNELS = ("grouped", "loop")
TOTAL_WIDTH = 4096  # of the experts of a layer together


def make_layer(num_experts: int, top_k: int, hidden_size: int, dtype: torch.dtype) -> MoE:
    config = ModelConfig(
        hidden_size=hidden_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=TOTAL_WIDTH // num_experts,
    )
    layer = MoE(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=hidden_size**-0.5)
    return layer


def step(layer: MoE, x: Tensor, kernel: str) -> tuple[float, Tensor]:
    """CPU seconds of forward and backward, and the gradient of the weights that the rows meet."""
    layer.experts.kernel = kernel
    layer.zero_grad()
    begin = time.process_time()
    layer(x).square().mean().backward()
    seconds = time.process_time() - begin
    grad = layer.experts.gate_proj.grad
    assert grad is not None
    return seconds, grad


class Exchanged(TorchDispatchMode):
    """Bytes that this rank hands over, to itself included."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all" in func._schema.name:
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def print_exchanges(options: argparse.Namespace) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        if dist.get_rank() == 0:
            print("dtype     experts   bytes a token, forward     backward   over the least")
        for dtype in (torch.float32, torch.bfloat16):
            for num_experts in (8, 64):
                layer = make_layer(num_experts, options.top_k, options.hidden_size, dtype)
                apply_expert_parallel(layer, mesh)
                x = torch.randn(1, options.tokens, options.hidden_size, dtype=dtype)
                with Exchanged() as forward:
                    out = layer(x.requires_grad_())
                with Exchanged() as backward:
                    out.square().mean().backward()
                total = torch.tensor([forward.bytes, backward.bytes], dtype=torch.float64)
                dist.all_reduce(total)
                there, back = (total / dist.get_world_size() / options.tokens).tolist()
                least = 2 * options.top_k * options.hidden_size * dtype.itemsize
                if dist.get_rank() == 0:
                    name = str(dtype).removeprefix("torch.")
                    print(
                        f"{name:9} {num_experts:7} {there:24.1f} {back:12.1f} "
                        f"{there / least:9.4f} {back / least:6.4f}"
                    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="after one that warms up")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--top_k", type=int, default=2)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    if world_size() > 1:
        print_exchanges(options)
        return 0
    print(
        f"{options.tokens} tokens of {options.hidden_size}, each to {options.top_k} experts, "
        f"{torch.get_num_threads()} thread(s)"
    )
    print("dtype     experts  width   grouped, us a token     loop    grouped / loop")
    for dtype in (torch.float32, torch.bfloat16):
        for num_experts in (8, 64):
            layer = make_layer(num_experts, options.top_k, options.hidden_size, dtype)
            x = torch.randn(1, options.tokens, options.hidden_size, dtype=dtype)
            taken: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
            grads: dict[str, Tensor] = {}
            for _ in range(options.rounds + 1):
                for kernel in KERNELS:
                    seconds, grads[kernel] = step(layer, x, kernel)
                    taken[kernel].append(seconds)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            difference = (grads["grouped"] - grads["loop"]).float().norm()
            assert difference < tolerance * grads["loop"].float().norm()
            grouped, loop = (taken[kernel][1:] for kernel in KERNELS)
            ratio = statistics.median(a / b for a, b in zip(grouped, loop, strict=True))
            us = [statistics.median(times) / options.tokens * 1e6 for times in (grouped, loop)]
            name = str(dtype).removeprefix("torch.")
            print(
                f"{name:9} {num_experts:7} {TOTAL_WIDTH // num_experts:6} {us[0]:21.1f} "
                f"{us[1]:8.1f} {ratio:17.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
