"""The rows of a step depend on (seed, step) alone, and one integer resumes them exactly.

Each claim is a function over a kind of loader; the last tests give it loaders with a known fault,
and it must go red.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.loader import Batch, Loader, held_out_batches, sample_rows
from torchtitan_lite.data.order import permute
from torchtitan_lite.data.sources import IGNORE_LABEL, Row, Source, SyntheticRows

NUM_ROWS = 37
GLOBAL_BATCH = 8


class NumberedRows:
    """Row r holds nothing but the number r."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), row), torch.full((2,), row)


class World:
    """The loaders of all batch ranks, stepped together as a trainer does."""

    def __init__(
        self,
        kind: Callable[..., Loader],
        *,
        degree: int = 1,
        global_batch: int = GLOBAL_BATCH,
        **options: Any,
    ) -> None:
        settings = {"seed": 3, **options}
        self.loaders = [
            kind(
                NumberedRows(),
                global_batch_size=global_batch,
                batch_rank=rank,
                batch_degree=degree,
                **settings,
            )
            for rank in range(degree)
        ]

    def step(self) -> list[int]:
        """Rows of the next global batch, in rank order."""
        return [int(row) for loader in self.loaders for row in next(loader).tokens[:, 0]]

    def steps(self, count: int) -> list[int]:
        return [row for _ in range(count) for row in self.step()]

    def close(self) -> dict[str, int]:
        """Stop; what all ranks agree on as their state."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        for loader in self.loaders:
            loader.close()
        return states[0]

    def load(self, state: dict[str, int]) -> World:
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self


def check_each_epoch_visits_each_row_once_in_its_own_order(kind: Callable[..., Loader]) -> None:
    rows = World(kind).steps(3 * NUM_ROWS // GLOBAL_BATCH + 1)
    epochs = [rows[NUM_ROWS * epoch : NUM_ROWS * (epoch + 1)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def check_resuming_is_exact(kind: Callable[..., Loader], *, num_workers: int) -> None:
    """Stops after 1, 3 (twice in epoch 0), 6 and 11 steps (over the ends of two epochs)."""
    whole = World(kind).steps(15)
    found: list[int] = []
    state = {"consumed_samples": 0}
    for count in (1, 2, 3, 5, 4):
        world = World(kind, num_workers=num_workers).load(state)
        found += world.steps(count)
        state = world.close()
    assert found == whole
    assert state == {"consumed_samples": 15 * GLOBAL_BATCH}


def check_rows_do_not_depend_on_the_mesh(kind: Callable[..., Loader], *, num_workers: int) -> None:
    whole = World(kind).steps(6)
    for degree in (2, 4) if num_workers else (2, 4, 8):
        world = World(kind, degree=degree, num_workers=num_workers)
        assert world.steps(6) == whole
        world.close()


def test_each_epoch_visits_each_row_once_in_its_own_order() -> None:
    check_each_epoch_visits_each_row_once_in_its_own_order(Loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_is_exact_twice_in_an_epoch_and_across_its_end(num_workers: int) -> None:
    check_resuming_is_exact(Loader, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_do_not_depend_on_the_mesh(num_workers: int) -> None:
    check_rows_do_not_depend_on_the_mesh(Loader, num_workers=num_workers)


def test_workers_and_how_far_they_read_ahead_change_nothing() -> None:
    whole = World(Loader).steps(8)
    for num_workers, prefetch_factor in [(1, 1), (2, 5)]:
        world = World(Loader, num_workers=num_workers, prefetch_factor=prefetch_factor)
        assert world.steps(8) == whole
        assert world.close() == {"consumed_samples": 8 * GLOBAL_BATCH}


def test_a_chain_of_meshes_and_batch_sizes_reads_the_rows_of_the_run_never_stopped() -> None:
    whole = World(Loader).steps(20)
    found: list[int] = []
    state = {"consumed_samples": 0}
    for degree, global_batch, workers, count in [(4, 8, 0, 3), (1, 6, 2, 2), (2, 16, 0, 4)]:
        world = World(Loader, degree=degree, global_batch=global_batch, num_workers=workers)
        found += world.load(state).steps(count)
        state = world.close()
    assert state == {"consumed_samples": 3 * 8 + 2 * 6 + 4 * 16}
    assert found == whole[: len(found)]


def test_a_global_batch_larger_than_the_source_spans_epochs() -> None:
    rows = World(Loader, global_batch=100).step()
    assert max(Counter(rows).values()) == 3 and min(Counter(rows).values()) == 2
    assert sorted(rows[:NUM_ROWS]) == list(range(NUM_ROWS))
    assert sorted(rows[NUM_ROWS : 2 * NUM_ROWS]) == list(range(NUM_ROWS))


def test_another_seed_is_another_order() -> None:
    assert World(Loader, seed=4).steps(3) != World(Loader, seed=5).steps(3)


def test_loading_a_state_in_mid_run_drops_what_was_read_ahead() -> None:
    whole = World(Loader).steps(4)
    world = World(Loader, num_workers=2)
    world.steps(3)
    world.load({"consumed_samples": GLOBAL_BATCH})
    assert world.steps(3) == whole[GLOBAL_BATCH:]
    world.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_tokens_and_labels_of_a_rank_s_rows(num_workers: int) -> None:
    source = SyntheticRows(50, 16, num_rows=9, seed=0, ignore_fraction=0.3)
    loader = Loader(
        source,
        global_batch_size=6,
        batch_rank=1,
        batch_degree=2,
        seed=0,
        num_workers=num_workers,
    )
    batch = next(loader)
    assert isinstance(batch, Batch)
    assert batch.tokens.shape == batch.labels.shape == (3, 16)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    rows = permute(torch.arange(3, 6).numpy(), 9, seed=0, epoch=0).tolist()
    assert torch.equal(batch.labels, torch.stack([source[row][1] for row in rows]))
    loader.close()


class Documents(NumberedRows):
    """Rows of four tokens with the positions given for each."""

    def __init__(self, positions: list[list[int] | None], *, plain: bool = False) -> None:
        super().__init__(len(positions))
        self.positions, self.plain = positions, plain

    def __getitem__(self, row: int) -> Any:
        given = self.positions[row]
        positions = None if given is None else torch.tensor(given)
        fields = (torch.full((4,), row), torch.full((4,), row), positions)
        return fields if self.plain else Row(*fields)


def batch_of(source: Source, *, num_workers: int = 0) -> Batch:
    """The only global batch of an epoch of `source`, rows in their own order."""
    loader = Loader(
        source,
        global_batch_size=len(source),
        batch_rank=0,
        batch_degree=1,
        seed=0,
        num_workers=num_workers,
    )
    try:
        batch = next(loader)
    finally:
        loader.close()
    order = batch.tokens[:, 0].argsort()
    positions = None if batch.positions is None else batch.positions[order]
    return batch._replace(tokens=batch.tokens[order], positions=positions)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_positions_come_with_the_rows(num_workers: int, plain: bool) -> None:
    given: list[list[int] | None] = [[0, 1, 2, 3], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    batch = batch_of(Documents(given, plain=plain), num_workers=num_workers)
    assert batch.positions is not None and batch.positions.dtype == torch.int64
    assert batch.positions.tolist() == given
    # A row without them is one document; a batch without any has none.
    batch = batch_of(Documents([None, [0, 1, 0, 1]], plain=plain), num_workers=num_workers)
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch_of(Documents([None, None]), num_workers=num_workers).positions is None
    assert batch_of(NumberedRows(3), num_workers=num_workers).positions is None


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "positions",
    [[1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2], [0, 1, 2, 1], [0, -1, 0, 1], [0, 1, 2], [0] * 5],
)
def test_positions_that_are_none_are_one_line_that_names_the_row(
    positions: list[int], num_workers: int
) -> None:
    source = Documents([[0, 1, 2, 3], [0, 1, 0, 1], positions])
    with pytest.raises(ConfigError) as error:
        batch_of(source, num_workers=num_workers)
    assert str(error.value).startswith("row 2 of Documents: its positions are not 0, 1, 2 ... from")
    assert "must start the row at 0" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^row 2 of Documents"):
        list(held_out_batches(source, batch_rank=0, batch_degree=1, local_batch_size=3))


def test_rows_held_out_and_those_that_fill_up_have_positions() -> None:
    source = Documents([[0, 0, 1, 2], [0, 1, 0, 1], [0, 1, 2, 0]])
    for degree in (1, 2):
        ranks = [
            list(held_out_batches(source, batch_rank=rank, batch_degree=degree, local_batch_size=2))
            for rank in range(degree)
        ]
        batches = [batch for step in zip(*ranks, strict=True) for batch in step]
        assert all(batch.positions is not None for batch in batches)
        found = torch.cat([batch.positions for batch in batches if batch.positions is not None])
        assert found[:3].tolist() == source.positions and found.shape == (4, 4)
    plain = list(
        held_out_batches(NumberedRows(3), batch_rank=0, batch_degree=1, local_batch_size=2)
    )
    assert [batch.positions for batch in plain] == [None, None]


def test_reading_ahead_does_not_move_the_random_numbers_of_training() -> None:
    before = torch.get_rng_state()
    world = World(Loader, num_workers=2)
    world.steps(3)
    world.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_closing_ends_the_workers_also_without_garbage_collection() -> None:
    gc.disable()
    try:
        world = World(Loader, num_workers=2)
        world.step()
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        world.close()
        deadline = time.monotonic() + 5
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


class FailingRows(NumberedRows):
    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError(f"row {row} cannot be read")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_row_that_cannot_be_read_ends_the_run_with_its_reason(num_workers: int) -> None:
    loader = Loader(
        FailingRows(),
        global_batch_size=1,
        batch_rank=0,
        batch_degree=1,
        seed=0,
        num_workers=num_workers,
    )
    with pytest.raises(KeyError, match="cannot be read"):
        next(loader)
    assert loader.state_dict() == {"consumed_samples": 0}
    started = time.monotonic()
    loader.close()
    del loader
    gc.collect()
    assert time.monotonic() - started < 4  # left to the garbage collector it takes 5 s a worker


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class LargeRows(NumberedRows):
    """32 KiB of tokens and labels a row."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2048, dtype=torch.int64), torch.zeros(2048, dtype=torch.int64)


