"""scripts/draw_context.py draws what the exchanges do, and docs/ has what it draws."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from scripts import draw_context
from scripts.draw_context import CHUNKS, ORDER, Event
from torchtitan_lite.parallel.chunks import Order

DOCS = Path(__file__).parent.parent / "docs"
MAX_BYTES = 60_000


@cache
def watched() -> dict[str, list[list[Event]]]:
    return draw_context.watch_all()


def check_docs(drawn: dict[str, str]) -> None:
    page = (DOCS / "long-context.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)) == sorted(drawn)
    again = "PYTHONPATH=. python scripts/draw_context.py --folder docs"
    for name, text in drawn.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"{name}: {again}"
        assert len(text) < MAX_BYTES


def test_the_pictures_in_docs_are_what_the_code_does() -> None:
    check_docs(draw_context.pictures(watched()))


def test_another_assignment_draws_other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: rank 0 and rank 3 have changed places."""
    chunks = Order.chunks
    monkeypatch.setattr(Order, "chunks", lambda order, rank: chunks(order, (3, 1, 2, 0)[rank]))
    with pytest.raises(AssertionError, match="context-"):
        check_docs(draw_context.pictures(draw_context.watch_all()))


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_each_pair_of_chunks_is_computed_once_where_its_queries_are(
    method: str, phase: str
) -> None:
    computed = Counter(
        (query, key)
        for rank, events in enumerate(watched()[method])
        for event in events
        if event.name == "attend" and event.phase == phase
        for query in event.queries
        for key in event.keys
        if query in ORDER.chunks(rank)
    )
    assert computed == {(query, key): 1 for query in CHUNKS for key in CHUNKS if key <= query}


def test_what_goes_round_the_ring_is_never_sent_home() -> None:
    steps = draw_context.steps_of(watched()["ring"])
    assert [step[0] for step in steps] == [[0, 7], [3, 4], [2, 5], [1, 6]]
    for rank in range(ORDER.size):
        assert sorted(chunk for step in steps for chunk in step[rank]) == list(CHUNKS)


def test_under_ulysses_every_rank_is_sent_its_heads_of_all_chunks() -> None:
    of_ranks = watched()["ulysses"]
    for rank, events in enumerate(of_ranks):
        sent = [next(event for event in own if event.to).to[rank] for own in of_ranks]
        heads = {"q": (2 * rank, 2 * rank + 1), "k": (rank,), "v": (rank,)}
        expected = {
            (kind, head, chunk) for kind in heads for head in heads[kind] for chunk in CHUNKS
        }
        assert set().union(*sent) == expected
        (core,) = (one for one in events if one.name == "attend" and one.phase == "forward")
        assert (core.heads, core.queries, core.keys) == ([*heads["q"]], [*CHUNKS], [*CHUNKS])


def test_the_bytes_are_those_that_the_table_of_exchanges_says() -> None:
    tokens, kv, q = draw_context.SEQ // 4, 2 * 4 * 8, 8 * 8  # numbers of a token
    expected = {
        "ring": (3 * tokens * kv * 2, 3 * tokens * kv * (2 + 4)),
        "allgather": (3 * tokens * kv * 2, 3 * tokens * kv * (2 + 4)),
        "ulysses": (3 * tokens * (2 * q + kv) * 2 // 4,) * 2,
    }
    for method, of_ranks in watched().items():
        for events in of_ranks:
            sent = Counter[str]()
            for event in events:
                sent[event.phase] += event.size if event.name != "attend" else 0
            assert (sent["forward"], sent["backward"]) == expected[method]
