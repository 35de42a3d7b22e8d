"""What a key may hold: types with their bounds, and the words for them.

A key of keys.py is of one of these, or of a plain type. Proven in tests/config/test_keys.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple


class Bound(NamedTuple):
    """What a type does not say of a value, and the words for it."""

    holds: Callable[[Any], object]
    sentence: str


Text = Annotated[str, Bound(lambda text: text != "", "not empty")]
Count = Annotated[int, Bound(lambda n: n >= 1, "at least 1")]
CountOrAuto = Annotated[int, Bound(lambda n: n >= 1 or n == -1, "at least 1, or -1")]
CountOrZero = Annotated[int, Bound(lambda n: n >= 0, "0 or more")]
Step = Annotated[int, Bound(lambda n: n >= -1, "0 or more, or -1")]
# The newest may turn out to be damaged.
Kept = Annotated[int, Bound(lambda n: n == 0 or n >= 2, "0 (keep all) or at least 2")]
ZeroStage = Annotated[int, Bound(lambda n: 0 <= n <= 3, "0, 1, 2 or 3")]
# A generator takes 64 bits, a TOML integer 63 and a sign.
Seed = Annotated[int, Bound(lambda n: 0 <= n < 2**63, "from 0 to 2**63 - 1")]
NotNegative = Annotated[float, Bound(lambda x: 0 <= x < math.inf, "a finite number, 0 or more")]
Positive = Annotated[float, Bound(lambda x: 0 < x < math.inf, "a finite number above 0")]
Share = Annotated[float, Bound(lambda x: 0 <= x <= 1, "from 0 to 1")]
BelowOne = Annotated[float, Bound(lambda x: 0 <= x < 1, "0 or more and below 1")]
NormType = Annotated[float, Bound(lambda p: p in (1, 2, math.inf), "1, 2 or inf")]
EveryNth = Annotated[str, Bound(re.compile("op|[1-9][0-9]*").fullmatch, '"op" or at least 1')]

CheckpointPart = Literal["model", "optimizer", "dataloader", "train_state"]
Dataset = Literal["auto", "text", "jsonl", "hf", "tokens", "synthetic"]
Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
