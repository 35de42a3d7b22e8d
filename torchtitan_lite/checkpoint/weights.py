"""A model on disk, whoever wrote it, and its way into any mesh and out again.

    step folder of ours         manifest.json names the model and its tokenizer
    folder of step folders      its newest one
    Hugging Face folder         config.json, safetensors, tokenizer files

Generation, evaluation and conversion open what they are given through `find_weights`; it reads a
few small files, so a mistake is told before torch is imported.
Proven in tests/test_convert.py and tests/test_generate_command.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    list_steps,
    read_manifest,
    remove,
    step_folder,
)
from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import config_from_hf, config_to_hf, family_of, regions

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

HF_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# What a tokenizer may consist of: copied into an export where it is there.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the weights of a model are, which model it is, and what its text is cut with."""

    folder: Path
    model: ModelConfig
    hf_assets_path: Path
    is_hf: bool
    dtype: str  # of the weights on disk, as the folder says: "float32", "bfloat16" or "float16"
    named: str = ""  # the option that named it and its value, for messages
    step: int = 0  # of the run that trained it; 0: it comes from Hugging Face

    def precision(self, asked: str = "auto") -> str:
        """What to compute in, "float32" or "bfloat16"; auto: as on disk (float16 fits in fp32)."""
        dtype = self.dtype if asked == "auto" else asked
        return dtype if dtype == "bfloat16" else "float32"


def find_weights(path: str | Path, *, key: str) -> Weights:
    """What lies at `path`. Raises ConfigError, which begins with `key` and the path."""
    folder, named = Path(path), f"{key} = {str(path)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{named}: there is no such folder")
    if not (folder / MANIFEST).is_file() and not (folder / HF_CONFIG).is_file():
        steps, _ = list_steps(folder)
        if not steps:
            nearby = [str(place.parent.parent) for place in folder.glob(f"*/step-*/{MANIFEST}")]
            hint = f"; did you mean {sorted(nearby)[0]}?" if nearby else ""
            raise ConfigError(
                f"{named}: it holds neither {MANIFEST} (a step folder), nor whole step folders, "
                f"nor {HF_CONFIG} (a Hugging Face folder){hint}"
            )
        folder = step_folder(folder, steps[-1])
        logger.info("%s: taking its newest step, %s", named, folder)
    if (folder / MANIFEST).is_file():
        return _ours(folder, named)
    model = config_from_hf(folder, key=named)
    content = json.loads((folder / HF_CONFIG).read_text(encoding="utf-8"))
    dtype = content.get("dtype") or content.get("torch_dtype") or "float32"
    return Weights(folder, model, folder, is_hf=True, named=named, dtype=dtype)


def _ours(folder: Path, named: str) -> Weights:
    try:
        manifest = read_manifest(folder)
        model = ModelConfig(**manifest.model)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{named}: {folder}: {error}") from None
    if not manifest.model:
        raise ConfigError(f"{named}: {folder / MANIFEST} does not say which model it is of")
    assets = Path(manifest.hf_assets_path) if manifest.hf_assets_path else folder
    return Weights(
        folder, model, assets, is_hf=False, named=named, dtype="float32", step=manifest.step
    )


def check_new_folder(folder: Path, *, key: str) -> None:
    """ConfigError, which begins with `key`, where `folder` cannot be made anew."""
    named = f"{key} = {str(folder)!r}"
    if folder.exists():
        raise ConfigError(f"{named}: it is there already; move it away, or name another")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named}: {folder.parent} cannot be made: {error.strerror}") from None
    if not os.access(folder.parent, os.W_OK):
        raise ConfigError(f"{named}: nothing can be written into {folder.parent}")


def load_weights(
    weights: Weights, named_parameters: Mapping[str, Tensor], *, config: ModelConfig | None = None
) -> None:
    """Fill this rank's parameters, plain or of any mesh, on any device; a collective of the world.

    `config` is what the parameters are of, if not of `weights.model`: a warning tells in what they
    differ. Call ParallelModel.after_update() when done. Raises ConfigError for what is damaged or
    of another shape.
    """
    import torch.distributed as dist

    from torchtitan_lite.checkpoint.agreement import agree
    from torchtitan_lite.checkpoint.compare import model_changes
    from torchtitan_lite.checkpoint.manager import CheckpointManager
    from torchtitan_lite.checkpoint.state import model_state

    state = model_state(named_parameters)
    config = config or weights.model
    model = dataclasses.asdict(config)
    if weights.is_hf:
        if changes := model_changes(dataclasses.asdict(weights.model), model):
            logger.warning("%s: the weights are of another model: %s", weights.named, changes)
        agree(
            lambda: _read_hugging_face(weights, state, config),
            doing=f"loading {weights.folder}",
            group=dist.new_group(backend="gloo"),
        )
        logger.info("loaded weights from %s", weights.folder)
    else:
        manager = CheckpointManager(weights.folder.parent, model=model)
        manager.load_from(weights.folder, state, model_only=True)


def _read_hugging_face(weights: Weights, state: Mapping[str, Tensor], model: ModelConfig) -> None:
    from torchtitan_lite.checkpoint.hugging_face import check_tensors, read_index, read_tensors
    from torchtitan_lite.models.decoder import stored_shapes

    family, key = family_of(model), weights.named
    places = regions(model, stored_shapes(model))
    stored = check_tensors(
        read_index(weights.folder, key=key),
        places,
        key=key,
        prefix=family.prefix,
        ignorable=[name.format(layers=model.num_hidden_layers) for name in family.ignorable],
    )
    read_tensors(stored, state, places)


def write_hugging_face(
    folder: Path,
    state: Mapping[str, Tensor],
    model: ModelConfig,
    *,
    hf_assets_path: Path,
    dtype: str,
    replace: bool = False,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; a collective of the world.

    `replace` one that is there. Raises ConfigError where the family cannot say what the model is,
    or the tokenizer knows more ids than the model.
    """
    import torch
    import torch.distributed as dist

    from torchtitan_lite.checkpoint.agreement import on_first_rank
    from torchtitan_lite.checkpoint.hugging_face import write_folder
    from torchtitan_lite.models.decoder import exact_names, stored_shapes

    files = export_files(model, hf_assets_path, dtype=dtype)
    places = regions(model, stored_shapes(model))
    group = dist.new_group(backend="gloo")
    if replace:
        on_first_rank(lambda: remove(folder), doing=f"replacing {folder}", group=group)
    write_folder(
        folder,
        state,
        places,
        dtype=getattr(torch, dtype),
        exact=exact_names(model),
        files=files,
        group=group,
    )
    logger.info("wrote %s", folder)


def export_files(model: ModelConfig, hf_assets_path: Path, *, dtype: str) -> dict[str, str | Path]:
    """What stands beside the tensors of an export: text, or a file to copy, by name."""
    from torchtitan_lite.data.tokenizer import load_tokenizer

    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    copied = [GENERATION_CONFIG]
    if (hf_assets_path / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(hf_assets_path, vocab_size=model.vocab_size)
        special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        copied += TOKENIZER_FILES
    else:
        logger.warning("%s holds no tokenizer.json: exported without a tokenizer", hf_assets_path)
    content = {GENERATION_CONFIG: special, HF_CONFIG: config_to_hf(model, dtype=dtype, **special)}
    files: dict[str, str | Path] = {
        name: json.dumps(fields, indent=2) for name, fields in content.items()
    }
    found = {name: hf_assets_path / name for name in copied}
    return files | {name: path for name, path in found.items() if path.is_file()}
