"""All that differs between an accelerator and a CPU.

The same program trains on a GPU cluster and on a laptop. What is not the same there (the name of
the collective backend, where memory is counted, which peak a device can reach) is asked from
this file, so that no other file needs an `if` about the device. Apart from `ops/`, this is the
only file that names cuda; ROCm devices go by that name in torch too.

    question              accelerator                        CPU
    collectives           nccl, xccl                         gloo
    memory_gib            peak of torch's allocator          peak resident size of the process
    peak_flops            a table of data sheets             None: then no MFU is shown
    memory history        recorded, dumped as a pickle       none

Proven in tests/test_device.py.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import random
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

GIB = 1024**3
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # environment: a CPU alone
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETS_TRITON = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch


def let_blocks_grow() -> None:
    """Ask the allocator for blocks that grow, unless the user asked it for something.

    Sizes differ from step to step (the tokens of an expert), and those of building from those of
    training: such blocks leave no holes. Torch reads it when a device is first asked for anything.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


let_blocks_grow()


def device_type() -> str:
    """The kind of device that this process trains on: "cuda", another accelerator's, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # mps is passed over: its collectives are gloo's, which reads host memory only.
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def local_device(local_rank: int) -> torch.device:
    """The device of the machine's `local_rank`-th process; raises ValueError if there is none."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no device: this machine has {count} of type {kind}; "
            f"start at most {count} processes on it (torchrun --nproc_per_node {count})"
        )
    return torch.device(kind, local_rank)


def set_device(device: torch.device) -> None:
    """Make `device` the current one of this process."""
    torch.get_device_module(device).set_device(device)


def device_of_this_thread() -> Callable[[], None]:
    """What a new thread is to call first, to work on the same device as the one that asks.

    CUDA begins each thread on device 0 and, for anything it does, opens a context there.
    """
    if device_type() == "cpu":
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait for all work queued on the current device; on CPU nothing is ever queued."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def device_name() -> str:
    """The name that `peak_flops` looks up, for example "NVIDIA H100 80GB HBM3"."""
    kind = device_type()
    if kind == "cpu":
        return platform.processor() or platform.machine() or "cpu"
    return str(torch.get_device_module(kind).get_device_name())


def names_of_all_ranks() -> list[str]:
    """What the ranks' devices are called, each name once; a collective of the world.

    CUDA draws a tensor's numbers by as many threads as a device runs at once, so one seed gives
    different numbers on different devices.
    """
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, device_name())
    return sorted(set(names))


def backend(device_type: str, *, cpu_offload: bool = False) -> str:
    """The collective backend(s) for `init_process_group`.

    With `cpu_offload` gradients are reduced and clipped where they lie, in host memory, so the
    group needs gloo beside the device's own backend.
    """
    name = str(dist.get_default_backend_for_device(device_type))
    if device_type == "cpu" or not cpu_offload:
        return name
    return f"cpu:gloo,{device_type}:{name}"


def grouped_kernel_dtypes(device_type: str) -> tuple[str, ...]:
    """The dtypes in which torch has one kernel for the products of many experts.

    It wants rows that begin at multiples of 16 bytes (ops/grouped.py).
    """
    if device_type == "cpu":
        return ("bfloat16", "float32")
    if device_type == "cuda" and torch.cuda.get_device_capability() >= (9, 0):
        return ("bfloat16",)
    return ()


def attention_dtypes(device_type: str, backend: str) -> tuple[str, ...]:
    """The dtypes in which an attention backend other than sdpa trains (models/backends.py)."""
    if backend == "flex":  # the CPU has a forward alone
        return ("bfloat16", "float32") if device_type in ("cuda", "xpu") else ()
    newer = device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    return ("bfloat16",) if newer else ()


def has_triton(device_type: str) -> bool:
    """Whether the kernels of ops/kernels.py run there: on NVIDIA's devices, or interpreted."""
    is_nvidia = device_type == "cuda" and not torch.version.hip
    return INTERPRETS_TRITON or (HAS_TRITON and is_nvidia)


