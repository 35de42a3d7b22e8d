"""A family: its way from and to the config.json and the tensors of Hugging Face, and its sizes.

A family is data. Its config.json is a table from keys to our fields, read and written by
config_json.py, with two functions for what depends on several of them. Its tensors are a table
from our modules to theirs, and a function where a parameter of ours is a part of one of theirs.
Where a layer has experts it is the other way round: one of our parameters holds those of all
experts, (experts, out, in), and on disk each expert has a tensor of its own, (out, in).

Nothing in this folder imports torch, so a wrong config.json is told at once.
Proven in tests/models/test_families.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_lite.models.config import ModelConfig

Box = tuple[slice, ...]
Values = dict[str, Any]

REQUIRED = object()
FIELDS = {field.name: str(field.type) for field in dataclasses.fields(ModelConfig)}
SIZES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads"
# A row of these of about 5 million parameters, for the tokenizer that ships with the repository.
DEBUG = (6, 256, 768, 8, 4, {"vocab_size": 2048, "max_position_embeddings": 2048})


class Region(NamedTuple):
    """A block of one of our parameters, and the block of a tensor on disk with the same numbers.

    Both are boxes, one slice a dimension, in whole tensors. `transposed`: the last two dimensions
    of the block on disk are swapped. The blocks may differ in dimensions of size one.
    """

    tensor: str
    theirs: Box
    ours: Box
    transposed: bool = False


class Key(NamedTuple):
    """A key of config.json that says how the logits are computed."""

    fields: str = ""  # ours that have its value, separated by spaces; none: Family.read has it
    default: Any = REQUIRED  # transformers' own, where the key is absent
    derive: Callable[[Values], Any] | None = None  # what null and "auto" stand for, from all keys
    kind: str = ""  # of its value, where neither a field of ours nor the default tells

    def fault(self, value: Any) -> str:
        """What is wrong with its value; empty if nothing is."""
        kind = self.kind or ("list | None" if self.default is None else type(self.default).__name__)
        kind = FIELDS[self.fields.split()[0]] if self.fields else kind
        if value is REQUIRED:
            return "is missing"
        is_open = self.derive is not None and value in (None, "auto")
        return "" if is_open or fits(value, kind) else f"= {value!r:.80}: it must be {kind}"


@dataclass(frozen=True)
class Family:
    """What is particular to one model_type of transformers."""

    model_type: str
    architecture: str
    """Class in transformers that computes the logits."""
    keys: Mapping[str, Key]
    """Keys of config.json that are honoured."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ours with the same value in every model of the family."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the one value that is computed; it is transformers' default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys: theirs -> the one in `keys`."""
    harmless: str = ""
    """Keys of config.json that its code never reads, or only to draw fresh weights."""
    read: Callable[[Values], Values] = lambda known: {}
    """Fields of ours that depend on several keys, from all keys and fields. Raises ValueError."""
    write: Callable[[ModelConfig], Values] = lambda config: {}
    """The keys without a field of ours."""
    prefix: str = "model."
    """What the names of all tensors but the head's begin with."""
    modules: str = ""
    """ours=theirs, separated by spaces, for modules with other names; * is the layer's number, and
    # the expert's."""
    place: Callable[[str, Sequence[int]], tuple[Box, bool]] | None = None
    """Where a parameter (name, shape) lies in their tensor, and whether transposed; None: whole."""
    ignorable: tuple[str, ...] = ("*rotary_emb.inv_freq", "lm_head.weight")
    """Shell patterns of stored tensors that may be there beside those of the model; {layers} is
    the number of its layers."""
    columns: str = SIZES
    """Keys of config.json in which the published sizes differ."""
    sizes: Mapping[str, tuple[Values, Mapping[str, Sequence[Any]]]] = field(default_factory=dict)
    """model.name -> keys that all its flavors have, and a row each: columns, then own keys."""

    def regions(self, name: str, shape: Sequence[int]) -> list[Region]:
        """Where the parameter `name` lies on disk; `shape` without rows that are only ours."""
        if ".experts." not in name:
            return [self._region(name, shape)]
        stem, _, projection = name.rpartition(".")
        one = self._region(f"{stem}.#.{projection}.weight", shape[1:])
        return [
            Region(one.tensor.replace("#", str(e)), one.theirs, (slice(e, e + 1), *one.ours))
            for e in range(shape[0])
        ]

    def _region(self, name: str, shape: Sequence[int]) -> Region:
        layer = "".join(re.findall(r"^layers\.(\d+)", name))
        module, _, leaf = re.sub(r"^layers\.\d+", "layers.*", name).rpartition(".")
        names = dict(pair.split("=") for pair in self.modules.split())
        theirs = names.get(module, module).replace("*", layer)
        prefix = "" if module == "lm_head" else self.prefix
        ours = tuple(slice(0, size) for size in shape)
        place = self.place(name, shape) if self.place else (ours, False)
        return Region(f"{prefix}{theirs}.{leaf}", place[0], ours, place[1])


def fits(value: Any, annotation: str) -> bool:
    """Whether a value of JSON or TOML suits an annotation such as "int | None"."""
    names = {name.partition("[")[0] for name in annotation.split(" | ")}
    kind = "None" if value is None else type(value).__name__
    return kind in names or (kind == "int" and "float" in names)


def table(required: str, optional: Mapping[str, Any]) -> dict[str, Key]:
    """Keys of the same name as our fields, or without one; `optional` have a default, or a Key."""
    keys = {name: Key(name) for name in required.split()}
    for name, default in optional.items():
        own = Key(name if name in FIELDS else "", default)
        keys[name] = default if isinstance(default, Key) else own
    return keys


def attention_keys(
    more: Mapping[str, Any], *, kv_heads: int | None = None, epsilon: str = "rms_norm_eps"
) -> dict[str, Key]:
    """The keys of a decoder with rotary attention, and `more`, as in `table`.

    `kv_heads` is the default of num_key_value_heads, `epsilon` the key of the norms' epsilon.
    """
    heads = Key("num_key_value_heads", kv_heads, lambda known: known["num_attention_heads"])
    optional: Values = {"rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False}
    optional |= {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02}
    optional |= {"num_key_value_heads": heads, "head_dim": Key("head_dim", None, head_dim)}
    return table("vocab_size " + SIZES, {**optional, epsilon: Key("rms_norm_eps", 1e-6), **more})


def head_dim(known: Values) -> int:
    """Width of a head that no key states. Raises ValueError where there is none."""
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
    return hidden // heads


def number_of(pattern: Callable[[int], list[Any]], known: Values, key: str, first: int) -> int:
    """The n whose `pattern(n)` is the list, one entry a layer, that `key` gives; null: `first`.

    Raises ValueError where there is none.
    """
    for n in (first, *range(known["num_hidden_layers"] + 1)):
        if known[key] in (None, pattern(n)):
            return n
    raise ValueError(f"{key} = {known[key]}: not a pattern that the layers here can have")
