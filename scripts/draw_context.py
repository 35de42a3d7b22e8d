"""The pictures of docs/long-context.md, drawn from what the code does.

    PYTHONPATH=. python scripts/draw_context.py --folder docs

Which rank holds which chunks of a row, and which chunks see which, is asked of Order and Sight
(parallel/chunks.py). An exchange is watched: four gloo ranks run it, on tensors whose every number
is a code of its kind, head and chunk, so what a rank hands to a collective or to a kernel tells
where it is from. A colour is the rank that holds the tokens.

The same code draws the same bytes: tests/test_draw_context.py compares them with docs/.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.models.attention import CoreAttention, RowMask, document_numbers
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.parallel.chunks import Order, Sight
from torchtitan_lite.parallel.exchange import METHODS

ORDER = Order(4)
CHUNKS = range(ORDER.num_chunks)
LENGTH = 4  # tokens of a chunk
SEQ = LENGTH * ORDER.num_chunks
DOCUMENTS, WINDOW = (5, 11, 1, 8, 7), 8  # tokens
CONFIG = ModelConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
CODES = 8  # heads and chunks are below it: a code is (kind x 8 + head) x 8 + chunk, exact in bf16

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # of ranks; Okabe and Ito
PALE, GREY, DARK = "#eeeeee", "#bbbbbb", "#333333"


def row_mask(documents: Sequence[int] | None = None) -> RowMask:
    numbers = None
    if documents is not None:
        numbers = document_numbers(torch.cat([torch.arange(n) for n in documents])[None])
    return RowMask(numbers, num_keys=SEQ, device=torch.device("cpu"))


def holder(chunk: int, order: Order = ORDER) -> int:
    return next(rank for rank in range(order.size) if chunk in order.chunks(rank))


# --- watching an exchange -----------------------------------------------------------------------


@dataclass
class Event:
    """What a rank hands to a collective, or to a kernel of attention."""

    name: str
    phase: str
    size: int  # bytes sent, or FLOPs
    label: str = ""  # what is sent
    heads: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)  # chunks
    keys: list[int] = field(default_factory=list)
    causal: bool = False
    to: list[set[tuple[str, int, int]]] = field(default_factory=list)  # rank -> what it is sent


def coded(kind: str, heads: int) -> Tensor:
    """(1, heads, seq, head_dim), each number the code of where it stands."""
    chunks = torch.arange(SEQ) // LENGTH
    codes = ("qkv".index(kind) * CODES + torch.arange(heads)[:, None]) * CODES + chunks
    return codes[None, :, :, None].repeat(1, 1, 1, CONFIG.head_dim).bfloat16()


def decoded(tensor: Tensor) -> set[tuple[str, int, int]]:
    """(kind, head, chunk) of all numbers in a tensor."""
    codes = [int(code) for code in tensor.detach().float().unique()]
    return {("qkv"[c // CODES**2], c // CODES % CODES, c % CODES) for c in codes}


class Watch(TorchDispatchMode):
    """Writes down the events of a rank, in order."""

    phase = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            self._communicate(name, args)
        elif name.startswith("_scaled_dot_product"):
            self._attend(args, backward="backward" in name)
        return func(*args, **(kwargs or {}))

    def _communicate(self, name: str, args: Any) -> None:
        tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        ranks, size = ORDER.size, tensor.numel() * tensor.itemsize
        sent = dict.fromkeys(
            ("all_to_all_single", "reduce_scatter_tensor"), (ranks - 1) * size // ranks
        )
        sent |= {"send": size, "all_gather_into_tensor": (ranks - 1) * size}
        if name not in sent:
            return
        event = Event(name, self.phase, sent[name], self._label(name, tensor.dtype))
        if event.label.endswith("k v") and self.phase == "forward":
            pieces = tensor.chunk(ranks) if name == "all_to_all_single" else [tensor] * ranks
            event.to = [decoded(piece) for piece in pieces]
            if name == "send":
                event.to = [to if rank == args[2] else set() for rank, to in enumerate(event.to)]
        self.events.append(event)

    def _label(self, name: str, dtype: torch.dtype) -> str:
        """What is sent: after attention its result, and in backward gradients of all that."""
        if name != "all_to_all_single":
            return "dk dv" if dtype == torch.float32 else "k v"
        is_answer = bool(self.events) and self.events[-1].name == "attend"
        labels = {"forward": ("q k v", "out"), "backward": ("dout", "dq dk dv")}
        return labels[self.phase][is_answer]

    def _attend(self, args: Any, *, backward: bool) -> None:
        q, k = args[1:3] if backward else args[:2]
        causal = any(args[7:8] if backward else args[4:5])  # a default is left out
        flops = (10 if backward else 4) * q.numel() * k.shape[2] // (2 if causal else 1)
        event = Event("attend", self.phase, flops, causal=causal)
        event.heads = sorted({head for _, head, _ in decoded(q)})
        event.queries, event.keys = (sorted({chunk for *_, chunk in decoded(t)}) for t in (q, k))
        self.events.append(event)


def watch(store: str, rank: int) -> dict[str, list[Event]]:
    """The events of a rank, by method; the other ranks run beside it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ORDER.size)
    group, core, found = dist.group.WORLD, CoreAttention(CONFIG, 0), {}
    for method, exchange in METHODS.items():
        q_heads, kv_heads = CONFIG.num_attention_heads, CONFIG.num_key_value_heads
        parts = [
            ORDER.take(coded(kind, heads), rank, 2).requires_grad_()
            for kind, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads))
        ]
        with Watch() as seen:
            out = exchange(core, core.forward, ORDER, group, *parts, row_mask(), None)
            seen.phase = "backward"
            out.backward(torch.ones_like(out))
        found[method] = seen.events
    dist.barrier()
    dist.destroy_process_group()
    return found


