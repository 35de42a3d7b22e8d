"""Bytes of the storages that are alive: memory that any machine counts alike, to the byte.

    with LiveStorage() as memory:
        loss = model(tokens)                # memory.live: what is kept for backward
        loss.backward()                     # memory.peak: the most there was at once

A storage is counted from the operator that returns it, once however many tensors view it, until
the last of them is gone. FSDP frees and refills storages whose tensors live on, which is no
operator: `resize_` is watched for that. Of DTensors their local parts count. What a kernel takes
and gives back inside of itself is not seen, nor what an allocator loses between blocks.

Fake tensors count as real ones would, where the mode is entered inside of FakeTensorMode.
Proven in tests/observe/test_live_storage.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Counts while it is entered; forgets what dies whether or not it is."""

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        """`left_out`: tensors that are there already and are not to be counted."""
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # of the counted storages, by id
        # Held, so that no other storage gets the id of one that is gone.
        self._left_out = {id(t.untyped_storage()): t.untyped_storage() for t in left_out}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the operators of its local parts, which come by here
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs run under the mode too, instead of not being compiled for it."""
        return True

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from here on; nothing where it is counted or on meta."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        known = id(storage) in self._sizes or id(storage) in self._left_out
        if known or local.device.type == "meta":
            return
        self._set_size(id(storage), storage.nbytes())
        weakref.finalize(storage, self._release, id(storage))

    def _set_size(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = self._resize(storage, size)
            if id(storage) in self._sizes:
                self._set_size(id(storage), storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)
