"""A replacement for CUDA graphs on a CPU: it records the operators of a step and runs them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reefknot.kernels import capture


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The recorded operators of a step, with their tensors.

    As with a CUDA graph, recording changes no existing tensor and draws no random numbers, Python values are those of
    the recording, and reading the value of a tensor on the host is an error.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        generator = torch.get_rng_state()
        with self:
            self.outputs = step()
        torch.set_rng_state(generator)
        for storage, values in self._before.values():
            storage.copy_(values)
        self._before = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a captured step waits for the device")
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                self._save_before_write(tree_leaves(written))
        results = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, results))
        return results

    def _save_before_write(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._before.setdefault(_address(tensor), (storage, storage.clone()))

    def replay(self) -> None:
        # The recorded operators are already below autograd and autocast.
        with torch._C._AutoDispatchBelowAutograd(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, results in self._calls:
                new_results = func(*args, **kwargs)
                for tensor, new_tensor in zip(tree_leaves(results), tree_leaves(new_results), strict=True):
                    # Views and tensors changed in place are already up to date.
                    if isinstance(tensor, Tensor) and _address(tensor) != _address(new_tensor):
                        tensor.copy_(new_tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Capture steps by recording them, and return the list of recorded graphs."""
    graphs: list[RecordedGraph] = []

    def record(step: Callable[[], Any], device: torch.device, pool: Any) -> tuple[RecordedGraph, Any]:
        graphs.append(RecordedGraph(step))
        return graphs[-1], graphs[-1].outputs

    monkeypatch.setattr(capture, "_record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return graphs
