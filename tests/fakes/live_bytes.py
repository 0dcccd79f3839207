"""How many bytes of tensors are alive while torch runs, and how many autograd keeps: counted, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is entered. `peak` is the most that lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # FSDP's way to free
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage()._cdata not in known:
                self._born(leaf.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._gone, storage._cdata)
            self._grown(storage._cdata, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        if storage._cdata in self._sizes:
            self._grown(storage._cdata, size - self._sizes[storage._cdata])
        elif size > storage.nbytes():
            self._born(storage)
            self._grown(storage._cdata, size - storage.nbytes())
        return self._resize(storage, size)

    def _grown(self, key: int, size: int) -> None:
        self._sizes[key] += size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class SavedBytes:
    """Sum over the different storages that autograd saved."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._seen = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.total = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            weakref.finalize(storage, self._seen.discard, storage._cdata)
            self.total += storage.nbytes()
        return tensor


@contextmanager
def saved_bytes(parameters: Iterable[torch.Tensor] = ()) -> Iterator[SavedBytes]:
    """What the forward inside keeps for its backward, without `parameters`."""
    counted = SavedBytes(parameters)
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda tensor: tensor):
        yield counted


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not hasattr(leaf, "to_local")
