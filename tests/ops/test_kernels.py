"""Kernels are what their references are, compile for devices, and serve nowhere else.

No device is needed: Triton interprets kernels on a CPU (kernel_claims.py), and its compiler makes
machine code for devices that are not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_lite import device
from torchtitan_lite.ops import float8, permute
from torchtitan_lite.precision.float8 import E4M3, E5M2, cast, multiply

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(not device.HAS_TRITON, reason="Triton is not there")


def child(*arguments: str, **variables: str) -> str:
    """What Python prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_in_the_interpreter_each_kernel_is_its_reference() -> None:
    run = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/ops/kernel_claims.py")
    summary = child(*run, TRITON_INTERPRET="1").splitlines()[-1]
    assert re.match(r"\d\d passed", summary) and "skipped" not in summary, summary


# --- machine code -------------------------------------------------------------------------------

# A device that is not there: Triton compiles for it what a launch would run, and nothing runs.
COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from torchtitan_lite.ops import kernels

class Absent:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

def compile_only(kernel, *args, grid, warmup, **options):
    made = run(kernel, *args, grid=grid, warmup=True, **options)
    assert made.asm["cubin"]
    print(f"{kernel.__name__} shared={made.metadata.shared}", made.asm["ptx"].replace("\\n", " "))

run, JITFunction.run = JITFunction.run, compile_only
driver.set_active(Absent())
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
many = len(sys.argv) > 2
for x in [torch.ones(131, 257, dtype=torch.bfloat16)] + many * [torch.ones(256, 256).t()]:
    for block in kernels.TILES:
        for pow2 in (True, False)[: 1 + many]:
            kernels.cast_blocks(x, E4M3, block, powers_of_two=pow2, smallest_amax=1e-12, amax=None)
given = {"amax": torch.tensor(1.0), "powers_of_two": False, "smallest_amax": 1e-12}
kernels.cast_blocks(x, E5M2, (0, 0), **given)
for k, height in [(300, 1), (256, 128)][1 - many:]:
    a, b, scale = torch.ones(70, k).to(E4M3), torch.ones(256, k).to(E4M3), torch.ones(256, 3)
    for dtype in (torch.bfloat16, torch.float32)[: 1 + many]:
        kernels.scaled_matmul(a, scale, b, scale, height=height, dtype=dtype)
order = torch.arange(4)
for dtype, width in [(torch.bfloat16, 64), (torch.float32, 37)][: 1 + many]:
    x, weights = torch.ones(4, width, dtype=dtype), torch.ones(2, 2, dtype=dtype)
    for maybe in (None, weights):
        kernels.gather(x, order, 2, maybe)
        kernels.combine(x, order.view(2, 2), maybe)
    kernels.dot_rows(x, x, order.view(2, 2))
"""


def compiled(tmp_path: Path, capability: int, *arguments: str) -> dict[str, str]:
    """Kernel -> the assembly of all that is compiled of it."""
    printed = child("-c", COMPILE, str(capability), *arguments, TRITON_CACHE_DIR=str(tmp_path))
    assembly: dict[str, str] = {}
    for line in printed.splitlines():
        name = line.split()[0]
        assembly[name] = assembly.get(name, "") + line
    assert len(assembly) == 6, "each kernel"
    for shared in re.findall(r"shared=(\d+)", printed):
        assert int(shared) < 99 * 1024, "what the smallest of these devices gives a program"
    return assembly


def assert_exact(assembly: dict[str, str], product: str) -> None:
    """Quotients are rounded as IEEE says, and products of float8 are the device's."""
    assert "div.rn.f32" in assembly["_cast_kernel"]
    for ptx in assembly.values():
        assert not re.search(r"div\.(full|approx)|\.ftz|rcp\.", ptx)
    assert re.search(product, assembly["_scaled_matmul_kernel"])


@needs_triton
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    assert_exact(compiled(tmp_path, 90), r"wgmma\.mma_async\S*e4m3\.e4m3")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "product"),
    [
        (89, r"mma\.sync\S*e4m3\.e4m3"),
        (90, r"wgmma\.mma_async\S*e4m3\.e4m3"),
        (100, r"tcgen05\.mma\S*f8f6f4"),
        (120, r"mma\.sync\S*e4m3\.e4m3"),
    ],
)
def test_kernels_of_all_options_compile_for_each_device_with_float8(
    tmp_path: Path, capability: int, product: str
) -> None:
    assert_exact(compiled(tmp_path, capability, "all options"), product)


# --- where they serve -----------------------------------------------------------------------------

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from torchtitan_lite import device
from torchtitan_lite.models import decoder
from torchtitan_lite.ops import permute
from torchtitan_lite.precision import linear
from torchtitan_lite.precision.float8 import E4M3, cast, multiply

