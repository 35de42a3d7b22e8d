"""The front door: read the configuration, build a Trainer, train.

    python train.py --job.config_file train_configs/debug.toml --section.key value ...
    torchrun --nproc_per_node 8 train.py ...

Exit codes: 0 done, 2 a mistake in the configuration or the data it names, anything else a crash.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torchtitan_lite.config import (
    Config,
    ConfigError,
    config_warnings,
    help_for,
    load_and_check,
    to_dict,
)
from torchtitan_lite.launch import process_group, told, world_size
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import model_of

INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(argv: list[str]) -> int:
    """Train as `argv` says; return the exit code."""
    text = help_for(argv)
    if text is not None:
        print(text)
        return 0
    config, model = load_and_check(argv, world_size=world_size(), resolve_model=model_of)
    return run(config, model)


def run(config: Config, model: ModelConfig) -> int:
    """A checked configuration, from the data to the last step."""
    # torch takes seconds to import: --help and a mistyped key need not wait for it.
    from torchtitan_lite.checkpoint.weights import export_files
    from torchtitan_lite.data.opening import open_sources
    from torchtitan_lite.observe.logging import init_logging, logger
    from torchtitan_lite.trainer import Trainer, TrainingStopped

    rank = int(os.environ.get("RANK", "0"))
    init_logging(rank, color=not config.metrics.disable_color_printing)
    if config.job.description:
        logger.info(config.job.description)
    for warning in config_warnings(config, model):
        logger.warning(warning)
    if config.job.print_config:
        logger.info(json.dumps(to_dict(config), indent=2))
    source, held_out = open_sources(config, model.vocab_size)
    if config.checkpoint.enable and config.checkpoint.last_save_in_hf:
        assets, dtype = Path(config.model.hf_assets_path), config.checkpoint.export_dtype
        try:
            export_files(model, assets, dtype=dtype)
        except ConfigError as error:
            lines = str(error).splitlines()
            key = "checkpoint.last_save_in_hf = true: the model cannot be exported"
            raise ConfigError("\n".join(f"{key}: {line}" for line in lines)) from None
    folders = {"job.dump_folder": config.job.dump_folder}
    if config.checkpoint.enable:
        folder = os.path.join(config.job.dump_folder, config.checkpoint.folder)
        folders["checkpoint.folder"] = folder
    for key, folder in folders.items():
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: cannot make the folder {folder!r}: {error}") from None
    with process_group(
        timeout_seconds=config.comm.init_timeout_seconds,
        cpu_offload=config.training.enable_cpu_offload,
    ):
        try:
            Trainer(config, model, source=source, held_out=held_out).train()
        except TrainingStopped as error:
            logger.error(str(error))
            return 1
        except KeyboardInterrupt:
            logger.warning("interrupted; the same command goes on from the newest whole checkpoint")
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # other ranks may be waiting for this one: no leave is taken
    return 0


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))
