"""Text to token ids and back, with the begin and end of a document.

`tokenizer.json` knows how to cut text; which of its tokens begin and end a document stands in the
files beside it. A template inside tokenizer.json, a truncation or a padding is switched off: what
is encoded is the text, the whole text and nothing else, and whoever wants a begin adds `bos_id`.

Proven in tests/data/test_tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
import re
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
# How a vocabulary of text spells a space, and a byte that no token of text holds.
SPACE, BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")
PROBE = "a  b\n\té漢🙂."  # one to four bytes a character


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

    def byte_lengths(self) -> list[int] | None:
        """How many bytes of UTF-8 text each id stands for; special tokens stand for none.

        A byte-level vocabulary spells each byte as one character, another one spells text. Over
        the tokens of a document, begin and end included, the lengths add up to those of its text:
        where the tokenizer puts a space before each text, the begin takes it back and counts -1.
        None if they do not add up, as the tokenizer changes text or leaves some of it out.
        """
        is_byte_level = "ByteLevel" in repr(self.implementation.decoder)
        added = self.implementation.get_added_tokens_decoder()
        lengths = [0] * self.vocab_size
        for token, id in self.implementation.get_vocab(with_added_tokens=True).items():
            if not is_byte_level and BYTE.fullmatch(token):
                lengths[id] = 1
            elif id in added:  # found in the text as it is spelt
                lengths[id] = 0 if added[id].special else len(token.encode())
            elif is_byte_level:
                lengths[id] = len(token)
            else:
                lengths[id] = len(token.replace(SPACE, " ").encode())
        too_many = sum(lengths[id] for id in self.encode(PROBE)) - len(PROBE.encode())
        begin = self.eos_id if self.bos_id is None else self.bos_id
        if too_many == 1 and begin is not None:
            lengths[begin] = -1
        return lengths if too_many in (0, 1) else None


def load_tokenizer(
    hf_assets_path: str | Path, *, key: str = "model.hf_assets_path", vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer in the folder `hf_assets_path`, which `key` named.

    Raises ConfigError if it is missing or broken, or if it knows ids that a model of `vocab_size`
    entries does not.
    """
    import tokenizers

    file, key = Path(hf_assets_path) / FILE_NAME, f"{key} = {str(hf_assets_path)!r}"
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
        known = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
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
    if vocab_size is not None and known > vocab_size:
        raise ConfigError(
            f"{key}: {file.resolve()} knows {known} ids and the model's vocabulary has "
            f"{vocab_size}; take the tokenizer that the model was trained with"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(
        tokenizer,
        bos_id=special.get("bos_token"),
        eos_id=special.get("eos_token"),
        vocab_size=known,
        sha256=hashlib.sha256(content).hexdigest(),
    )
