"""Captured steps compute the same when they are replayed. On a CPU, recorded operators stand in for CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recorded_graph import RecordedGraph
from reefknot.kernels.capture import GraphCache, RepeatedSteps, capture, send, side_stream

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cpu", id="recorded"),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        request.getfixturevalue("recorded")
    return torch.device(request.param)


def test_recording_has_no_effect_and_replay_reuses_the_tensors() -> None:
    """The stand-in for CUDA graphs keeps its promises, on which the other tests here depend."""
    total, x = torch.zeros(3), torch.ones(3)

    def step() -> Tensor:
        doubled = 2.0 * x
        total.add_(doubled)
        return doubled

    graph = RecordedGraph(step)
    assert total.tolist() == [0.0, 0.0, 0.0]
    x.fill_(5.0)
    graph.replay()
    graph.replay()
    assert total.tolist() == [20.0, 20.0, 20.0]
    assert graph.outputs.tolist() == [10.0, 10.0, 10.0]
    with pytest.raises(RuntimeError, match="waits for the device"):
        RecordedGraph(lambda: bool(x.any()))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_garbage_collector_pauses_during_a_capture(device: torch.device) -> None:
    """The collector may free an older graph, which makes a capture fail."""
    enabled = []
    with side_stream(device):
        capture(lambda: enabled.append(gc.isenabled()), device=device)
    assert enabled == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_replay_reads_new_inputs_and_keeps_its_state(device: torch.device) -> None:
    state = torch.zeros(2, device=device)

    def step(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        state.copy_(state + scale * x)
        return state.sum(), state

    inputs = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    with side_stream(device):
        step(*(send(tensor, device) for tensor in inputs))
        state.zero_()
        graph = capture(step, inputs, device=device)
        assert state.tolist() == [0.0, 0.0], "capturing must not compute anything"
        sums = [float(graph.replay([torch.tensor([x, 0.0]), torch.tensor(10.0)])[0]) for x in (1.0, 2.0, 3.0)]
    assert sums == [10.0, 30.0, 60.0]
    assert graph.outputs[1] is state
    with pytest.raises(ValueError, match="zip"):
        graph.replay([torch.zeros(2)])


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_replayed_steps_train_and_drop_like_eager_steps(device: torch.device) -> None:
    """Replays train like the step itself, and every replay draws a new dropout mask."""
    x, y = torch.randn(6, 4), torch.randn(6, 1)

    def train(steps: int, run: Callable[[Callable[..., Tensor]], Tensor]) -> tuple[list[float], Tensor]:
        weight = torch.ones(1, 4, device=device, requires_grad=True)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(F.linear(F.dropout(x, 0.5), weight), y)
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(0.1 * gradient)
            return loss.detach()

        torch.manual_seed(3)
        with side_stream(device):
            losses = [float(run(step)) for _ in range(steps)]
        return losses, weight.detach().cpu()

    repeated: RepeatedSteps[Tensor] = RepeatedSteps(device)
    losses, weight = train(5, lambda step: repeated("step", step, (x, y)))
    expected_losses, expected_weight = train(5, lambda step: step(x.to(device), y.to(device)))
    assert losses == expected_losses
    assert torch.equal(weight, expected_weight)


def test_step_is_captured_when_its_key_repeats(recorded: list[RecordedGraph]) -> None:
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x.sum()

    steps: RepeatedSteps[Tensor] = RepeatedSteps(CPU, limit=3)
    results = []
    for number, size in enumerate((2, 3, 2, 2, 3, 2)):
        results.append(float(steps(size, step, [torch.full((size,), float(number))])))
    assert results == [0.0, 3.0, 4.0, 6.0, 12.0, 10.0]
    assert calls == [2, 3, 2, 3], "each size runs once and is captured once"
    assert len(recorded) == 2


def test_no_step_is_captured_after_too_many_keys(recorded: list[RecordedGraph]) -> None:
    steps: RepeatedSteps[Tensor] = RepeatedSteps(CPU, limit=3)

    def run(*keys: int) -> None:
        for key in keys:
            assert float(steps(key, lambda x: x + 1.0, [torch.tensor(float(key))])) == key + 1.0

    run(0, 1, 0, 2)
    assert len(recorded) == 1
    run(3, 4, 5, 1, 2, 3, 4, 5)
    assert len(recorded) == 1
    run(0)
    assert len(recorded) == 1, "captured steps are still replayed"


def test_least_recently_used_graph_is_evicted_first(recorded: list[RecordedGraph]) -> None:
    graphs: GraphCache[Tensor] = GraphCache(CPU, limit=2)
    for key in "ab":
        graphs.capture(key, lambda: torch.zeros(1))
    assert graphs.find("a") is not None
    graphs.capture("c", lambda: torch.zeros(1))
    assert len(graphs) == 2
    assert graphs.find("b") is None
    assert graphs.find("a") is not None
    assert graphs.find("c") is not None


def test_cpu_uses_no_side_stream_and_no_copy() -> None:
    tensor = torch.ones(2)
    with side_stream(CPU):
        assert send(tensor, CPU) is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_side_stream_and_default_stream_wait_for_each_other() -> None:
    """Results of one stream are complete before the other stream reads them, without waiting on the host."""
    device = torch.device("cuda")
    a = torch.randn(2048, 2048, device=device)
    product = a
    for _ in range(20):
        product = product @ a / 50.0
    with side_stream(device):
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        copy = product.clone()
        for _ in range(20):
            copy = copy @ a / 50.0
    expected = product.clone()
    for _ in range(20):
        expected = expected @ a / 50.0
    assert torch.equal(copy, expected)
