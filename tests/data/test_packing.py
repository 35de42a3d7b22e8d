"""Whole documents in rows: nothing cut, lost or read twice, and every label where it belongs.

Token t of a source is the number t, so a row tells by itself which documents it holds. The claims
are one function over a source; the last tests give it sources with a known fault, and it goes red.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.data.test_shards import as_format_1
from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.packing import PackedRows, best_fit, plan_rows
from torchtitan_lite.data.shards import TokenShards
from torchtitan_lite.data.sources import IGNORE_LABEL, Row

WriteShards = Callable[..., Path]
SEQ_LEN = 8
RAGGED = [5, 2, 9, 3, 1, 2, 8, 1, 17, 7, 16, 1, 4, 4, 6, 30, 2, 1]
GOLDEN_BEGINS = [0, 7, 22, 31, 39, 48, 55, 63, 72, 80, 86, 94, 102, 110, 116]  # of RAGGED
CASES = {
    "ragged": RAGGED,
    "one token each": [1] * 19,
    "one token in all": [1],
    "exactly a row": [8, 8, 8],
    "a row and one token": [9, 9],
    "nothing fits beside another": [5, 6, 7, 5, 6],
    "one long document": [83],
    "random": np.random.default_rng(0).integers(1, 20, 150).tolist(),
}

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def ends_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum(np.asarray(lengths, dtype=np.int64))


@pytest.fixture
def pack(write_shards: WriteShards) -> Callable[..., PackedRows]:
    """pack(lengths, document_mask=...) -> the rows of documents of these lengths."""

    def make(
        lengths: Sequence[int], *, kind: type[PackedRows] = PackedRows, document_mask: bool = False
    ) -> PackedRows:
        ends = ends_of(lengths).tolist()
        # Token 0 is padding: 1 is the first of the stream.
        name = "-".join(map(str, lengths))[:100]
        folder = write_shards(range(1, ends[-1] + 1), ends=ends, tokens_a_shard=7, name=name)
        return kind(TokenShards(folder), SEQ_LEN, document_mask=document_mask)

    return make


def pieces_of(row: Row) -> list[list[int]]:
    """The runs of successive tokens of a row, padding left out."""
    pieces: list[list[int]] = []
    for token in row.tokens[row.tokens != 0].tolist():
        if not pieces or token != pieces[-1][-1] + 1:
            pieces.append([])
        pieces[-1].append(token)
    return pieces


def check_rows(rows: PackedRows, lengths: Sequence[int], *, document_mask: bool) -> None:
    """Every claim about the rows of documents of these lengths, whose tokens are 1, 2, 3 ..."""
    ends = ends_of(lengths).tolist()
    document_of = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    firsts = {0, *ends}  # places in the stream, so tokens less 1
    inputs: Counter[int] = Counter()
    labels: Counter[int] = Counter()
    seen_in: dict[int, set[int]] = {}
    for number in range(len(rows)):
        row = rows[number]
        num_tokens = int((row.tokens != 0).sum())
        assert 1 <= num_tokens <= SEQ_LEN
        tokens = row.tokens.tolist()
        assert tokens[num_tokens:] == [0] * (SEQ_LEN - num_tokens)
        inputs.update(tokens[:num_tokens])
        labels.update(row.labels[row.labels != IGNORE_LABEL].tolist())
        expected, positions, position = [IGNORE_LABEL] * SEQ_LEN, [0] * SEQ_LEN, -1
        for place, token in enumerate(tokens):
            is_text = place < num_tokens
            starts_here = place in (0, num_tokens) or (is_text and token - 1 in firsts)
            # Behind a document comes the last piece of another one, which may be cut off.
            starts_here |= is_text and token != tokens[place - 1] + 1
            position = 0 if starts_here else position + 1
            positions[place] = position
            if is_text and token not in ends:
                expected[place] = token + 1
            elif place + 1 < num_tokens and not document_mask and tokens[place + 1] - 1 in firsts:
                expected[place] = tokens[place + 1]
        assert row.labels.tolist() == expected
        if document_mask:
            assert row.positions is not None and row.positions.tolist() == positions
        else:
            assert row.positions is None
        for token in tokens[:num_tokens]:
            seen_in.setdefault(int(document_of[token - 1]), set()).add(number)
    assert inputs == Counter(range(1, ends[-1] + 1))
    if document_mask:
        assert labels == Counter(token + 1 for token in set(range(ends[-1])) - firsts)
    assert max(labels.values(), default=1) == 1
    for document, length in enumerate(lengths):
        assert len(seen_in[document]) == -(-length // SEQ_LEN)  # cut no more often than it must be


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_no_token_is_lost_no_document_cut_and_every_label_in_its_place(
    pack: Callable[..., PackedRows], lengths: list[int], document_mask: bool
) -> None:
    check_rows(pack(lengths, document_mask=document_mask), lengths, document_mask=document_mask)


def test_the_drawing_of_the_module(write_shards: WriteShards) -> None:
    text = "aaaaabbcccccccccdddeff"
    ends = [5, 7, 16, 19, 20, 22]
    shards = TokenShards(write_shards([ord(letter) for letter in text], ends=ends))
    rows = PackedRows(shards, 6)
    drawn = ["".join(chr(token or ord(".")) for token in rows[i].tokens) for i in range(len(rows))]
    assert drawn == ["aaaaae", "bbff..", "cccccc", "cccddd"]


def test_labels_and_positions_of_a_row_written_out(pack: Callable[..., PackedRows]) -> None:
    # 1 2 3 | 4 5 | 6: one row with two places left.
    x = IGNORE_LABEL
    row = pack([3, 2, 1])[0]
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert row.labels.tolist() == [2, 3, 4, 5, 6, x, x, x] and row.positions is None
    masked = pack([3, 2, 1], document_mask=True)[0]
    assert masked.labels.tolist() == [2, 3, x, 5, x, x, x, x]
    assert masked.positions is not None
    assert masked.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    # A cut in a document of 9: its label is the token behind it, which is a row's first.
    first, second = (pack([9], document_mask=True)[number] for number in (0, 1))
    assert first.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert second.tokens.tolist() == [9, *[0] * 7] and second.labels.tolist() == [x] * 8


# --- the plan ------------------------------------------------------------------------------------


def one_by_one(lengths: Sequence[int], seq_len: int) -> list[int]:
    """Best-fit decreasing as books have it: how full each row is."""
    rows: list[int] = []
    for length in lengths:
        fitting = [number for number, full in enumerate(rows) if full + length <= seq_len]
        if not fitting:
            rows.append(0)
            fitting = [len(rows) - 1]
        rows[max(fitting, key=rows.__getitem__)] += length
    return sorted(rows)


@pytest.mark.parametrize("seed", range(20))
def test_many_at_a_time_is_the_best_fit_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    seq_len = int(random.integers(1, 60))
    lengths = np.sort(random.integers(1, seq_len + 1, random.integers(1, 400)))[::-1]
    row_of = best_fit(np.bincount(seq_len - lengths, minlength=seq_len), seq_len)
    # Rows with the same room are interchangeable: how full they are does not depend on a choice.
    for count in range(1, len(lengths) + 1, 7):
        full = np.bincount(row_of[:count], weights=lengths[:count])
        assert sorted(full.tolist()) == one_by_one(lengths[:count].tolist(), seq_len)


def test_rows_are_in_the_order_of_the_stream(pack: Callable[..., PackedRows]) -> None:
    lengths = CASES["random"]
    rows = pack(lengths)
    firsts = [int(rows[number].tokens[0]) for number in range(len(rows))]
    assert firsts == sorted(firsts) and firsts[0] == 1


def test_the_plan_follows_from_documents_and_seq_len_alone(write_shards: WriteShards) -> None:
    ends = ends_of(RAGGED)
    first, second = plan_rows(ends, SEQ_LEN), plan_rows(ends.copy(), SEQ_LEN)
    assert all(map(np.array_equal, first, second))
    assert first.begins.tolist() == GOLDEN_BEGINS
    assert first.others.tolist() == [3, 2, 13, 5, 1, 4, 7, 8, 11, 17]
    kinds = [
        PackedRows(
            TokenShards(
                write_shards(
                    range(ends[-1]), ends=ends.tolist(), tokens_a_shard=size, name=f"{size}"
                )
            ),
            SEQ_LEN,
        )
        for size in (3, 1000)
    ]
    for number in range(len(kinds[0])):
        assert torch.equal(kinds[0][number].tokens, kinds[1][number].tokens)


def test_a_million_documents_are_packed_in_seconds_and_little_memory() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, 1_000_000)).astype(np.int64)
    ends, started = lengths.cumsum(), time.process_time()
    plan = plan_rows(ends, 8192)
    assert time.process_time() - started < 20  # 1 on the machine that this was written on
    assert 1 - ends[-1] / (len(plan.begins) * 8192) < 1e-3
    assert sum(part.nbytes for part in plan) <= 4 * len(ends) + 16 * (len(plan.begins) + 1)


def test_the_share_of_padding_is_told_once(
    pack: Callable[..., PackedRows], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torchtitan_lite"):
        rows = pack([5, 6, 7, 9])
        assert len(rows) == 4
        list(map(rows.__getitem__, range(4)))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("4 documents in 4 rows of 8, 15.62% padding (")  # 5 of 32 places


def test_a_row_of_one_token_holds_one(write_shards: WriteShards) -> None:
    rows = PackedRows(TokenShards(write_shards(range(1, 6), ends=[1, 4, 5])), 1)
    assert [(int(row.tokens), int(row.labels)) for row in map(rows.__getitem__, range(5))] == [
        (1, IGNORE_LABEL), (2, 3), (3, 4), (4, IGNORE_LABEL), (5, IGNORE_LABEL)
    ]  # fmt: skip


def test_rows_outside_are_refused(pack: Callable[..., PackedRows]) -> None:
    for number in (-1, 1):
        with pytest.raises(AssertionError, match="no row"):
            pack([8])[number]


def test_shards_that_do_not_say_where_documents_end_are_an_error(
    write_shards: WriteShards,
) -> None:
    folder = write_shards(range(30), ends=[10, 20, 30])
    content = (folder / "documents.bin").read_bytes()
    (folder / "documents.bin").write_bytes(content[:8] * 2 + content[16:])
    with pytest.raises(ConfigError, match=r"documents\.bin has a document without tokens.*again"):
        PackedRows(TokenShards(folder), SEQ_LEN)
    shards = TokenShards(as_format_1(folder))
    for mask, key in [(True, "document_mask = true"), (False, 'packing = "best_fit"')]:
        with pytest.raises(ConfigError, match=rf"^training\.{key}: .*make it again"):
            PackedRows(shards, SEQ_LEN, document_mask=mask)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_packed_rows_go_through_the_loader_and_resume(
    pack: Callable[..., PackedRows], num_workers: int
) -> None:
    rows = pack(CASES["random"], document_mask=True)

    def loader() -> Loader:
        options = {"batch_rank": 0, "batch_degree": 1, "seed": 3, "num_workers": num_workers}
        return Loader(rows, global_batch_size=4, **options)

    whole, resumed = loader(), loader()
    batches = [next(whole) for _ in range(4)]
    resumed.load_state_dict({"consumed_samples": 8})
    for expected in batches[2:]:
        found = next(resumed)
        assert found.positions is not None and expected.positions is not None
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.labels, expected.labels)
        assert torch.equal(found.positions, expected.positions)
    whole.close()
    resumed.close()


# --- sources with a known fault ------------------------------------------------------------------


class Changed(PackedRows):
    """Rows that `change` has spoilt."""

    def __getitem__(self, number: int) -> Row:
        return self.change(super().__getitem__(number))

    def change(self, row: Row) -> Row:
        raise NotImplementedError


class LabelsPadding(Changed):
    def change(self, row: Row) -> Row:
        return row._replace(labels=torch.where(row.tokens == 0, 0, row.labels))


class ForgetsLastLabel(Changed):
    """No label at a row's end, also where a document goes on behind it."""

    def change(self, row: Row) -> Row:
        row.labels[-1] = IGNORE_LABEL
        return row


