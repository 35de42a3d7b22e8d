"""Context parallelism, counted: bytes, FLOPs and memory of each method; and CPU time, measured.

    PYTHONPATH=. python scripts/bench_context.py                    counts, of every rank, exactly
    PYTHONPATH=. python scripts/bench_context.py --dry_run          8B shapes, 131072 tokens, cp 8
    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc_per_node 4 scripts/bench_context.py    CPU time

Counts come from the operators that forward and backward of a model dispatch, on fake tensors and
under a process group that moves nothing, so any size fits. Bytes are those that a rank sends: a
gather sends what a rank has to all others, a reduce-scatter and an all-to-all send all but its own
part. The minimum beside them is the arithmetic of parallel/exchange.py. FLOPs are those of the
attention kernels, two a multiplication, half of them where a kernel is causal. Memory is the
largest sum of live storages that operators made: activations and what is computed on the way;
weights and their gradients, which FSDP shards, are left out.

CPU time is that of all ranks (time.process_time), the methods in turns, the median of the rounds;
each round's share of one rank that does all the work stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.observe.live_storage import LiveStorage
from torchtitan_lite.parallel.chunks import Order
from torchtitan_lite.parallel.context import apply_context_parallel
from torchtitan_lite.parallel.exchange import METHODS

SMALL = ModelConfig(
    vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=16, num_key_value_heads=4, head_dim=16, max_position_embeddings=4096,
)  # fmt: skip
LARGE = ModelConfig(  # an 8B Llama's layers; a small vocabulary, as the loss is not what is counted
    vocab_size=256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
)  # fmt: skip
ATTENTION = "_scaled_dot_product"


class Count(LiveStorage):
    """Bytes sent and FLOPs of attention, and the live storages of what operators made."""

    def __init__(self, ranks: int, own: list[Tensor]) -> None:
        super().__init__(left_out=own)
        self.ranks = ranks
        self.sent: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_bytes(name, args[0])
        elif name.startswith(ATTENTION):
            self._count_flops(name, args)
        return out

    def _count_bytes(self, name: str, value: Any) -> None:
        tensors = value if isinstance(value, list) else [value]
        size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        if name == "all_gather_into_tensor":
            self.sent["gather"] += size * (self.ranks - 1)
        elif name == "send":
            self.sent["ring"] += size
        elif name in ("reduce_scatter_tensor", "all_to_all_single"):
            self.sent[name.split("_")[0]] += size * (self.ranks - 1) // self.ranks

    def _count_flops(self, name: str, args: Any) -> None:
        backward = "backward" in name
        q, k = args[1:3] if backward else args[:2]
        causal = args[7 if backward else 4] if len(args) > (7 if backward else 4) else False
        batch, heads, queries, width = q.shape
        products = 5 if backward else 2  # q k^T, p v; and their gradients, q k^T once more
        flops = products * 2 * batch * heads * queries * k.shape[2] * width
        self.flops += flops // 2 if causal else flops


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[DeviceMesh]:
    """Be `rank` of `size`, whose collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    finally:
        dist.destroy_process_group()


def count(
    config: ModelConfig, seq_len: int, rank: int, size: int, method: str, *, balanced: bool
) -> Count:
    """Forward and backward of a row, as one rank of `size` sees it."""
    with fake_ranks(rank, size) as mesh, FakeTensorMode():
        model = Decoder(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        if size > 1:
            apply_context_parallel(model, mesh, order=Order(size, balanced), method=method)
        model.lm_head.token_loss.num_chunks = 8  # type: ignore[union-attr]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        held = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        with Count(size, held) as counted:
            model(tokens, labels=tokens)[0].backward()
    return counted


def minimum(config: ModelConfig, seq_len: int, size: int, method: str) -> int:
    """Bytes that a layer must send, as parallel/exchange.py counts them."""
    tokens = seq_len // size
    kv = 2 * config.num_key_value_heads * config.head_dim
    q = config.num_attention_heads * config.head_dim
    if method == "ulysses":
        return 2 * (size - 1) * tokens * (2 * q + kv) * 2 // size
    return (size - 1) * tokens * kv * (2 + 2 + 4)


def print_counts(config: ModelConfig, seq_len: int, sizes: list[int]) -> None:
    whole = count(config, seq_len, 0, 1, "", balanced=True)
    layers = config.num_hidden_layers
    print(f"{layers} layers, {seq_len} tokens, bf16; one rank: {whole.peak / 2**20:.1f} MiB")
    print("cp  method     order     KiB sent a layer  / minimum   FLOPs, share of one rank x cp"
          "   peak memory x cp / one rank")  # fmt: skip
    for size in sizes:
        for method in METHODS:
            for balanced in (True, False):
                ranks = [0, size - 1] if size > 4 else range(size)
                found = [
                    count(config, seq_len, rank, size, method, balanced=balanced) for rank in ranks
                ]
                sent = max(sum(one.sent.values()) for one in found) / layers
                shares = [one.flops * size / whole.flops for one in found]
                memory = [one.peak * size / whole.peak for one in found]
                order = "balanced" if balanced else "plain"
                print(
                    f"{size:2}  {method:9}  {order:8} {sent / 2**10:17.1f}"
                    f"  {sent / minimum(config, seq_len, size, method):9.3f}"
                    f"   {min(shares):.3f} to {max(shares):.3f} {max(memory):36.3f}"
                )


def measure(options: argparse.Namespace) -> None:
    """CPU seconds of all ranks for a forward and backward, the methods in turns."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    tokens = torch.randint(SMALL.vocab_size, (1, options.tokens))
    models = {}
    for method in ("alone", *METHODS):
        torch.manual_seed(0)
        models[method] = Decoder(SMALL)
        if method != "alone":
            apply_context_parallel(models[method], mesh, order=Order(size), method=method)
    taken: dict[str, list[float]] = {method: [] for method in models}
    for _ in range(options.rounds + 1):
        for method, model in models.items():
            dist.barrier()
            begin = time.process_time()
            if method != "alone" or dist.get_rank() == 0:
                model(tokens, labels=tokens)[0].backward()
            seconds = torch.tensor(time.process_time() - begin)
            dist.all_reduce(seconds)
            taken[method].append(seconds.item())
    if dist.get_rank() == 0:
        print(f"{options.tokens} tokens on {size} ranks, CPU ms of all ranks; x alone")
        for method, times in taken.items():
            pairs = zip(times[1:], taken["alone"][1:], strict=True)
            ratio = statistics.median(ours / alone for ours, alone in pairs)
            print(f"{method:10} {statistics.median(times[1:]) * 1e3:9.1f} {ratio:7.3f}")
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of CPU time, after one to warm up")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dry_run", action="store_true", help="8B shapes, 131072 tokens, cp 8")
    options = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        measure(options)
    elif options.dry_run:
        print_counts(LARGE, LARGE.max_position_embeddings, [8])
    else:
        print_counts(SMALL, options.tokens, [2, 4])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