def growth_over_2000_rows(*, num_workers: int, kept: list[Batch]) -> int:
    """Bytes by which the process grows; `kept` receives the batches if it is not empty."""
    loader = Loader(
        LargeRows(),
        global_batch_size=8,
        batch_rank=0,
        batch_degree=1,
        seed=0,
        num_workers=num_workers,
    )
    for _ in range(50):
        next(loader)
    before = resident_bytes()
    for _ in range(250):  # 62 MiB of rows, if they were kept
        batch = next(loader)
        if kept:
            kept.append(batch)
    after = resident_bytes()
    loader.close()
    return after - before


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux counts pages")


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
def test_2000_rows_do_not_make_the_process_larger(num_workers: int) -> None:
    assert growth_over_2000_rows(num_workers=num_workers, kept=[]) < 16 << 20


@needs_proc
def test_a_loader_that_keeps_its_batches_is_seen() -> None:
    first = Batch(torch.empty(0), torch.empty(0))
    assert growth_over_2000_rows(num_workers=0, kept=[first]) > 32 << 20


# Loaders with a known fault: the checks above must see it.


class StateCountsPrefetched(Loader):
    """Its state is what the workers were sent, as a loader's own position would be."""

    def _rows_from(self, consumed_samples: int) -> Iterator[list[int]]:
        for rows in super()._rows_from(consumed_samples):
            self.sent = getattr(self, "sent", consumed_samples) + GLOBAL_BATCH
            yield rows

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.sent}


