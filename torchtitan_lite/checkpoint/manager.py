"""The checkpoints of one run: saved whole or not at all, verified when loaded.

    save    state -> (copy if async) -> DCP into step-N.tmp -> hash -> manifest -> rename -> prune
            `- training thread -----'   `- training thread, or the writer thread if async -------'
    load    newest step with a manifest -> hash -> compare names and shapes -> DCP -> state

All ranks call each method together; all return, or all raise the same error. At most one
asynchronous save is in flight. The writer thread runs the very function of a synchronous save,
over a gloo group of its own, because two threads that share a group mix up their collectives. Its
failure surfaces in `poll`, on all ranks at the same step: ranks finish writing at different times,
so they ask each other first (one tiny all-reduce a step, only while a save is in flight).

Proven in tests/checkpoint/: test_manager.py, test_load.py, test_async.py, test_crash.py.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_lite.checkpoint.agreement import Result, agree, on_first_rank
from torchtitan_lite.checkpoint.compare import model_changes, what_to_load
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    list_steps,
    measure,
    prune,
    publish,
    read_manifest,
    remove,
    step_folder,
    temporary_folder,
    verify,
    write_manifest,
)
from torchtitan_lite.checkpoint.state import PART_PREFIXES, State, part_of
from torchtitan_lite.config import ConfigError
from torchtitan_lite.device import device_of_this_thread

logger = logging.getLogger(__name__)

# A collective of a training step is late after a minute or two. One of a save waits for the slowest
# disk of all ranks: another order of time, hence groups of our own.
PATIENCE = timedelta(minutes=30)


class CheckpointManager:
    """Saves to and loads from one folder; see the module's docstring for the order of things.

    folder: where the step folders go; made at the first save.
    keep_latest_k: how many whole checkpoints stay after a save; 0: all.
    async_mode: "disabled", "async" (write from a copy while training goes on) or
        "async_with_pinned_mem" (copy in the background too, into pinned memory).
    Building a manager is a collective of the world, whatever the world's own backend.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_latest_k: int = 0,
        async_mode: str = "disabled",
        model: Mapping[str, Any] | None = None,
        hf_assets_path: str = "",
    ) -> None:
        self.folder = Path(folder)
        self._keep_latest_k = keep_latest_k
        self._model = dict(model or {})
        self._assets = str(Path(hf_assets_path).resolve()) if hf_assets_path else ""
        self._damaged: set[int] = set()  # steps that a load found to be so
        self._own: set[int] = set()  # steps of this run: what it wrote and where it began
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        # A world of one exchanges nothing. DCP would still send its plans through gloo, whose
        # thread then keeps OpenMP workers of its own, and two pools share the cores ever after
        # (docs/performance.md).
        self._alone = dist.get_world_size(self._group) == 1
        if self._alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by us, knowingly
        self._rank = dist.get_rank(self._group)
        self._in_flight: Future[None] | None = None
        self._staging: Future[State] | None = None
        self._stager: DefaultStager | None = None
        self._writer_group = self._group
        if async_mode == "disabled":
            return
        pinned = async_mode == "async_with_pinned_mem"
        if pinned and not torch.accelerator.is_available():
            logger.info("checkpoint.async_mode = %s: no accelerator, so plain async", async_mode)
            pinned = False
        self._staging_options = StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=pinned,
            use_non_blocking_copy=pinned,
        )
        self._stager = self._new_stager()
        self._writer_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._writer = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=device_of_this_thread()
        )

    def _new_stager(self) -> DefaultStager:
        stager = DefaultStager(self._staging_options)
        if stager._staging_executor is not None:
            stager._staging_executor.submit(device_of_this_thread()).result()
        return stager

    def save(self, step: int, state: Mapping[str, Tensor], *, model_only: bool = False) -> None:
        """Save `state` as `step`; a whole one that this run wrote or began from is left as it is.

        model_only keeps the weights alone, for export: no run resumes from it. Synchronous: the
        checkpoint counts on return. Asynchronous: it returns once the state is copied (pinned: at
        once, see `wait_for_staging`), after the previous save is done. Raises CheckpointError on
        all ranks when it, or the previous asynchronous one, failed on any; then nothing counts.
        """
        self._settle()
        folder = step_folder(self.folder, step)
        calls = agree(
            lambda: (step, model_only, folder.exists()), doing=f"saving {folder}", group=self._group
        )
        assert len({call[:2] for call in calls}) == 1, f"the ranks save different things: {calls}"
        if calls[0][2]:
            problems = self._problems(folder) or ["of another run"] * (step not in self._own)
            if not problems:
                logger.info("%s is there already and stays as it is", folder)
                return
            logger.warning("%s is replaced: %s", folder, "; ".join(problems))
        self._own.add(step)
        wanted = {key: state[key] for key in state if part_of(key) == "model" or not model_only}
        staged = self._stage(wanted)
        if self._stager is None:
            self._write(step, staged, model_only)
            return
        self._staging = staged
        self._in_flight = self._writer.submit(self._write, step, staged, model_only)

    def poll(self) -> None:
        """Once a step, on all ranks: raise CheckpointError if the save in flight has failed.

        Costs nothing without a save in flight. With one, all ranks learn whether all are done; only
        then does any of them look at the result.
        """
        if self._in_flight is None:
            return
        all_done = torch.tensor(int(self._in_flight.done()))
        dist.all_reduce(all_done, op=dist.ReduceOp.MIN, group=self._group)
        if all_done.item():
            self._settle()

    def wait_for_staging(self) -> None:
        """Before optimizer.step: wait until the save in flight has copied what the step changes."""
        if self._staging is not None:
            wait([self._staging])  # a failure is the writer's, and surfaces in poll on all ranks
            self._staging = None

    def finish(self) -> None:
        """At the end of a run: wait for the save in flight, raise if it failed, free the copies.

        A save after it is synchronous.
        """
        try:
            self._settle()
        finally:
            if self._stager is not None:
                self._writer.shutdown()
                self._stager.close()
                self._stager = None

    def _settle(self) -> None:
        """Wait for the save in flight, if any, and raise its failure on all ranks."""
        if self._in_flight is None:
            return
        written, self._in_flight, self._staging = self._in_flight, None, None
        agree(written.result, doing=f"asynchronous save into {self.folder}", group=self._group)

    def _stage(self, state: State) -> Future[State]:
        """The future of what is to be written: `state` itself, or its copy on the host."""
        staged: Future[State] = Future()
        try:
            if self._stager is not None:
                if torch.__version__ < "2.13":  # whose stagers serve once
                    self._stager.close()
                    self._stager = self._new_stager()
                if torch.accelerator.is_available():
                    # A pinned copy runs on its own stream and must not overtake the last update.
                    torch.accelerator.synchronize()
                copy = self._stager.stage(state)
                if isinstance(copy, Future):
                    return copy
                state = copy
            staged.set_result(state)
        except Exception as error:  # surfaces in _write, where all ranks learn of it
            staged.set_exception(error)
        return staged

    def _write(self, step: int, staged: Future[State], model_only: bool) -> None:
        """Write, hash, publish and prune; the same on either thread. A collective."""
        begin, folder, group = time.monotonic(), step_folder(self.folder, step), self._writer_group
        temporary, doing = temporary_folder(self.folder, step), f"saving {folder}"

        def clear_the_way() -> None:
            staged.result()
            if self._rank == 0:
                remove(temporary)  # of a save that was cut short

        def write_own() -> dict[str, FileRecord]:
            writer = dcp.FileSystemWriter(temporary)
            dcp.save(
                staged.result(), storage_writer=writer, process_group=group, no_dist=self._alone
            )
            names = [path.name for path in temporary.glob(f"__{self._rank}_*")]
            if self._rank == 0:
                names.append(".metadata")
            return {name: measure(temporary / name) for name in names}

        def complete() -> None:
            write_manifest(temporary, Manifest(step, model_only, files, self._model, self._assets))
            publish(self.folder, step)

        # No rank may enter DCP's collectives before all know that all have their copy.
        agree(clear_the_way, doing=doing, group=group)
        shares = agree(write_own, doing=doing, group=group)
        files = {name: record for share in shares for name, record in share.items()}
        on_first_rank(complete, doing=doing, group=group)
        mebibytes = sum(record["size"] for record in files.values()) / 2**20
        logger.info("saved %s: %.1f MiB in %.1f s", folder, mebibytes, time.monotonic() - begin)
        self._prune(step)

    def _prune(self, step: int) -> None:
        if self._rank != 0:
            return
        key = f"checkpoint.keep_latest_k = {self._keep_latest_k}"
        try:
            removed = prune(
                self.folder,
                keep_latest_k=self._keep_latest_k,
                saved_step=step,
                damaged=self._damaged - {step},
            )
        except OSError as error:
            # The save stands, and the next one tries again: no reason to end a run.
            logger.warning("%s: cannot remove an old checkpoint: %s", key, error)
            return
        if removed:
            logger.info("%s: removed %s", key, ", ".join(removed))

    def load(
        self, state: Mapping[str, Tensor], *, step: int = -1, exclude: Collection[str] = ()
    ) -> int | None:
        """Fill the tensors of `state` from `step` (-1: the newest valid one); return its step.

        None when step is -1 and nothing is there. `exclude` names parts that stay as they are
        (checkpoint.exclude_from_loading). With -1 a damaged checkpoint is named and the next older
        one is taken. Raises ConfigError, on all ranks, when `step` is absent or damaged, all are
        damaged, the checkpoint holds weights alone, or it is of another model.
        """
        self._settle()
        found, others = self._on_first_rank(list_steps, self.folder)
        for _, folder in others:
            logger.warning("%s does not count: cut short, or its %s is lost", folder, MANIFEST)
        if step == -1 and not found:
            return None
        chosen = self._choose(step, found)
        folder = step_folder(self.folder, chosen)
        manifest = self._on_first_rank(read_manifest, folder)
        if changes := model_changes(manifest.model, self._model):
            raise ConfigError(
                f"{folder}: checkpoint of another model: {changes}; set model.* as it was, or "
                "begin a run in another folder with checkpoint.initial_load_path"
            )
        if manifest.model_only:
            found.remove(chosen)
            raise ConfigError(
                f"checkpoint.load_step = {step}: {folder} holds weights alone, a run cannot resume "
                f"from it; start a run in another folder with checkpoint.initial_load_path = "
                f"{str(folder)!r}, or resume from one of {found}"
            )
        self._fill(folder, state, exclude)
        self._own.add(chosen)
        logger.info("resumed from %s", folder)
        return chosen

    def load_from(
        self,
        path: str | Path,
        state: Mapping[str, Tensor],
        *,
        model_only: bool,
        exclude: Collection[str] = (),
    ) -> None:
        """Fill `state` from the step folder `path` of any run.

        model_only takes the weights and leaves the rest of `state` as it is. Raises ConfigError
        when `path` is no step folder, is damaged, lacks what is wanted or is of another model.
        """
        folder, key = Path(path), f"checkpoint.initial_load_path = {str(path)!r}"
        problems = self._problems(folder)
        if problems:
            steps, _ = self._on_first_rank(list_steps, folder)
            fix = f"name one of its steps: {steps}" if steps else "name a whole folder step-N"
            raise ConfigError(f"{key}: {'; '.join(problems)}; {fix}")
        manifest = self._on_first_rank(read_manifest, folder)
        if model_only:
            exclude = {*exclude, *PART_PREFIXES}
        elif manifest.model_only:
            raise ConfigError(
                f"{key}: it holds weights alone; set checkpoint.initial_load_model_only = true"
            )
        if changes := model_changes(manifest.model, self._model):
            logger.warning("%s: the weights are of another model: %s", key, changes)
        self._fill(folder, state, exclude)
        logger.info("loaded %s from %s", "weights" if model_only else "everything", folder)

    def _choose(self, step: int, found: list[int]) -> int:
        """`step`, or the newest of `found` if it is -1; undamaged in either case."""
        key = f"checkpoint.load_step = {step}"
        if step not in (-1, *found):
            there = f"there are {found}" if found else "it holds no checkpoint"
            raise ConfigError(f"{key}: no such step in {self.folder}; {there}; -1 takes the newest")
        damaged: dict[int, str] = {}
        for chosen in found[::-1] if step == -1 else [step]:
            problems = self._problems(step_folder(self.folder, chosen))
            if not problems:
                break
            damaged[chosen] = f"{step_folder(self.folder, chosen)}: {'; '.join(problems)}"
        else:
            rest = [other for other in found if step not in (-1, other)]
            fix = f"take one of {rest} or -1" if rest else "move it away to start from scratch"
            raise ConfigError(f"{key}: damaged: {' | '.join(damaged.values())}; {fix}")
        self._damaged = set(damaged)
        for line in damaged.values():
            logger.warning("damaged, the next older step is tried: %s", line)
        newer = [other for other in found if other > chosen]
        if newer and step != -1:
            logger.warning(
                "%s: %s are replaced when this run gets there; until then -1 would take them",
                key,
                newer,
            )
        return chosen

    def _fill(self, folder: Path, state: Mapping[str, Tensor], exclude: Collection[str]) -> None:
        wanted = what_to_load(folder, state, exclude, group=self._group)
        agree(
            lambda: dcp.load(
                wanted, checkpoint_id=folder, process_group=self._group, no_dist=self._alone
            ),
            doing=f"loading {folder}",
            group=self._group,
        )

    def _problems(self, folder: Path) -> list[str]:
        """What is wrong with `folder`, found by all ranks together and the same on all."""
        shares = agree(
            lambda: verify(folder, rank=self._rank, world_size=dist.get_world_size(self._group)),
            doing=f"verifying {folder}",
            group=self._group,
        )
        return sorted({problem for share in shares for problem in share})

    def _on_first_rank(self, read: Callable[[Path], Result], folder: Path) -> Result:
        return on_first_rank(
            lambda: read(folder), doing=f"{read.__name__} of {folder}", group=self._group
        )
