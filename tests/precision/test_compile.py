"""Compiled float8 linears are the eager ones: the real Trainer, as in tests/parity/test_compile.py.

The graphs run the operators of eager code, so a number on the edge between two of float8 falls to
the same side: several steps can be held against each other.
"""

from __future__ import annotations

import pytest

from tests.parity.harness import Mesh, assert_equal, run
from tests.parity.test_compile import COMPILED, CountingTrainer
from tests.precision.test_meshes import WIDE, options

SLOW = pytest.mark.slow
LAYERS = {**COMPILED, "compile.components": ["model"], "training.steps": 2}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("rowwise", Mesh()),
        pytest.param("tensorwise", Mesh(), marks=SLOW),
        pytest.param("blockwise", Mesh(), marks=SLOW),
        pytest.param("rowwise", Mesh(tp=2), marks=SLOW),
    ],
    ids=str,
)
def test_compiled_equals_eager(name: str, mesh: Mesh) -> None:
    eager = run(mesh, {**options(name), "training.steps": 2}, WIDE)
    ours = run(mesh, {**options(name), **LAYERS}, WIDE, trainer=CountingTrainer, timeout=300.0,
               act=CountingTrainer.train)  # fmt: skip
    assert_equal(ours, eager)
    for graphs, eager_pieces in ours.returned:
        assert eager_pieces == []
        assert graphs[0] > 0 and set(graphs) == {graphs[0]}, graphs