assert not device.HAS_TRITON and not device.has_triton("cuda")
device.has_float8 = lambda kind: True
assert device.float8_recipes("cuda", "bfloat16") == ("tensorwise", "rowwise")
a = cast(torch.ones(3, 200), E4M3, (1, 128), powers_of_two=True)
assert torch.equal(multiply(a, a, dtype=torch.float32, emulate=True), torch.full((3, 3), 200.0))
x = torch.ones(2, 8, requires_grad=True)
rows = permute.gather_rows(x, torch.tensor([1, 0, 3, 2]), 2)
permute.combine_rows(rows, torch.tensor([1, 0, 3, 2]), torch.ones(2, 2)).sum().backward()
assert torch.equal(x.grad, torch.full((2, 8), 2.0))
print("served")
"""


def test_without_triton_the_references_serve() -> None:
    assert child("-c", WITHOUT_TRITON) == "served\n"


def test_which_devices_multiply_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(device, "HAS_TRITON", True)
    assert device.float8_recipes("cuda", "bfloat16") == ("tensorwise", "rowwise", "blockwise")
    assert device.float8_recipes("cuda", "float32") == ("tensorwise", "blockwise")
    assert device.float8_recipes("cpu", "float32") == ("tensorwise", "rowwise")
    capability = (8, 0)
    assert device.float8_recipes("cuda", "bfloat16") == ()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    capability = (9, 4)
    assert device.float8_recipes("cuda", "bfloat16") == () and not device.has_triton("cuda")


def calls(x: Tensor, order: Tensor, weights: Tensor) -> dict[str, Callable[[], Tensor]]:
    """x: (6, 200), order: (6,), weights: (3, 2); each call goes through what models call."""
    pieces = cast(x, E4M3, (1, 128), powers_of_two=True)
    square = cast(x, E4M3, (128, 128), powers_of_two=True)
    return {
        "cast_blocks": lambda: cast(x.t(), E5M2, (1, 0), powers_of_two=False).values,
        "scaled_matmul": lambda: multiply(pieces, square, dtype=torch.bfloat16, emulate=False),
        "gather": lambda: permute.gather_rows(x.narrow(0, 0, 3), order, 2),
        "combine": lambda: permute.combine_rows(x, order, weights),
    }


@needs_triton
def test_on_a_fake_device_operators_have_the_references_shapes_and_dtypes() -> None:
    with FakeTensorMode():
        # Without gradients, for which torch looks for the device.
        x, weights = torch.ones(6, 200, device="cuda"), torch.ones(3, 2, device="cuda")
        order = torch.arange(6, device="cuda")
        found = {name: call() for name, call in calls(x, order, weights).items()}
        assert {str(t.device) for t in found.values()} <= {"cuda", "cuda:0"}
        assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
            "cast_blocks": (E5M2, (200, 6)),
            "scaled_matmul": (torch.bfloat16, (6, 6)),
            "gather": (torch.float32, (6, 200)),
            "combine": (torch.float32, (3, 200)),
        }
        for block, shape in {
            (0, 0): (1, 1),
            (1, 0): (6, 1),
            (1, 128): (6, 2),
            (128, 128): (1, 2),
        }.items():
            scaled = cast(x, E4M3, block, powers_of_two=True)
            assert (scaled.scale.shape, scaled.values.shape) == (shape, x.shape)


@pytest.mark.parametrize("name", ["cast_blocks", "gather", "combine"])
def test_on_a_cpu_compiled_code_sees_the_reference(name: str) -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x, order = torch.randn(6, 200), torch.tensor([1, 2, 0, 4, 3, 5])
    weights = torch.rand(3, 2)

    def run(x: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        if name == "cast_blocks":
            return cast(x, E4M3, (1, 128), powers_of_two=True).high()
        if name == "gather":
            return permute.gather_rows(x[:3], order, 2)
        return permute.combine_rows(x, order, weights)

    compiled = torch.compile(run, fullgraph=True, backend=record)
    assert torch.equal(compiled(x, order, weights), run(x, order, weights))
    assert seen and not any("torchtitan_lite" in target for target in seen)


def test_references_are_the_plain_expressions() -> None:
    x, order = torch.randn(3, 8), torch.tensor([1, 2, 0, 4, 3, 5])
    rows, weights = torch.randn(6, 8), torch.rand(3, 2)
    assert torch.equal(permute.gather_rows(x, order, 2), x[order // 2])
    expected = torch.zeros(3, 8)
    for row, pair in zip(rows, order.tolist(), strict=True):
        expected[pair // 2] += weights[pair // 2, pair % 2] * row
    torch.testing.assert_close(permute.combine_rows(rows, order, weights), expected)
    values, scale = float8.cast_blocks(x, E4M3, (1, 0), powers_of_two=False)
    assert torch.equal(scale[:, 0], (448 / x.double().abs().amax(1)).float().reciprocal())
    assert torch.equal(values.float(), (x / scale).to(E4M3).float())
