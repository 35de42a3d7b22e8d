"""config.json: read by the table of its family, and written so that transformers reads it back.

Nothing in the file that changes the logits is ignored. A key is one of five kinds:

    honoured    sets fields of ours; where it is absent, transformers' default counts
    fixed       asks for what is not computed here: refused with any value but one
    harmless    ids of tokens, how weights were drawn, options of generation: left alone
    null        says nothing
    all others  refused by name, because what is not known may change the logits

The rotary options have two spellings: `rope_theta` and `rope_scaling` until transformers 4, the
table `rope_parameters` since 5. Both are read. The first is written, and `torch_dtype` rather than
`dtype`, because both versions read these. A family may have more keys of two spellings.

Proven in tests/models/test_hf_config.py, where each key of each family is changed in turn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.config import ROPE_TYPES, ModelConfig
from torchtitan_lite.models.families.family import FIELDS, Family, Values

# By their names, ours among them. gelu_new is the same formula as gelu_pytorch_tanh.
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
FIXED = {"is_encoder_decoder": False, "rope_interleaved": False, "use_mrope": False}
HARMLESS = (
    "architectures model_type transformers_version _name_or_path _commit_hash dtype torch_dtype "
    "bos_token_id eos_token_id pad_token_id sep_token_id tokenizer_class is_llama_config "
    "transformers.js_config use_cache output_attentions output_hidden_states return_dict "
    "chunk_size_feed_forward _attn_implementation_autoset problem_type finetuning_task id2label "
    "label2id num_labels task_specific_params do_sample max_length min_length temperature top_k "
    "top_p typical_p num_beams num_return_sequences repetition_penalty length_penalty "
    "no_repeat_ngram_size"
)
# These act in training only, and a family may have no key for them.
NOT_IN_LOGITS = (
    "attention_dropout residual_dropout embedding_dropout initializer_range max_position_embeddings"
)


def read_config(family: Family, content: Values) -> ModelConfig:
    """The model that a config.json describes. Raises ValueError, a line for each problem."""
    problems: list[str] = []
    for alias, name in family.aliases.items():
        if content.get(alias) is not None:
            if content.get(name) not in (None, content[alias]):
                problems.append(f"{alias} and {name}: one of the two is wanted")
            content = {**content, name: content[alias], alias: None}
    if "rope_theta" in family.keys:
        content = _in_old_spelling(family, content, problems)
    known = {name: content.get(name, key.default) for name, key in family.keys.items()}
    faults = {name: key.fault(known[name]) for name, key in family.keys.items()}
    problems += [f"{name} {fault}" for name, fault in faults.items() if fault]
    fixed = {**FIXED, **family.fixed}
    harmless = {*family.keys, *fixed, *HARMLESS.split(), *family.harmless.split()}
    for name, value in content.items():
        if name in fixed and value != fixed[name] and (value or fixed[name]):
            problems.append(f"{name} = {value!r:.80}: only {fixed[name]!r} is computed here")
        if value is not None and name not in harmless:
            fix = "remove it from config.json if it does not"
            if name == "quantization_config":
                fix = "quantised weights are not read, take the model in bf16 or fp32"
            problems.append(f"{name} = {value!r:.80}: unknown, it may change the logits; {fix}")
    if problems:
        raise ValueError("\n".join(problems))
    fields: Values = {"model_type": family.model_type, **family.sets}
    for name, key in family.keys.items():
        if key.derive and known[name] in (None, "auto"):
            known[name] = key.derive(known)
        value = known[name]
        if key.fields == "hidden_act":
            value = ACTIVATIONS.get(value, value)
        fields |= dict.fromkeys(key.fields.split(), value)
    return ModelConfig(**fields | family.read(known | fields))


def _in_old_spelling(family: Family, content: Values, problems: list[str]) -> Values:
    """The content with rope_theta and rope_scaling, whichever way it states them."""
    content = dict(content)
    table, other = content.get("rope_scaling"), content.pop("rope_parameters", None)
    if table and other:
        problems.append("rope_scaling and rope_parameters: one of the two is wanted")
    content["rope_scaling"] = table = table or other or None
    if not isinstance(table, dict):
        return content
    # Null says nothing, but as `truncate`, where transformers takes it for false.
    table = {k: value for k, value in table.items() if value is not None or k == "truncate"}
    kind = table.pop("type", "default")
    kind = table.pop("rope_type", kind)
    if "rope_theta" in table:
        content["rope_theta"] = table.pop("rope_theta")
    if kind == "default" and table:
        problems.append(f"rope_type {kind!r} with {', '.join(table)}: not computed here")
    if "original_max_position_embeddings" in ROPE_TYPES.get(str(kind), ""):
        default = family.keys["max_position_embeddings"].default
        original = content.get("max_position_embeddings", default)
        table.setdefault("original_max_position_embeddings", original)
    content["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **table}
    return content


def write_config(family: Family, config: ModelConfig, **more: Any) -> Values:
    """The content of the config.json from which transformers builds this model, and `more` keys.

    Raises ConfigError, a line for each field that the family's config.json cannot say.
    """
    content: Values = {"architectures": [family.architecture], "model_type": family.model_type}
    content["pad_token_id"] = None  # left out, some families have one that may be no token
    ours = dataclasses.asdict(config)  # a copy: transformers writes into the tables it is given
    for name, key in family.keys.items():
        for field in key.fields.split()[:1]:
            content[name] = ours[field]
        if key.fields == "hidden_act" and content[name] == "gelu_tanh":
            content[name] = key.default if key.default in ACTIVATIONS else "gelu_pytorch_tanh"
    content |= {**family.write(config), **more}
    try:
        back = read_config(family, content)
    except ValueError as error:
        raise ConfigError(f"model_type {family.model_type!r}: {error}") from None
    lost = [name for name in FIELDS if getattr(config, name) != getattr(back, name)]
    problems = [
        f"{name} = {getattr(config, name)!r}: a config.json of model_type {family.model_type!r} "
        f"cannot say it, only {getattr(back, name)!r}"
        for name in lost
        if name not in NOT_IN_LOGITS.split()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return content


def read_sizes(family: Family) -> dict[str, dict[str, ModelConfig]]:
    """model.name -> flavor -> the model that is described by its row in `family.sizes`."""
    names, found = family.columns.split(), dict[str, dict[str, ModelConfig]]()
    for model_name, (common, rows) in family.sizes.items():
        for flavor, row in rows.items():
            content = {**common, **dict(zip(names, row, strict=False))}
            for own in row[len(names) :]:
                content |= own
            found.setdefault(model_name, {})[flavor] = read_config(family, content)
    return found
