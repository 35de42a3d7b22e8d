"""Configuration -> the rows to train on and the rows held out."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.config import Config, validation_seq_len
from torchtitan_lite.data.packing import PackedRows
from torchtitan_lite.data.prepare import prepare
from torchtitan_lite.data.shards import INDEX_NAME, TokenShards
from torchtitan_lite.data.sources import Source, SyntheticRows, TokenRows
from torchtitan_lite.data.tokenizer import load_tokenizer

SYNTHETIC_ROWS = 1 << 20  # more than a run that tries things out will read


def open_sources(config: Config, vocab_size: int) -> tuple[Source, Source | None]:
    """The rows to train on and, when asked for, the rows held out; ids are below `vocab_size`.

    Text is tokenised here, which may take longer than a collective may wait: call it before the
    process group is up. Raises ConfigError for data that is missing, bad or of another vocabulary.
    """
    source = _open(config, "training", vocab_size)
    return source, open_held_out(config, vocab_size) if config.validation.enable else None


def open_held_out(config: Config, vocab_size: int, *, to_the_end: bool = False) -> Source:
    """The rows held out, as `open_sources` has them; `to_the_end`: an incomplete last one too.

    They are cut, packed and masked as those to train on.
    """
    return _open(config, "validation", vocab_size, to_the_end=to_the_end)


def _open(config: Config, section: str, vocab_size: int, *, to_the_end: bool = False) -> Source:
    training, validation = config.training, config.validation
    kind, path, seq_len = {
        "training": (training.dataset, training.dataset_path, training.seq_len),
        "validation": (validation.dataset, validation.dataset_path, validation_seq_len(config)),
    }[section]
    document_mask = training.document_mask
    if kind == "synthetic":
        return SyntheticRows(
            vocab_size,
            seq_len,
            num_rows=SYNTHETIC_ROWS,
            seed=config.debug.seed + (section == "validation"),
            document_mask=document_mask,
        )
    key = f"{section}.dataset_path"
    folder = Path(path)
    is_prepared = kind == "tokens" or (kind == "auto" and (folder / INDEX_NAME).is_file())
    # Prepared shards need no tokenizer; one that is there must be the one they were made with.
    if not is_prepared or (Path(config.model.hf_assets_path) / "tokenizer.json").is_file():
        folder = prepare(
            kind,
            path,
            load_tokenizer(config.model.hf_assets_path),
            cache=training.token_cache,
            text_column=training.dataset_text_column,
            key=key,
        )
    shards = TokenShards(folder, key=key)
    shards.check_vocabulary(vocab_size)
    if training.packing == "best_fit":  # every document is in some row, to the end
        return PackedRows(shards, seq_len, document_mask=document_mask)
    return TokenRows(
        shards,
        seq_len,
        to_the_end=to_the_end,
        document_mask=document_mask,
        key=f"{key} = {path!r}",
    )
