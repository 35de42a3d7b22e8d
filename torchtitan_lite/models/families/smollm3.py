"""SmolLM3: Llama whose every fourth layer rotates nothing (NoPE, arXiv:2501.18795), head tied.

transformers lists the layers: 1 in `no_rope_layers` is one that does rotate. A sliding window,
which its code has for the layers that do not, is refused: no published model uses it.
"""

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families.family import DEBUG, Family, Values, attention_keys, number_of
from torchtitan_lite.models.families.llama import BIASES


def _rotates(num_layers: int, interval: int) -> list[int]:
    return [int(interval == 0 or (i + 1) % interval != 0) for i in range(num_layers)]


def _read(known: Values) -> Values:
    layers, interval = known["num_hidden_layers"], known["no_rope_layer_interval"]
    number_of(lambda _: ["full_attention"] * layers, known, "layer_types", 0)
    interval = number_of(lambda n: _rotates(layers, n), known, "no_rope_layers", interval)
    return {"no_rope_layer_interval": interval}


def _write(config: ModelConfig) -> Values:
    return {"no_rope_layers": _rotates(config.num_hidden_layers, config.no_rope_layer_interval)}


_KEYS: Values = {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
_KEYS |= {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, **BIASES}
_3B = {"vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5e6}
_SIZES = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": DEBUG,
    "3B": (36, 2048, 11008, 16, 4, _3B),
}
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    attention_keys(_KEYS, kv_heads=4),
    fixed={"use_sliding_window": False},
    harmless="sliding_window max_window_layers pretraining_tp",
    read=_read,
    write=_write,
    sizes={"smollm3": ({}, _SIZES)},
)
