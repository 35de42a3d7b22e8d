"""The front door: read the configuration, build a Trainer, train.

    python train.py --job.config_file train_configs/debug.toml --section.key value ...
    torchrun --nproc_per_node 8 train.py ...

Exit codes: 0 done, 2 a mistake in the configuration or the data it names, anything else a crash.
"""

from __future__ import annotations

import json
import os
import sys
import time

from torchtitan_lite.config import (
    Config,
    ConfigError,
    config_warnings,
    help_for,
    load_and_check,
    to_dict,
)
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import model_config

USER_MISTAKE = 2
INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(argv: list[str]) -> int:
    """Train as `argv` says; return the exit code."""
    try:
        text = help_for(argv)
        if text is not None:
            print(text)
            return 0
        config, model = load_and_check(
            argv, world_size=int(os.environ.get("WORLD_SIZE", "1")), resolve_model=_model_config
        )
        return run(config, model)
    except ConfigError as error:
        return _refuse(error)


def run(config: Config, model: ModelConfig) -> int:
    """A checked configuration, from the data to the last step."""
    # torch takes seconds to import: --help and a mistyped key need not wait for it.
    from datetime import timedelta

    import torch.distributed as dist

    from torchtitan_lite import device
    from torchtitan_lite.data.opening import open_sources
    from torchtitan_lite.observe.logging import init_logging, logger
    from torchtitan_lite.trainer import Trainer, TrainingStopped

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    init_logging(rank, color=not config.metrics.disable_color_printing)
    if config.job.description:
        logger.info(config.job.description)
    for warning in config_warnings(config, model):
        logger.warning(warning)
    if config.job.print_config:
        logger.info(json.dumps(to_dict(config), indent=2))
    source, held_out = open_sources(config, model.vocab_size)
    folders = {"job.dump_folder": config.job.dump_folder}
    if config.checkpoint.enable:
        folder = os.path.join(config.job.dump_folder, config.checkpoint.folder)
        folders["checkpoint.folder"] = folder
    for key, folder in folders.items():
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: cannot make the folder {folder!r}: {error}") from None
    try:
        kind = device.local_device(int(os.environ.get("LOCAL_RANK", "0"))).type
    except ValueError as error:
        raise ConfigError(str(error)) from None
    backend = device.backend(kind, cpu_offload=config.training.enable_cpu_offload)
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    if world_size > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    try:
        Trainer(config, model, source=source, held_out=held_out).train()
        # Without it a rank may be gone while another still talks to it.
        dist.barrier()
    except TrainingStopped as error:
        logger.error(str(error))
        return 1
    except KeyboardInterrupt:
        logger.warning("interrupted; the same command goes on from the newest whole checkpoint")
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # other ranks may be waiting for this one: nothing to take leave of
    finally:
        dist.destroy_process_group()
    return 0


def _model_config(config: Config) -> ModelConfig:
    return model_config(config.model.name, config.model.flavor, config.model.overrides)


def _refuse(error: ConfigError) -> int:
    """One rank of each machine says what is wrong, and the launcher ends the others.

    They wait for that: one that exits first would have the launcher end the one that speaks. A rank
    that is not ended is alone with its mistake, a damaged row say, and speaks for itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    print(error, file=sys.stderr, flush=True)
    return USER_MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
