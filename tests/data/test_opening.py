"""The keys of the configuration decide how the rows of both data sets are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.test_shards import as_format_1
from torchtitan_lite.config import Config, ConfigError, load_config
from torchtitan_lite.data.loader import held_out_batches
from torchtitan_lite.data.opening import open_held_out, open_sources
from torchtitan_lite.data.sources import IGNORE_LABEL, Row, Source

WriteShards = Callable[..., Path]
LENGTHS = [5, 2, 9, 3, 1, 2, 8, 1, 17, 7]
ENDS = [sum(LENGTHS[: index + 1]) for index in range(len(LENGTHS))]


def configuration(folder: Path | None, *flags: str) -> Config:
    data = "--{0}.dataset=synthetic" if folder is None else "--{0}.dataset_path=" + str(folder)
    both = [data.format("training"), data.format("validation")]
    argv = ["--training.seq_len=8", "--validation.enable", "--model.hf_assets_path=none"]
    return load_config([*argv, *both, *flags])


def rows_of(source: Source) -> list[Row]:
    return [Row(*source[number]) for number in range(min(20, len(source)))]


def both(config: Config) -> list[list[Row]]:
    source, held_out = open_sources(config, 5000)
    assert held_out is not None
    return [rows_of(source), rows_of(held_out)]


@pytest.mark.parametrize("kind", ["tokens", "synthetic"])
def test_the_mask_is_for_the_rows_of_both_data_sets(write_shards: WriteShards, kind: str) -> None:
    folder = write_shards(range(55), ends=ENDS) if kind == "tokens" else None
    plain = both(configuration(folder))
    for rows, masked in zip(
        plain, both(configuration(folder, "--training.document_mask")), strict=True
    ):
        for row, other in zip(rows, masked, strict=True):
            assert row.positions is None and torch.equal(row.tokens, other.tokens)
            assert other.positions is not None
        restarts = torch.stack([row.positions for row in masked if row.positions is not None]) == 0
        labels = [torch.stack([row.labels for row in source]) for source in (rows, masked)]
        assert restarts[:, 1:].any() and not torch.equal(*labels)


def test_best_fit_is_for_the_rows_of_both_data_sets(write_shards: WriteShards) -> None:
    folder = write_shards(range(1, 56), ends=ENDS)
    for mask in ([], ["--training.document_mask"]):
        for rows in both(configuration(folder, "--training.packing=best_fit", *mask)):
            tokens = torch.cat([row.tokens for row in rows])
            assert sorted(tokens[tokens != 0].tolist()) == list(range(1, 56))
            assert all((row.positions is not None) == bool(mask) for row in rows)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("seq_len", [3, 8, 64])
def test_an_evaluation_to_the_end_counts_every_label_once(
    write_shards: WriteShards, packing: str, seq_len: int
) -> None:
    """All tokens but each document's first one, for every length of a row and number of ranks."""
    folder = write_shards(range(55), ends=ENDS)
    flags = [f"--training.packing={packing}", f"--training.seq_len={seq_len}"]
    config = configuration(folder, "--training.document_mask", *flags)
    rows = open_held_out(config, 5000, to_the_end=True)
    for degree in (1, 3):
        options = {"batch_degree": degree, "local_batch_size": 2}
        batches = [
            b for rank in range(degree) for b in held_out_batches(rows, batch_rank=rank, **options)
        ]
        labels = torch.cat([batch.labels.flatten() for batch in batches])
        labels = labels[labels != IGNORE_LABEL]
        assert sorted(labels.tolist()) == sorted(set(range(55)) - {0, *ENDS})


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--training.document_mask", "training.document_mask = true"),
        ("--training.packing=best_fit", 'training.packing = "best_fit"'),
    ],
)
def test_shards_without_documents_are_refused_in_one_line(
    write_shards: WriteShards, flag: str, key: str
) -> None:
    folder = as_format_1(write_shards(range(55), ends=ENDS))
    assert len(both(configuration(folder))[0]) == 6
    with pytest.raises(ConfigError) as error:
        open_sources(configuration(folder, flag), 5000)
    assert str(error.value).startswith(f"{key}: {folder} does not say where documents end")
    assert "scripts/prepare_data.py" in str(error.value) and "\n" not in str(error.value)
