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
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_lite.checkpoint.agreement import agree, on_first_rank, through_dcp
from torchtitan_lite.checkpoint.compare import refuse_other_state, without_excluded
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    counted_steps,
    measure,
    prune,
    publish,
    read_manifest,
    remove,
    resumable_steps,
    step_folder,
    temporary_folder,
    uncounted_steps,
    verify,
    write_manifest,
)
from torchtitan_lite.checkpoint.state import State, is_model_key
from torchtitan_lite.config import ConfigError

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
    process_group: a gloo group for the calls from the training thread; without it the manager
        makes one over the world. Building a manager is a collective of the world.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_latest_k: int = 0,
        async_mode: str = "disabled",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        assert async_mode in ("disabled", "async", "async_with_pinned_mem"), async_mode
        self.folder = Path(folder)
        self._keep_latest_k = keep_latest_k
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._group = process_group or _gloo_group(ranks)
        self._rank = dist.get_rank(self._group)
        self._in_flight: Future[None] | None = None
        self._staging: Future[State] | None = None
        self._stager: DefaultStager | None = None
        if async_mode != "disabled":
            self._stager = DefaultStager(self._staging_options(async_mode))
            self._writer_group = _gloo_group(ranks)
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def _staging_options(self, async_mode: str) -> StagingOptions:
        pinned = async_mode == "async_with_pinned_mem"
        if pinned and not torch.accelerator.is_available():
            self._log("checkpoint.async_mode = %s: no accelerator, so plain async", async_mode)
            pinned = False
        return StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=pinned,
            use_non_blocking_copy=pinned,
        )

    def save(self, step: int, state: Mapping[str, Tensor], *, model_only: bool = False) -> None:
        """Save `state` as `step`; a step that is there and undamaged is left as it is.

        model_only keeps the weights alone, for export: no run resumes from it. Synchronous: the
        checkpoint counts on return. Asynchronous: it returns once the state is copied (pinned: at
        once, see `wait_for_staging`), after the previous save is done. Raises CheckpointError on
        all ranks when it, or the previous asynchronous one, failed on any; then nothing counts.
        """
        self._settle()
        if self._stands(step, model_only=model_only):
            return
        wanted = {key: state[key] for key in state if is_model_key(key) or not model_only}
        on_first_rank(
            lambda: self._clear_the_way(step), doing=self._saving(step), group=self._group
        )
        if self._stager is None:
            self._write(step, wanted, model_only=model_only, group=self._group)
            return
        self._staging = self._stage(self._stager, wanted)
        self._in_flight = self._writer.submit(
            self._write_staged, step, self._staging, model_only=model_only
        )

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

    def _stands(self, step: int, *, model_only: bool) -> bool:
        """Whether `step` is there already and undamaged."""
        calls = agree(lambda: (step, model_only), doing=self._saving(step), group=self._group)
        assert len(set(calls)) == 1, f"the ranks save different things: {calls}"
        folder = step_folder(self.folder, step)
        if not on_first_rank(folder.exists, doing=self._saving(step), group=self._group):
            return False
        problems = self._problems(folder)
        if problems:
            self._warn("%s is damaged (%s) and will be replaced", folder, "; ".join(problems))
            return False
        self._log("%s is there already and stays as it is", folder)
        return True

    def _clear_the_way(self, step: int) -> None:
        temporary = temporary_folder(self.folder, step)
        remove(temporary)  # of a save that was cut short
        temporary.mkdir(parents=True)

    def _stage(self, stager: DefaultStager, state: State) -> Future[State]:
        """The future of a copy of `state` on the host; done on return unless it is pinned."""
        if torch.accelerator.is_available():
            # The copy runs on a stream of its own and must not overtake the last optimizer step.
            torch.accelerator.synchronize()
        staged: Future[State] = Future()
        try:
            result = stager.stage(state)
        except Exception as error:  # surfaces in the writer, where all ranks learn of it
            staged.set_exception(error)
            return staged
        if isinstance(result, Future):
            return result
        staged.set_result(result)
        return staged

    def _write_staged(self, step: int, staged: Future[State], *, model_only: bool) -> None:
        # No rank may enter DCP's collectives before all know that all have their copy.
        def copied() -> None:
            staged.result()

        agree(copied, doing=self._saving(step), group=self._writer_group)
        self._write(step, staged.result(), model_only=model_only, group=self._writer_group)

    def _write(
        self, step: int, state: State, *, model_only: bool, group: dist.ProcessGroup
    ) -> None:
        """Write, hash, publish and prune; the same on either thread. A collective of `group`."""
        begin, doing = time.monotonic(), self._saving(step)
        temporary = temporary_folder(self.folder, step)
        writer = dcp.FileSystemWriter(temporary)
        through_dcp(
            lambda: dcp.save(state, storage_writer=writer, process_group=group), doing=doing
        )
        shares = agree(lambda: self._measure_own(temporary), doing=doing, group=group)
        files = {name: record for share in shares for name, record in share.items()}

        def complete() -> None:
            write_manifest(temporary, Manifest(step, model_only, files))
            publish(self.folder, step)

        on_first_rank(complete, doing=doing, group=group)
        mebibytes = sum(record.size for record in files.values()) / 2**20
        self._log(
            "saved %s: %.1f MiB in %.1f s",
            step_folder(self.folder, step),
            mebibytes,
            time.monotonic() - begin,
        )
        self._prune(step)

    def _measure_own(self, temporary: Path) -> dict[str, FileRecord]:
        """Size and hash of the files that this rank wrote; rank 0 wrote DCP's index too."""
        names = [path.name for path in temporary.glob(f"__{self._rank}_*")]
        return measure(temporary, [*names, ".metadata"] if self._rank == 0 else names)

    def _prune(self, step: int) -> None:
        if self._rank != 0:
            return
        try:
            removed = prune(self.folder, keep_latest_k=self._keep_latest_k, saved_step=step)
        except OSError as error:
            # The save stands, and the next one tries again: no reason to end a run.
            self._warn("checkpoint.keep_latest_k: cannot remove an old checkpoint: %s", error)
            return
        if removed:
            self._log(
                "checkpoint.keep_latest_k = %d: removed %s", self._keep_latest_k, ", ".join(removed)
            )

    def load(
        self, state: Mapping[str, Tensor], *, step: int = -1, exclude: Collection[str] = ()
    ) -> int | None:
        """Fill the tensors of `state` from `step` (-1: the newest valid one); return its step.

        None when step is -1 and nothing is there. `exclude` is checkpoint.exclude_from_loading.
        With -1 a damaged checkpoint is named and the next older one is taken. Raises ConfigError,
        on all ranks, when `step` is absent or damaged, all are damaged, the checkpoint holds
        weights alone, or it is of another model.
        """
        self._settle()
        found, without_manifest = on_first_rank(
            lambda: (counted_steps(self.folder), uncounted_steps(self.folder)),
            doing=f"listing {self.folder}",
            group=self._group,
        )
        for other in without_manifest:
            self._warn("%s has no %s and does not count", step_folder(self.folder, other), MANIFEST)
        if step == -1:
            if not found:
                return None
            chosen = self._newest_valid(found)
        else:
            chosen = self._explicit(step, found)
        folder = step_folder(self.folder, chosen)
        if self._manifest(folder).model_only:
            others = on_first_rank(
                lambda: resumable_steps(self.folder), doing=str(self.folder), group=self._group
            )
            raise ConfigError(
                f"checkpoint.load_step = {step}: {folder} holds weights alone, a run cannot resume "
                f"from it; start a run in another folder with checkpoint.initial_load_path = "
                f"{str(folder)!r}, or resume from one of {others}"
            )
        self._fill(folder, state, exclude=exclude)
        self._log("resumed from %s", folder)
        return chosen

    def load_from(
        self,
        path: str | Path,
        state: Mapping[str, Tensor],
        *,
        model_only: bool,
        exclude: Collection[str] = (),
    ) -> int:
        """Fill `state` from the step folder `path` of any run; return the step it was saved at.

        model_only takes the weights and leaves the rest of `state` as it is. Raises ConfigError
        when `path` is no step folder, is damaged, lacks what is wanted or is of another model.
        """
        folder, key = Path(path), f"checkpoint.initial_load_path = {str(path)!r}"
        steps = on_first_rank(
            lambda: None if (folder / MANIFEST).is_file() else counted_steps(folder),
            doing=f"reading {folder}",
            group=self._group,
        )
        if steps is not None:
            fix = f"name one of its steps: {steps}" if steps else "name a folder step-N of a run"
            raise ConfigError(f"{key}: there is no {MANIFEST} in it; {fix}")
        problems = self._problems(folder)
        if problems:
            raise ConfigError(f"{key}: damaged: {'; '.join(problems)}; take another step")
        manifest = self._manifest(folder)
        if manifest.model_only and not model_only:
            raise ConfigError(
                f"{key}: it holds weights alone; set checkpoint.initial_load_model_only = true"
            )
        if model_only:
            state = {name: state[name] for name in state if is_model_key(name)}
        self._fill(folder, state, exclude=exclude)
        self._log("loaded %s from %s", "weights" if model_only else "everything", folder)
        return manifest.step

    def _newest_valid(self, steps: list[int]) -> int:
        damage = []
        for step in reversed(steps):
            folder = step_folder(self.folder, step)
            problems = self._problems(folder)
            if not problems:
                return step
            damage.append(f"{folder}: {'; '.join(problems)}")
            self._warn("damaged, trying the next older one: %s", damage[-1])
        raise ConfigError(
            f"checkpoint.load_step = -1: every checkpoint is damaged ({' | '.join(damage)}); "
            "move them away to start from the beginning"
        )

    def _explicit(self, step: int, found: list[int]) -> int:
        key = f"checkpoint.load_step = {step}"
        if step not in found:
            there = f"there are {found}" if found else "it holds no checkpoint"
            raise ConfigError(f"{key}: no such step in {self.folder}; {there}; -1 takes the newest")
        folder = step_folder(self.folder, step)
        problems = self._problems(folder)
        if problems:
            others = [other for other in found if other != step]
            raise ConfigError(
                f"{key}: {folder} is damaged: {'; '.join(problems)}; take one of {others} or -1"
            )
        newer = [other for other in found if other > step]
        if newer:
            self._warn("%s: %s stay and are not saved again; move them away first", key, newer)
        return step

    def _fill(self, folder: Path, state: Mapping[str, Tensor], *, exclude: Collection[str]) -> None:
        wanted = without_excluded(state, exclude, group=self._group)
        refuse_other_state(folder, wanted, exclude, group=self._group)
        reader = dcp.FileSystemReader(folder)
        through_dcp(
            lambda: dcp.load(wanted, storage_reader=reader, process_group=self._group),
            doing=f"loading {folder}",
        )

    def _problems(self, folder: Path) -> list[str]:
        """What is wrong with `folder`, found by all ranks together and the same on all."""
        rank, world_size = self._rank, dist.get_world_size(self._group)
        shares = agree(
            lambda: verify(folder, rank=rank, world_size=world_size),
            doing=f"verifying {folder}",
            group=self._group,
        )
        return sorted({problem for share in shares for problem in share})

    def _manifest(self, folder: Path) -> Manifest:
        return on_first_rank(lambda: read_manifest(folder), doing=str(folder), group=self._group)

    def _saving(self, step: int) -> str:
        return f"saving {step_folder(self.folder, step)}"

    def _log(self, message: str, *args: object) -> None:
        if self._rank == 0:
            logger.info(message, *args)

    def _warn(self, message: str, *args: object) -> None:
        if self._rank == 0:
            logger.warning(message, *args)


def _gloo_group(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks, backend="gloo", timeout=PATIENCE)
