"""Text to token ids and back, with the begin and end of a document.

`tokenizer.json` knows how to cut text; which of its tokens begin and end a document stands in the
files beside it. A template inside tokenizer.json, a truncation or a padding is switched off: what
is encoded is the text, the whole text and nothing else, and whoever wants a begin adds `bos_id`.

Proven in tests/data/test_tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lite.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
# Where bos_token and eos_token are looked up, the first file that has them wins.
SPECIAL_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass
class Tokenizer:
    """A tokenizer.json with its begin (bos) and end (eos) tokens; either may be None."""

    implementation: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    vocab_size: int  # the largest id and one
    sha256: str  # of the bytes of tokenizer.json

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without bos and eos."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without bos and eos, on all threads."""
        encodings = self.implementation.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without bos, eos and their like unless asked for."""
        text: str = self.implementation.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """The tokenizer in the folder `hf_assets_path`; ConfigError if it is missing or broken."""
    import tokenizers

    file, key = Path(hf_assets_path) / FILE_NAME, f"model.hf_assets_path = {str(hf_assets_path)!r}"
    if not file.is_file():
        raise ConfigError(
            f"{key}: there is no {file.resolve()}; name a folder that has one, or train one with "
            "scripts/train_tokenizer.py"
        )
    content = file.read_bytes()
    special: dict[str, int | None] = {}
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # Ids may have gaps, so the largest id counts and not the number of entries.
        vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        # `file` is the one that the message names.
        for file in filter(Path.is_file, (file.with_name(name) for name in SPECIAL_TOKEN_FILES)):
            fields = json.loads(file.read_text(encoding="utf-8"))
            for name in ("bos_token", "eos_token"):
                token = fields.get(name)
                if isinstance(token, dict):  # an AddedToken, written out with its flags
                    token = token.get("content")
                if token is not None and name not in special:
                    special[name] = tokenizer.token_to_id(token)
                    if special[name] is None:
                        raise ValueError(f"{name} {token!r} is not in the vocabulary")
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise ConfigError(
            f"{key}: {file.resolve()} cannot be used: {' '.join(str(error).split())}; copy it "
            "again from where it came"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(
        tokenizer,
        bos_id=special.get("bos_token"),
        eos_id=special.get("eos_token"),
        vocab_size=vocab_size,
        sha256=hashlib.sha256(content).hexdigest(),
    )