class IgnoresTheEpoch(Loader):
    """The same order in each epoch."""

    def _rows_from(self, consumed_samples: int) -> Iterator[list[int]]:
        while True:
            samples = np.arange(consumed_samples, consumed_samples + GLOBAL_BATCH) % NUM_ROWS
            yield sample_rows(samples, num_rows=NUM_ROWS, seed=self.seed).tolist()
            consumed_samples += GLOBAL_BATCH


class RestartsTheEpoch(Loader):
    """Resumes at the beginning of the epoch."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        consumed = state["consumed_samples"]
        super().load_state_dict({"consumed_samples": consumed - consumed % NUM_ROWS})


class StridesByRank(Loader):
    """Rank b takes samples b, b + degree, ... of the batch: another order on another mesh."""

    def _rows_from(self, consumed_samples: int) -> Iterator[list[int]]:
        while True:
            samples = np.arange(consumed_samples, consumed_samples + GLOBAL_BATCH)
            samples = samples[self.batch_rank :: self.batch_degree]
            yield sample_rows(samples, num_rows=NUM_ROWS, seed=self.seed).tolist()
            consumed_samples += GLOBAL_BATCH


def test_a_state_that_counts_prefetched_batches_is_seen() -> None:
    check_resuming_is_exact(StateCountsPrefetched, num_workers=0)  # nothing is read ahead
    with pytest.raises(AssertionError):
        check_resuming_is_exact(StateCountsPrefetched, num_workers=2)


def test_a_loader_that_ignores_the_epoch_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_each_epoch_visits_each_row_once_in_its_own_order(IgnoresTheEpoch)


def test_a_loader_that_restarts_the_epoch_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_resuming_is_exact(RestartsTheEpoch, num_workers=0)


def test_an_order_that_depends_on_the_mesh_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_rows_do_not_depend_on_the_mesh(StridesByRank, num_workers=0)


# Validation.


def held_out(degree: int, *, local: int, num_rows: int = NUM_ROWS) -> list[list[Batch]]:
    return [
        list(
            held_out_batches(
                NumberedRows(num_rows),
                batch_rank=rank,
                batch_degree=degree,
                local_batch_size=local,
            )
        )
        for rank in range(degree)
    ]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("local", [1, 3, 8])
@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
def test_validation_sees_each_row_once_in_equally_many_batches(
    degree: int, local: int, num_rows: int
) -> None:
    ranks = held_out(degree, local=local, num_rows=num_rows)
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert all(batch.tokens.shape == (local, 2) for batch in batches)
    labels = torch.cat([batch.labels for batch in batches])[:, 0]
    assert labels[labels != IGNORE_LABEL].tolist() == list(range(num_rows))
    fillers = torch.cat([batch.tokens for batch in batches])[labels == IGNORE_LABEL]
    assert bool((fillers == 0).all())


def test_validation_does_not_move_training() -> None:
    source = NumberedRows()
    loader = Loader(source, global_batch_size=8, batch_rank=0, batch_degree=1, seed=3)
    undisturbed = World(Loader).steps(2)
    rows = next(loader).tokens[:, 0].tolist()
    random_state = torch.get_rng_state()
    list(held_out_batches(source, batch_rank=0, batch_degree=1, local_batch_size=4))
    rows += next(loader).tokens[:, 0].tolist()
    assert rows == undisturbed and torch.equal(torch.get_rng_state(), random_state)