def watch_all() -> dict[str, list[list[Event]]]:
    """Method -> rank -> events."""
    pool = ProcessPoolExecutor(ORDER.size, mp_context=multiprocessing.get_context("fork"))
    with tempfile.TemporaryDirectory() as folder, pool:
        of_ranks = list(pool.map(partial(watch, f"{folder}/store"), range(ORDER.size)))
    return {method: [found[method] for found in of_ranks] for method in METHODS}


# --- drawing ------------------------------------------------------------------------------------


class Picture:
    """An SVG, a shape a line."""

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        tip = f'<path d="M0 0L7 3L0 6z" fill="{DARK}"/>'
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
            'font-size="12">',
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" '
            f'orient="auto">{tip}</marker></defs>',
        ]
        self.box(0, 0, width, height, "#ffffff")

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "#ffffff"
    ) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.lines.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')

    def path(self, path: str, more: str) -> None:
        self.lines.append(f'<path d="{path}" {more}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        line = f"M{x:g} {y:g}L{to_x:g} {to_y:g}"
        self.path(line, f'stroke="{DARK}" marker-end="url(#tip)"')

    def text(
        self, x: float, y: float, text: object, fill: str = DARK, *, anchor: str = "middle"
    ) -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.lines.append(f'<text {place} fill="{fill}">{text}</text>')

    def note(self, y: float, *lines: str) -> None:
        for number, line in enumerate(lines):
            self.text(20, y + 16 * number, line, anchor="start")

    def chunks(
        self, x: float, y: float, size: float, numbers: Sequence[int], order: Order = ORDER
    ) -> None:
        """Chunks of a row, each in the colour of the rank that holds it."""
        for place, number in enumerate(numbers):
            self.box(x + place * size, y, size, size, COLORS[holder(number, order)])
            self.text(x + (place + 0.5) * size, y + size / 2 + 4, number, "#ffffff")

    def pair(self, x: float, y: float, size: float, fill: str, *, causal: bool) -> None:
        """What a chunk of queries sees of a chunk of keys: all, or what is not behind it."""
        line = f"M{x:g} {y:g}v{size:g}h{size:g}" + ("z" if causal else f"v-{size:g}z")
        self.path(line, f'fill="{fill}"')


def draw_rows(*cases: tuple[str, Order, Sequence[int] | None, int | None]) -> Picture:
    """Token by token: what is seen, which pairs have a mask, and the work of each rank."""
    picture, size, token = Picture(720, 356), 32, 8
    for x, (title, order, documents, window) in zip((40, 420), cases, strict=True):
        mask = row_mask(documents)
        dense, sight = mask.dense(window), Sight(mask, window, order.num_chunks)
        seen = torch.ones(SEQ, SEQ).tril() if dense is None else dense[0, 0]
        work = [0.0] * order.size
        picture.text(x + 4 * size, 20, title)
        for query, rows in enumerate(seen.split(LENGTH)):
            y = 32 + query * size
            picture.chunks(x - size + 2, y, size - 4, [query], order)
            picture.box(x, y, 8 * size, size, PALE)
            at = ((x + key * token, y + row * token) for row, key in rows.nonzero().tolist())
            line = "".join(f"M{a:g} {b:g}h7v7h-7z" for a, b in at)
            picture.path(line, f'fill="{COLORS[holder(query, order)]}"')
        for query, key in product(CHUNKS, CHUNKS):
            for stretch in sight.stretches(query, [key]):
                work[holder(query, order)] += 0.5 if stretch.causal else 1
                if stretch.mask is not None:
                    picture.box(x + key * size, 32 + query * size, size - 1, size - 1, "none", DARK)
        for rank, pairs in enumerate(work):
            picture.box(x + rank * 64, 298, 14, 14, COLORS[rank])
            picture.text(x + rank * 64 + 18, 310, f"{pairs:g}", anchor="start")
    picture.note(
        332, "Rows: queries. Small squares: tokens that they see. Framed: pairs with a mask."
    )
    picture.note(348, "Numbers: pairs of chunks that each rank computes; a causal one is half.")
    return picture


def draw_timeline(picture: Picture, y: float, events: list[Event]) -> None:
    """What a rank sends and computes, in the order in which it starts them."""

    def kind(event: Event) -> tuple[str, str, str, set[int]]:
        """Equal for what is drawn as one box; keys of one rank are a step of the ring."""
        return event.name, event.phase, event.label, {holder(key) for key in event.keys}

    picture.note(y, "Rank 0 in this order: what it sends (width: bytes), attention (grey: FLOPs)")
    for phase, of_phase in groupby(events, lambda event: event.phase):
        x = {"forward": 20.0, "backward": 204.0}[phase]
        picture.text(x, y + 56, phase, anchor="start")
        for (name, _, label, _), group in groupby(of_phase, kind):
            attends = name == "attend"
            width = sum(event.size for event in group) / (620 if attends else 1024 / 40)
            picture.box(x, y + 16, width, 22, GREY if attends else DARK)
            picture.text(x + width / 2, y + 31, label, "#ffffff")
            x += width


def steps_of(events: list[list[Event]]) -> list[list[list[int]]]:
    """Step -> rank -> the chunks whose keys it has: first its own, then what it was sent."""
    steps = [[list(ORDER.chunks(rank)) for rank in range(ORDER.size)]]
    of_ranks = [[event.to for event in own if event.name == "send" and event.to] for own in events]
    for sent in zip(*(own[::2] for own in of_ranks), strict=True):  # keys; the values follow
        arrived = [set().union(*column) for column in zip(*sent, strict=True)]
        steps.append([sorted({chunk for _, _, chunk in parts}) for parts in arrived])
    return steps


def draw_ring(events: list[list[Event]]) -> Picture:
    """Each step: the keys and values that a rank has, and the pairs that it computes with them."""
    picture, size, left, high = Picture(720, 506), 26, 150, 100
    steps = steps_of(events)
    for step, held in enumerate(steps):
        y = 40 + step * high
        picture.note(y + 17, f"step {step}")
        for rank, chunks in enumerate(held):
            x = left + rank * 145
            if step == 0:
                picture.text(x + size, 24, f"rank {rank}")
            picture.chunks(x, y, size, chunks)
            draw_computed(picture, x, y + size + 2, size, events[rank], rank, chunks)
            if step + 1 == len(steps):
                continue
            if rank + 1 < ORDER.size:
                picture.arrow(x + 2 * size + 4, y + 16, x + 110, y + high + 8)
            else:
                picture.arrow(x + 2 * size + 4, y + 16, x + 2 * size + 40, y + 50)
                picture.arrow(left - 72, y + 60, left - 34, y + high + 8)
    draw_timeline(picture, 440, events[0])
    return picture


def draw_computed(
    picture: Picture, x: float, y: float, size: float, events: list[Event], rank: int,
    held: Sequence[int],
) -> None:  # fmt: skip
    """The pairs of a rank's queries with the chunks `held`, those that a kernel was given."""
    for row, query in enumerate(ORDER.chunks(rank)):
        picture.text(x - 8, y + row * size + 17, query, COLORS[rank])
        for column in range(len(held)):
            picture.box(x + column * size, y + row * size, size, size, PALE)
        for event in events:
            if event.name != "attend" or event.phase != "forward" or event.queries != [query]:
                continue
            for key in set(event.keys) & set(held):
                at = x + held.index(key) * size
                picture.pair(at, y + row * size, size - 1, COLORS[rank], causal=event.causal)


def draw_allgather(events: list[list[Event]]) -> Picture:
    """What each rank gives, and what it computes with all of it."""
    picture, size = Picture(720, 290), 18
    for rank, own in enumerate(events):
        x = 40 + rank * 172
        ((given, *_),) = (event.to for event in own if event.to)
        picture.text(x + 4 * size, 24, f"rank {rank}")
        picture.chunks(x + 3 * size, 34, size, sorted({chunk for *_, chunk in given}))
        picture.arrow(x + 4 * size, 56, x + 4 * size, 96)
        picture.chunks(x, 102, size, CHUNKS)
        draw_computed(picture, x, 126, size, own, rank, CHUNKS)
    picture.text(26 + 86 * ORDER.size, 82, "all-gather of k and v")
    picture.note(186, "Keys (columns) stand in the order of the row; a rank's queries are its own.")
    draw_timeline(picture, 220, events[0])
    return picture


def draw_ulysses(events: list[list[Event]]) -> Picture:
    """Heads x tokens: whom each rank sends what, and what each then has."""
    picture, size = Picture(720, 436), 18
    for rank, own in enumerate(events):
        x = 40 + rank * 172
        picture.text(x + 4 * size, 20, f"rank {rank}")
        (sent,) = (event.to for event in own if event.to)
        places = {part: to for to, parts in enumerate(sent) for part in parts if part[0] in "qk"}
        for (kind, head, chunk), to in sorted(places.items()):
            at_x = x + (2 if kind == "q" else 5) * size + ORDER.chunks(rank).index(chunk) * size
            at_y = 46 + head * size
            picture.box(at_x, at_y, size, size, COLORS[rank])
            picture.text(at_x + size / 2, at_y + 14, to, "#ffffff")
        picture.text(x + 3 * size, 40, "q")
        picture.text(x + 6 * size, 40, "k, v")
        (core,) = (one for one in own if one.name == "attend" and one.phase == "forward")
        kv = sorted({head for kind, head, _ in sent[rank] if kind == "k"})
        rows = [*(("q", head) for head in core.heads), *(("k", head) for head in kv)]
        for row, (kind, head) in enumerate(rows):
            y = 232 + row * size + (6 if kind == "k" else 0)
            picture.text(x - 4, y + 14, f"{kind}{head}", anchor="end")
            picture.chunks(x, y, size, core.queries if kind == "q" else core.keys)
        picture.arrow(x + 4 * size, 194, x + 4 * size, 224)
    picture.note(
        318,
        "Above the arrow: a rank's two chunks (columns) of all heads (rows); the number says which",
        "rank each is sent to. Below: all chunks of the row, of the heads named beside it; v as k.",
    )
    draw_timeline(picture, 368, events[0])
    return picture


def pictures(events: dict[str, list[list[Event]]]) -> dict[str, str]:
    """File name -> SVG, from what watch_all saw."""
    plain, lengths = Order(ORDER.size, balanced=False), ", ".join(map(str, DOCUMENTS))
    of_orders = (("balanced", ORDER, None, None), ("plain", plain, None, None))
    apart = (f"documents of {lengths} tokens", ORDER, DOCUMENTS, None)
    near = (f"a window of {WINDOW} tokens", ORDER, None, WINDOW)
    drawn = {"chunks": draw_rows(*of_orders), "documents": draw_rows(apart, near)}
    for draw in (draw_ring, draw_allgather, draw_ulysses):
        method = draw.__name__.removeprefix("draw_")
        drawn[method] = draw(events[method])
    return {f"context-{n}.svg": "\n".join([*one.lines, "</svg>\n"]) for n, one in drawn.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", default="docs", help="where they go (default: %(default)s)")
    folder = Path(parser.parse_args(argv).folder)
    for name, text in pictures(watch_all()).items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
