"""Steps that a GPU takes longer to launch than to run: captured once as a CUDA graph, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """On a stream of its own, where a GPU can capture."""
    if device.type != "cuda":
        yield
        return
    around, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(around)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        around.wait_stream(stream)


class Replayed:
    """A step without arguments: it reads and changes tensors that stay where they are. Call it inside of `apart`.

    The first call runs as it is, which also warms up what must not be captured; the second is captured.
    """

    def __init__(self, step: Callable[[], None], *, capture: bool) -> None:
        """`capture`: False where a step has to run as it is, on a CPU or because it asks the device for a number."""
        self._step = step
        self._capture = capture
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._capture or not self._warm:
            self._step()
            self._warm = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._step()
            self._graph = graph
        self._graph.replay()
