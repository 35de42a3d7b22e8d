"""Text to token ids and back, with the begin and end of a document.

`tokenizer.json` knows how to cut text; which of its tokens begin and end a document stands in the
files beside it. Special tokens are added here and only here: a template inside tokenizer.json,
a truncation or a padding is switched off, so that what is encoded is the whole text, once.

Proven in tests/data/test_tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
# Where bos_token and eos_token are looked up, the first file that has them wins.
SPECIAL_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer:
    """A tokenizer.json with its begin (bos) and end (eos) tokens; either may be None."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_id: int | None,
        sha256: str,
    ) -> None:
        self._tokenizer = tokenizer
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.sha256 = sha256  # of the bytes of tokenizer.json
        # Ids may have gaps, so the largest id counts and not the number of entries.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of `text`; a bos or eos that the tokenizer lacks must not be asked for."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos:
            assert self.bos_id is not None, "this tokenizer has no begin token"
            ids = [self.bos_id, *ids]
        if add_eos:
            assert self.eos_id is not None, "this tokenizer has no end token"
            ids = [*ids, self.eos_id]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without bos and eos, on all threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without bos, eos and their like unless asked for."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """The tokenizer in the folder `hf_assets_path`; ConfigError if it is missing or broken."""
    import tokenizers

    folder = Path(hf_assets_path)
    file = folder / FILE_NAME
    if not file.is_file():
        what = f"holds no {FILE_NAME}" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"model.hf_assets_path = {str(hf_assets_path)!r}: {folder.resolve()} {what}; name a "
            "folder that has one, or train one with scripts/train_tokenizer.py"
        )
    content = file.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise _broken(file, str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.get_vocab_size() == 0:
        raise _broken(file, "its vocabulary is empty")
    return Tokenizer(
        tokenizer,
        bos_id=_special_id(folder, "bos_token", tokenizer),
        eos_id=_special_id(folder, "eos_token", tokenizer),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _special_id(folder: Path, name: str, tokenizer: tokenizers.Tokenizer) -> int | None:
    for file in (folder / file_name for file_name in SPECIAL_TOKEN_FILES):
        token = _read_object(file).get(name) if file.is_file() else None
        if isinstance(token, dict):  # an AddedToken, written out with its flags
            token = token.get("content")
        if token is None:
            continue
        token_id: int | None = tokenizer.token_to_id(token)
        if token_id is None:
            raise _broken(file, f"{name} {token!r} is not in the vocabulary of {FILE_NAME}")
        return token_id
    return None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _broken(file, str(error)) from error
    if not isinstance(value, dict):
        raise _broken(file, "it is not a JSON object")
    return value


def _broken(file: Path, reason: str) -> ConfigError:
    one_line = " ".join(reason.split())
    return ConfigError(
        f"model.hf_assets_path = {str(file.parent)!r}: {file.resolve()} cannot be used: "
        f"{one_line}; copy it again from where it came"
    )
