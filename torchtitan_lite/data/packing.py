"""Rows that cut no document: best-fit packing.

A stream that is cut every seq_len tokens is cut within documents, and what stands behind a cut
refers to words that the row does not have. Here whole documents are put into rows like boxes on
shelves, the longest first, each into the row where it leaves the least room (best-fit decreasing;
for language models Ding et al. 2024, arXiv:2404.10830). Room that stays free is padding.

    documents  aaaaa bb ccccccccc ddd e ff       seq_len = 6

    concatenate  aaaaab bccccc ccccdd deff       the rest is less than a row
    best_fit     aaaaae bbff.. cccccc cccddd     the first six c are a row of their own

Only a document longer than a row is cut, into rows and a rest that is packed like a document. Each
token is input once, and label at most once: of the token before it in its document, also across a
cut. The first token of a document is the label of the last one before it in its row, as in a
stream, unless `document_mask` parts the two. Padding is no label, and a document of its own.

The plan is arithmetic on lengths: documents of equal length are interchangeable, so rows are filled
many at a time, and it takes little longer than to sort. It is a pure function of the documents and
seq_len, the same on every rank, and keeps 4 bytes a document and 16 a row.

Proven in tests/data/test_packing.py.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchtitan_lite.data.shards import DOCUMENTS_NAME, TokenShards
from torchtitan_lite.data.sources import DOCUMENT_MASK, IGNORE_LABEL, Row, positions_from

logger = logging.getLogger(__name__)

BEST_FIT = 'training.packing = "best_fit"'


class Plan(NamedTuple):
    """What each row holds: its first piece, then the last pieces of other documents.

    Rows are in the order of the stream as to their first piece, so the first rows of a source are
    not those of its longest documents.
    """

    begins: NDArray[np.int64]  # (rows,) place in the stream of the first token
    offsets: NDArray[np.int64]  # (rows + 1,) where in `others` a row's part begins
    others: NDArray[np.uint32]  # documents


class PackedRows:
    """The documents of token shards in rows of `seq_len`, none cut that fits in one."""

    def __init__(self, shards: TokenShards, seq_len: int, *, document_mask: bool = False) -> None:
        self._shards, self._seq_len, self._document_mask = shards, seq_len, document_mask
        self._ends = shards.document_ends(key=DOCUMENT_MASK if document_mask else BEST_FIT)
        if self._ends[0] < 1 or not (self._ends[1:] > self._ends[:-1]).all():
            raise shards.damaged(DOCUMENTS_NAME, "has a document without tokens")
        self._plan = plan_rows(self._ends, seq_len)
        padding = 1 - shards.num_tokens / (len(self) * seq_len)
        logger.info(
            f"{len(self._ends):,} documents in {len(self):,} rows of {seq_len:,}, "
            f"{padding:.2%} padding ({shards.folder})"
        )

    def __len__(self) -> int:
        return len(self._plan.begins)

    def __getitem__(self, number: int) -> Row:
        assert 0 <= number < len(self), f"no row {number}"
        row = Row(
            torch.zeros(self._seq_len, dtype=torch.int64),
            torch.full((self._seq_len,), IGNORE_LABEL),
        )
        places, place = [], 0
        for first, begin, stop, end in self._pieces(number):
            stream = torch.from_numpy(self._shards.read(begin, min(stop + 1, end)))
            if place and begin == first and not self._document_mask:
                row.labels[place - 1] = stream[0]
            row.tokens[place : place + stop - begin] = stream[: stop - begin]
            row.labels[place : place + len(stream) - 1] = stream[1:]
            place += stop - begin
            places.append(place)
        if not self._document_mask:
            return row
        return row._replace(positions=positions_from(places, self._seq_len))

    def _pieces(self, number: int) -> list[tuple[int, int, int, int]]:
        """Of each piece of a row: where its document begins, it begins and ends, that one ends."""
        begin = int(self._plan.begins[number])
        document = int(np.searchsorted(self._ends, begin, side="right"))
        end = int(self._ends[document])
        pieces = [(begin, begin, min(begin + self._seq_len, end), end)]
        for other in self._plan.others[slice(*self._plan.offsets[number : number + 2])].tolist():
            first, end = int(self._ends[other - 1]) if other else 0, int(self._ends[other])
            pieces.append((first, end - (end - first) % self._seq_len, end, end))
        return pieces


def plan_rows(ends: NDArray[np.int64], seq_len: int) -> Plan:
    """The rows for documents that end at `ends`."""
    assert len(ends) < 1 << 32, f"{len(ends)} documents"
    lengths = np.diff(ends, prepend=0)
    # What the last piece of each document leaves free of a row. 16 bits sort in linear time.
    room = (-lengths % seq_len).astype(np.min_scalar_type(seq_len - 1))
    long = np.flatnonzero(lengths >= seq_len)
    num_full = lengths[long] // seq_len
    nth = np.arange(num_full.sum()) - np.repeat(num_full.cumsum() - num_full, num_full)
    full = np.repeat(ends[long] - lengths[long], num_full) + nth * seq_len
    del lengths

    counts = np.bincount(room, minlength=seq_len)
    documents = np.argsort(room, kind="stable")[counts[0] :]  # the longest last piece first
    counts[0] = 0
    row_of = best_fit(counts, seq_len)
    opens = np.diff(np.maximum.accumulate(row_of), prepend=-1) > 0
    firsts = documents[opens]
    begins = np.concatenate([full, ends[firsts] - seq_len + room[firsts]])

    order = np.argsort(begins)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    row_of = number[len(full) :][row_of[~opens]]
    num_others = np.bincount(row_of, minlength=len(begins))
    return Plan(
        begins=begins[order],
        offsets=np.concatenate([[0], num_others.cumsum()]),
        others=documents[~opens][np.argsort(row_of, kind="stable")].astype(np.uint32),
    )


def best_fit(counts: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:  # (counts.sum(),)
    """The row of each piece, the longest first, where counts[room] pieces are seq_len - room long.

    Rows are numbered as they are opened. A row that is the best fit for a piece is it for the next
    one of the same length too, as long as that fits.
    """
    row_of = np.empty(counts.sum(), dtype=np.int64)
    rooms: list[int] = []  # that some row has, ascending
    rows: dict[int, list[NDArray[np.int64]]] = {}  # room -> the rows that have it

    def keep(numbers: NDArray[np.int64], room: int) -> None:
        if len(numbers) and room:
            if room not in rows:
                insort(rooms, room)
            rows.setdefault(room, []).append(numbers)

    placed = num_rows = 0
    for length in (seq_len - np.flatnonzero(counts)).tolist():
        left = int(counts[seq_len - length])
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                new = -(-left // (seq_len // length))
                keep(np.arange(num_rows, num_rows + new), seq_len)
                num_rows += new
            room = rooms[at]
            each = room // length
            taken = rows[room].pop()
            if not rows[room]:
                del rows[room], rooms[at]
            keep(taken[-(-left // each) :], room)
            taken = taken[: -(-left // each)]
            count = min(left, len(taken) * each)
            row_of[placed : placed + count] = np.repeat(taken, each)[:count]
            keep(taken[:-1], room - each * length)
            keep(taken[-1:], room - (count - each * (len(taken) - 1)) * length)
            placed, left = placed + count, left - count
    return row_of
