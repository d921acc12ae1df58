"""CUDA graphs: a step that takes longer to launch than to run on a GPU is captured once, then replayed.

`RepeatedSteps` is the easiest way to use them:

    steps = RepeatedSteps(device)
    with side_stream(device):
        for x in batches:
            loss = steps(x.shape, train_step, [x])    # runs, then captures, then replays `train_step(x)`

It is made of these parts, which can be used alone:

    side_stream      the CUDA stream on which a step runs and is captured
    capture          captures one step as a `Graph`
    GraphCache       the most recently used graphs, by key, in one memory pool

A graph repeats the same kernels on the same memory. Whatever changes from call to call must therefore be a tensor:
either an input, whose values are copied into a buffer of the graph, or a tensor with a fixed address that the step
reads and overwrites. Shapes and numbers on the host are part of the graph, so they belong in the key. A step that reads
a value from the device cannot be captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from reefknot.kernels.small import general_kernels

Outputs = TypeVar("Outputs")
"""What a step returns: tensors in any structure, or None."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. The copy to a GPU uses pinned memory, so the host does not wait for it."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Use a side stream inside the context, because the default stream cannot be captured. No effect on a CPU.

    The streams wait for each other on entry and on exit.

    Args:
        device: The device on which the steps run.
        stream: The stream to use. The default is a new stream.
    """
    if device.type != "cuda":
        yield
        return
    outer_stream = torch.cuda.current_stream(device)
    stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(outer_stream)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer_stream.wait_stream(stream)


@dataclass(frozen=True)
class Graph(Generic[Outputs]):
    """A captured step, with the buffers that it reads and the tensors that it writes its results to."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Outputs

    def replay(self, inputs: Sequence[Tensor] = ()) -> Outputs:
        """Run the step again on other inputs, which are on the host. The next replay overwrites the outputs."""
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            # Pinned memory, as in `send`: the host does not wait.
            buffer.copy_(tensor.pin_memory() if buffer.is_cuda else tensor, non_blocking=True)
        self.graph.replay()
        return self.outputs


def capture(
    step: Callable[..., Outputs],
    inputs: Sequence[Tensor] = (),
    *,
    device: torch.device,
    pool: tuple[int, int] | None = None,
) -> Graph[Outputs]:
    """Capture a step without running it. Call this inside `side_stream`, after the step has run there once.

    The earlier run does what must not be captured: it compiles kernels, lets libraries choose their algorithms and
    creates tensors that outlive the step. It must be inside `general_kernels`, to run the kernels of a captured step.

    Args:
        step: Called as `step(*buffers)`, with a buffer on the device for each input.
        inputs: Tensors on the host, with the shapes and types of every replay.
        device: The GPU.
        pool: The memory pool to allocate from, as `torch.cuda.graph_pool_handle` returns it. The default is a new pool.
    """
    buffers = [send(tensor, device) for tensor in inputs]
    with _without_garbage_collection():
        graph, outputs = _record(lambda: step(*buffers), device, pool)
    return Graph(graph, buffers, outputs)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector. If it frees an older graph during a capture, the capture fails."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _record(step: Callable[[], Outputs], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Capture a step without arguments on the current stream. Tests without a GPU replace this function."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(device)):
        outputs = step()
    return graph, outputs


class GraphCache(Generic[Outputs]):
    """Captured steps by key. If there are more than `limit`, the least recently used graph is dropped.

    The graphs share one memory pool. So no two graphs may run at the same time, and the outputs of a graph are valid
    only until another graph is replayed.

    Args:
        device: The GPU.
        limit: The maximum number of graphs to store.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, Graph[Outputs]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> Graph[Outputs] | None:
        """Return the graph with this key, or None."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph  # the dictionary's order is the order of last use
        return graph

    def capture(self, key: Hashable, step: Callable[..., Outputs], inputs: Sequence[Tensor] = ()) -> Graph[Outputs]:
        """Capture a step, as the function `capture` does, and store its graph under this key."""
        while len(self._graphs) >= self._limit:
            del self._graphs[next(iter(self._graphs))]
        graph = self._graphs[key] = capture(step, inputs, device=self._device, pool=self._pool)
        return graph


class RepeatedSteps(Generic[Outputs]):
    """Runs steps, and replays repeated steps as CUDA graphs. Call it inside `side_stream`.

    The first call with a key runs the step without a graph, which also warms it up. The second call captures the step.
    Once there have been more than `limit` keys, no further step is captured, because keys that rarely repeat are not
    worth a graph.

    Args:
        device: The device on which the steps run.
        limit: The maximum number of graphs to store.
    """

    def __init__(self, device: torch.device, limit: int = 1) -> None:
        self._device = device
        self._limit = limit
        self._graphs: GraphCache[Outputs] = GraphCache(device, limit)
        self._seen_keys: set[Hashable] = set()

    def __call__(self, key: Hashable, step: Callable[..., Outputs], inputs: Sequence[Tensor] = ()) -> Outputs:
        """Run or replay a step.

        Args:
            key: Everything that the step's kernels depend on, such as the shapes of the inputs.
            step: Called with the inputs, on the device. Steps with equal keys must run the same kernels.
            inputs: Tensors on the host.
        """
        graph = self._graphs.find(key)
        if graph is not None:
            return graph.replay(inputs)
        has_too_many_keys = len(self._seen_keys) > self._limit
        if key in self._seen_keys and not has_too_many_keys:
            return self._graphs.capture(key, step, inputs).replay(inputs)
        if not has_too_many_keys:
            self._seen_keys.add(key)
        with general_kernels():  # the kernels of a captured step
            return step(*(send(tensor, self._device) for tensor in inputs))