def has_float8(device_type: str) -> bool:
    """Whether there are instructions for torch's float8 formats; AMD's devices have others."""
    if device_type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def float8_recipes(device_type: str, dtype: str) -> tuple[str, ...]:
    """The recipes of precision/float8.py whose products, in `dtype`, have a kernel."""
    if device_type == "cpu":
        return ("tensorwise", "rowwise") if torch.__version__ >= "2.13" else ("tensorwise",)
    if not has_float8(device_type):
        return ()
    known = ("tensorwise", "rowwise") if dtype == "bfloat16" else ("tensorwise",)
    return (*known, "blockwise") if has_triton(device_type) else known


# --- memory -----------------------------------------------------------------------------------


def memory_gib() -> float:
    """Peak memory of this rank since it started, in GiB.

    On an accelerator what torch's allocator reserved at most, which is what an out-of-memory error
    is about; on CPU the resident size of the process.
    """
    if device_type() != "cpu":
        return torch.accelerator.max_memory_reserved() / GIB
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return peak_rss * bytes_per_unit / GIB


def supports_memory_history() -> bool:
    """Whether `record_memory_history` works here: the CPU's allocator keeps none."""
    return device_type() == "cuda"


def record_memory_history(max_entries: int | None) -> None:
    """Keep the last `max_entries` allocations and frees with their stacks; None stops it."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: str) -> None:
    """Write the recorded history as a pickle that https://pytorch.org/memory_viz draws."""
    torch.cuda.memory._dump_snapshot(path)


# --- peak FLOPs -------------------------------------------------------------------------------

# Dense bf16 matrix FLOP/s from the makers' data sheets (which often print twice as much: with
# 2:4 sparsity). The whole name must match: a MIG slice ("... MIG 1g.10gb"), a virtual GPU
# ("... A100-40C") and a laptop part carry a big sibling's name and reach a fraction of its peak.
_PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    (r"NVIDIA B200", 2250e12),
    (r"NVIDIA H200", 989.4e12),
    (r"NVIDIA H200 NVL", 835.5e12),
    (r"NVIDIA GH200( \d+GB?( HBM3e?)?)?", 989.4e12),
    (r"NVIDIA H(100|800)( SXM5)?( \d+GB)?( HBM3)?", 989.4e12),
    (r"NVIDIA H(100|800) PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835.5e12),
    (r"NVIDIA H20", 148e12),
    (r"(NVIDIA )?A[18]00-(SXM4|SXM|PCIE)-\d+GB", 312e12),
    (r"(NVIDIA )?A[18]00 \d+GB PCIe", 312e12),
    (r"NVIDIA L40S", 362.05e12),
    (r"AMD Instinct MI355X", 2516.6e12),
    (r"AMD Instinct MI3(00|25)X", 1307.4e12),
    (r"AMD Instinct MI250X", 191.5e12),  # torch sees each of its two dies as a device
)


def peak_flops(device_name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Peak dense matrix FLOP/s of one device in `dtype`; None where it is not known.

    Half precision only: what a device reaches in fp32 depends on whether TF32 is allowed. None
    is never replaced by a likely number, because an MFU against the wrong peak looks right.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    for pattern, peak in _PEAK_BF16_FLOPS:
        if re.fullmatch(pattern, device_name):
            return peak
    return None


# --- randomness, determinism, garbage ----------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed the default generators of Python and of torch on every device of this process."""
    random.seed(seed)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Make equal runs bitwise equal, at a cost in speed; call it before the first operator.

    Operators without a deterministic form raise from then on, instead of differing silently.
    """
    # Read by cuBLAS when its handle is made: a workspace of fixed size gives one reduction order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # benchmarking may choose another kernel each run


class GarbageCollection:
    """Python's garbage collector on a fixed beat, the same on every rank.

    Left alone, each rank collects at a moment of its own and all others wait for it in the next
    collective. Here automatic collection is off and every `freq`-th step collects the young
    generations (1), which is short; what was built before training is collected once, fully.

        with GarbageCollection(50) as garbage:
            for step in steps:
                garbage.step(step)
    """

    def __init__(self, freq: int) -> None:
        assert freq > 0, freq
        self.freq = freq
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def step(self, step: int) -> None:
        """Collect if `step` is a multiple of the frequency."""
        if step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        """Give automatic collection back."""
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> GarbageCollection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
