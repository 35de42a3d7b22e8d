"""The keys of products in fewer bits (precision/).

Sections as in keys.py, where all of them come together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchtitan_lite.config.bounds import Count


@dataclass
class Float8:
    """Linears of the layers that multiply numbers of eight bits (precision/float8.py)."""

    recipe_name: Literal["", "tensorwise", "rowwise", "blockwise"] = ""
    """Numbers that share a scale: all of a tensor, a row, or 1 x 128; "": no float8."""
    filter_fqns: list[str] = field(default_factory=list)
    """Parts of names: a linear whose name holds one stays in high precision."""
    include_fqns: list[str] = field(default_factory=list)
    """Parts of names: the head (lm_head) or routers, left alone else, that multiply so, too."""
    round_scales_to_power_of_2: bool = True
    """Round scales to powers of two, under which a number's digits depend on no other number."""
    scaling: Literal["dynamic", "delayed"] = "dynamic"
    """Scales from the numbers that are cast, or from those of the last steps (tensorwise)."""
    amax_history_length: Count = 16
    """From how many steps a delayed scale takes the largest number."""
    enable_fsdp_float8_all_gather: bool = False
    """Gather the weights of these linears over the ranks of FSDP as bytes."""
    enable_tp_float8_all_gather: bool = False
    """Gather what these linears read over the ranks of sequence parallelism as bytes."""
    emulate: bool = False
    """Multiply in fp32 what float8 holds; a CPU does so wherever it has no kernel."""


@dataclass
class QuantizedLinear:
    """Which numbers linears multiply."""

    float8: Float8 = field(default_factory=Float8)
    """Numbers of eight bits."""


@dataclass
class ExpertsFloat8:
    """Routed experts that multiply numbers of eight bits (precision/grouped.py)."""

    fqns: list[str] = field(default_factory=list)
    """Parts of names, such as "experts": those whose name holds one, by the linears' recipe."""


@dataclass
class QuantizedExperts:
    """Which numbers routed experts multiply."""

    float8: ExpertsFloat8 = field(default_factory=ExpertsFloat8)
    """Numbers of eight bits."""


@dataclass
class Quantize:
    """Products in fewer bits."""

    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    """Those of linears."""
    grouped_mm: QuantizedExperts = field(default_factory=QuantizedExperts)
    """Those of routed experts."""