class PaddingJoinsTheLastDocument(Changed):
    def change(self, row: Row) -> Row:
        if row.positions is not None:
            for place in range(1, SEQ_LEN):
                if row.tokens[place] == 0:
                    row.positions[place] = row.positions[place - 1] + 1
        return row


class CountsThrough(Changed):
    def change(self, row: Row) -> Row:
        return row if row.positions is None else row._replace(positions=torch.arange(SEQ_LEN))


class LosesAToken(Changed):
    def change(self, row: Row) -> Row:
        row.tokens[row.tokens == 40] = 41
        return row


class CutsAnywhere(PackedRows):
    """The stream cut every seq_len tokens."""

    def _pieces(self, number: int) -> list[tuple[int, int, int, int]]:
        begin, pieces = number * SEQ_LEN, []
        stop = min(begin + SEQ_LEN, int(self._ends[-1]))
        while begin < stop:
            end = int(self._ends[np.searchsorted(self._ends, begin, side="right")])
            pieces.append((begin, begin, min(stop, end), end))
            begin = min(stop, end)
        return pieces

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // SEQ_LEN)


class LabelsAcrossDocuments(PackedRows):
    """The mask parts documents, and their labels are those without it."""

    def __getitem__(self, number: int) -> Row:
        masked = super().__getitem__(number)
        self._document_mask = False
        plain = super().__getitem__(number)
        self._document_mask = True
        return masked._replace(labels=plain.labels)


@pytest.mark.parametrize(
    "kind",
    [
        LabelsPadding, ForgetsLastLabel, PaddingJoinsTheLastDocument, CountsThrough, LosesAToken,
        CutsAnywhere, LabelsAcrossDocuments,
    ],
)  # fmt: skip
def test_a_source_with_a_fault_is_seen(
    pack: Callable[..., PackedRows], kind: type[PackedRows]
) -> None:
    rows = pack(RAGGED, kind=kind, document_mask=True)
    with pytest.raises(AssertionError):
        check_rows(rows, RAGGED, document_mask=True)
