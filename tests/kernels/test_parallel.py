"""Losses whose classes are divided among processes equal those of one process, with every gradient.

The processes (gloo, on the CPU) start once per number of ranks and check all cases. Every process computes the loss of
one process too, and compares.
Shapes: N rows, D dimensions, v classes of a process, V classes of all processes.
"""

from __future__ import annotations

import itertools
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reefknot.errors import ArgumentError
from reefknot.kernels.divergence import linear_divergence
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.log_probs import linear_log_probs
from reefknot.kernels.parallel import sharded_embedding
from reefknot.kernels.topk import linear_topk
from reefknot.nn.linear_cross_entropy_loss import LinearCrossEntropyLoss

from .dense import IGNORE, MEMORY, Problem, largest_error, problem
from .scored import TRANSFORMS, Transform, objective

CLASSES = 101


@dataclass(frozen=True)
class Process:
    """One process of the group, and its part of a classifier."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def sizes(self, classes: int = CLASSES) -> list[int]:
        """Return the number of classes of each process: one for the second, and most of them for the last."""
        return [classes // 4, 1, classes - classes // 4 - 1] if self.size == 3 else [3, classes - 3]

    def part(self, tensor: Tensor | None) -> Tensor | None:
        """Return this process's rows of a tensor, as a new leaf."""
        if tensor is None:
            return None
        part = tensor.detach().split(self.sizes(len(tensor)))[self.rank]
        return part.clone().requires_grad_(tensor.requires_grad)

    def shard(self, p: Problem) -> Problem:
        """Return this process's part of a problem."""
        weight_vD = self.part(p.w)
        assert weight_vD is not None
        return Problem(p.h.detach().clone().requires_grad_(), weight_vD, self.part(p.b), p.y)

    def whole_gradients(self, p: Problem, whole: Problem, loss: Tensor) -> list[Tensor]:
        """Return the gradients of rows, and this process's part of those of all classes."""
        grad_hidden, *grads = whole.gradients(loss)
        return [grad_hidden, *(grad.split(self.sizes(len(grad)))[self.rank] for grad in grads)]

    def assert_same_everywhere(self, tensor: Tensor) -> None:
        """Check that all processes have the same bits."""
        others = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(others, tensor.detach().contiguous(), group=self.group)
        assert all(torch.equal(other, tensor) for other in others)


def class_weights(classes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(0.1, 2.0, classes, dtype=torch.float64)[torch.randperm(classes)].to(dtype)


# -- values and gradients ------------------------------------------------------------------------------------------

TRANSFORM_NAMES = ("plain", "capped", "all")
FACTORS = (TRANSFORM_NAMES, (True, False), (True, False), (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"))


def check_loss(process: Process, whole: Problem, weight: Tensor | None, tolerance: float, **arguments: Any) -> None:
    """Compare loss and gradients with those of one process."""
    p = process.shard(whole)
    expected = linear_cross_entropy(whole.h, whole.w, whole.y, whole.b, weight=weight, **arguments)
    actual = linear_cross_entropy(p.h, p.w, p.y, p.b, weight=process.part(weight), group=process.group, **arguments)
    factors = torch.linspace(-0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape)
    factors = factors if expected.dim() else torch.tensor(0.7, dtype=torch.float64)
    assert actual.dtype == expected.dtype
    assert largest_error([actual], [expected]) < tolerance
    gradients = p.gradients((actual * factors).sum())
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in p.leaves]
    expected_gradients = process.whole_gradients(p, whole, (expected * factors).sum())
    assert largest_error(gradients, expected_gradients) < tolerance
    process.assert_same_everywhere(actual)
    process.assert_same_everywhere(gradients[0])


def case_every_combination_of_settings(process: Process) -> None:
    torch.manual_seed(1)
    weight_V = class_weights(CLASSES)
    for name, bias, weighted, smoothing, z_loss, reduction in itertools.product(*FACTORS):
        check_loss(
            process,
            problem(14, 6, CLASSES, bias),
            weight_V if weighted else None,
            1e-12,
            label_smoothing=smoothing,
            z_loss=z_loss,
            reduction=reduction,
            **TRANSFORMS[name].arguments,
        )


def case_every_memory_and_ignore_index(process: Process) -> None:
    whole = problem(70, 6, 300)
    whole = Problem(whole.h, whole.w, whole.b, whole.y.where(whole.y != IGNORE, 7))
    for memory in MEMORY:
        check_loss(process, whole, class_weights(300), 1e-12, memory=memory, ignore_index=7, label_smoothing=0.2)


def case_the_dense_formula(process: Process) -> None:
    """Does not depend on the function that is tested."""
    whole = problem(20, 5, CLASSES)
    p = process.shard(whole)
    expected = F.cross_entropy(F.linear(whole.h, whole.w, whole.b), whole.y)
    actual = linear_cross_entropy(p.h, p.w, p.y, p.b, group=process.group)
    assert largest_error([actual], [expected]) < 1e-12
    assert largest_error(p.gradients(actual), process.whole_gradients(p, whole, expected)) < 1e-12


def case_float32(process: Process) -> None:
    whole = problem(64, 32, 1000).to(torch.float32)
    for smoothing, weight in itertools.product((0.0, 0.1), (None, class_weights(1000, torch.float32))):
        for transform in TRANSFORMS.values():
            arguments = {"label_smoothing": smoothing, "z_loss": 1e-3, **transform.arguments}
            check_loss(process, whole, weight, 1e-6, **arguments)


def case_half_precision(process: Process) -> None:
    """The gradient of the hidden states is summed in float32. A CPU rounds the product of each process before."""
    exact = problem(64, 32, 1000).to(torch.bfloat16).to(torch.float64)
    whole = exact.to(torch.bfloat16)
    expected = exact.gradients(linear_cross_entropy(exact.h, exact.w, exact.y, exact.b))[0]
    single = whole.gradients(linear_cross_entropy(whole.h, whole.w, whole.y, whole.b))[0]
    p = process.shard(whole)
    actual = p.gradients(linear_cross_entropy(p.h, p.w, p.y, p.b, group=process.group))[0]
    assert actual.dtype == torch.bfloat16
    assert largest_error([actual], [expected]) < 1.5 * largest_error([single], [expected]) < 0.01
    check_loss(process, exact.to(torch.float16), None, 1e-3)


def case_equal_bits_on_repeat(process: Process) -> None:
    p = process.shard(problem(64, 32, 1000).to(torch.float32))
    results = []
    for _ in range(3):
        loss = linear_cross_entropy(p.h, p.w, p.y, p.b, group=process.group, softcap=3.0, label_smoothing=0.1)
        results.append([loss, *p.gradients(loss)])
    for repeated in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], repeated, strict=True))


def case_shapes_divisor_and_no_rows(process: Process) -> None:
    whole = problem(12, 5, CLASSES)
    p = process.shard(whole)
    expected = linear_cross_entropy(whole.h, whole.w, whole.y, reduction="none").view(3, 4)
    actual = linear_cross_entropy(p.h.view(3, 4, 5), p.w, p.y.view(3, 4), reduction="none", group=process.group)
    assert largest_error([actual], [expected]) < 1e-12
    divided = linear_cross_entropy(p.h, p.w, p.y, divisor=5.0, group=process.group)
    assert largest_error([divided], [expected.sum() / 5]) < 1e-12
    empty = linear_cross_entropy(p.h[:0], p.w, p.y[:0], group=process.group)
    assert empty.item() == 0
    assert not torch.autograd.grad(empty, p.w)[0].any()
    all_ignored = linear_cross_entropy(p.h, p.w, torch.full_like(p.y, IGNORE), group=process.group)
    assert all_ignored.item() == 0
    assert not torch.autograd.grad(all_ignored, p.h)[0].any()


def case_minus_infinity(process: Process) -> None:
    """A process whose classes all have probability zero adds nothing, and no NaN."""
    whole = problem(7, 4, CLASSES, ignored=False)
    bias_V = torch.zeros(CLASSES, dtype=torch.float64)
    bias_V[: process.sizes()[0]] = -torch.inf
    target_N = torch.full_like(whole.y, CLASSES - 1)
    p = process.shard(Problem(whole.h, whole.w, bias_V.requires_grad_(), target_N))
    actual = linear_log_probs(p.h, p.w, target_N, linear_bias=p.b, group=process.group)
    expected = linear_log_probs(whole.h, whole.w, target_N, linear_bias=bias_V)
    assert largest_error(actual[:3], expected[:3]) < 1e-12
    gradients = p.gradients(objective(actual, "all"))
    assert (
        largest_error(
            gradients,
            process.whole_gradients(p, Problem(whole.h, whole.w, bias_V, target_N), objective(expected, "all")),
        )
        < 1e-12
    )


def case_log_probs(process: Process) -> None:
    for transform, which, bias in itertools.product(
        TRANSFORMS.values(), ("log_probs", "entropy", "lse", "all"), (True, False)
    ):
        whole = problem(33, 12, 300, bias)
        check_log_probs(process, whole, transform, which)
    whole = problem(33, 12, 300)
    expected = linear_log_probs(whole.h.float(), whole.w.float(), whole.y)
    p = process.shard(whole)
    actual = linear_log_probs(p.h.float(), p.w.float(), p.y, group=process.group)
    assert largest_error(actual[:3], expected[:3]) < 1e-6


def check_log_probs(process: Process, whole: Problem, transform: Transform, which: str) -> None:
    p = process.shard(whole)
    expected = linear_log_probs(whole.h, whole.w, whole.y, linear_bias=whole.b, **transform.arguments)
    actual = linear_log_probs(p.h, p.w, p.y, linear_bias=p.b, group=process.group, **transform.arguments)
    assert largest_error(actual[:3], expected[:3]) < 1e-12
    assert torch.equal(actual.argmax, expected.argmax)
    assert not actual.argmax.requires_grad
    gradients = p.gradients(objective(actual, which))
    assert largest_error(gradients, process.whole_gradients(p, whole, objective(expected, which))) < 1e-12
    process.assert_same_everywhere(gradients[0])


def case_argmax_is_the_first_of_equal_classes(process: Process) -> None:
    """Whole numbers, so that equal scores have equal bits."""
    hidden_ND = torch.arange(20, dtype=torch.float64).view(5, 4)
    part = process.part(torch.ones(CLASSES, 4, dtype=torch.float64))
    assert part is not None
    results = linear_log_probs(hidden_ND, part, torch.zeros(5, dtype=torch.int64), group=process.group)
    assert not results.argmax.any()


def case_frozen_parts(process: Process) -> None:
    """Gradients that are not needed are not computed, and the processes do not wait for them."""
    whole = problem(9, 4, CLASSES)
    p = process.shard(whole)
    loss = linear_cross_entropy(p.h.detach(), p.w, p.y, group=process.group)
    assert torch.autograd.grad(loss, p.w)[0].shape == p.w.shape
    frozen = p.w if process.rank == 0 else p.w.detach()
    loss = linear_cross_entropy(p.h, frozen, p.y, group=process.group)
    expected = linear_cross_entropy(whole.h, whole.w, whole.y)
    assert largest_error(torch.autograd.grad(loss, p.h), torch.autograd.grad(expected, whole.h)) < 1e-12
    with torch.no_grad():
        assert not linear_cross_entropy(p.h, p.w, p.y, group=process.group).requires_grad


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def case_scores_are_never_all_in_memory(process: Process) -> None:
    p = process.shard(problem(512, 4, 4000))
    for function in (linear_cross_entropy, linear_log_probs):
        with LargestTensor() as largest:
            results = function(p.h, p.w, p.y, group=process.group, memory=0.5)
            loss = results if isinstance(results, Tensor) else objective(results, "all")
            torch.autograd.grad(loss, [p.h, p.w])
        assert 0 < largest.elements <= max(p.w.numel(), 2**16)
        assert process.rank == 0 or len(p.w) == 1 or largest.elements < len(p.h) * len(p.w) / 8


def case_two_backward_passes(process: Process) -> None:
    p = process.shard(problem(9, 4, CLASSES))
    loss = linear_cross_entropy(p.h, p.w, p.y, group=process.group)
    first = torch.autograd.grad(loss, p.h, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, p.h)[0])


# -- tied ----------------------------------------------------------------------------------------------------------


def case_tied_lookup(process: Process) -> None:
    whole = problem(1, 6, CLASSES, bias=False)
    ids = torch.randint(CLASSES, (4, 9))
    ids[0, :4] = ids[0, 0]
    target = ids.roll(-1, 1)
    layer = nn.Linear(6, 6).double()

    def loss_of(table: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        vectors = sharded_embedding(ids, table, group)
        return vectors, linear_cross_entropy(layer(vectors).tanh(), table, target, group=group, z_loss=1e-3)

    expected_vectors, expected = loss_of(whole.w, None)
    part = process.part(whole.w)
    assert part is not None
    vectors, loss = loss_of(part, process.group)
    assert torch.equal(vectors, expected_vectors)
    assert largest_error([loss], [expected]) < 1e-12
    expected_grads = torch.autograd.grad(expected, [whole.w, *layer.parameters()])
    grads = torch.autograd.grad(loss, [part, *layer.parameters()])
    own = expected_grads[0].split(process.sizes())[process.rank]
    assert largest_error(grads, [own, *expected_grads[1:]]) < 1e-12


def case_lookup_errors(process: Process) -> None:
    part = process.part(problem(1, 6, CLASSES).w)
    assert part is not None
    with pytest.raises(ArgumentError, match="an id is not a row of the table; use 0 to 100"):
        sharded_embedding(torch.tensor([CLASSES]), part, process.group)
    with pytest.raises(ArgumentError, match="ids must be integers"):
        sharded_embedding(torch.tensor([1.0]), part, process.group)


# -- DTensor -------------------------------------------------------------------------------------------------------


def case_dtensor(process: Process) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (process.size,))
    whole = problem(14, 6, CLASSES)
    weight_V = class_weights(CLASSES)
    assert whole.b is not None
    w, b, c = (distribute_tensor(tensor.detach(), mesh, [Shard(0)]) for tensor in (whole.w, whole.b, weight_V))
    w.requires_grad_()
    b.requires_grad_()
    h = whole.h.detach().clone().requires_grad_()
    arguments: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 2.0}
    loss = linear_cross_entropy(h, w, whole.y, b, weight=c, **arguments)
    expected = linear_cross_entropy(whole.h, whole.w, whole.y, whole.b, weight=weight_V, **arguments)
    loss.backward()
    assert largest_error([loss], [expected]) < 1e-12
    grad_h, grad_w, grad_b = whole.gradients(expected)
    assert isinstance(w.grad, DTensor)
    assert w.grad.placements == (Shard(0),)
    assert isinstance(b.grad, DTensor)
    assert largest_error([h.grad, w.grad.full_tensor(), b.grad.full_tensor()], [grad_h, grad_w, grad_b]) < 1e-12

    loss = linear_cross_entropy(h, w, whole.y, b)
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(RuntimeError, match="was changed in place after the forward pass"):
        loss.backward()
    with torch.no_grad():
        w.div_(2.0)

    results = linear_log_probs(distribute_tensor(h.detach(), mesh, [Replicate()]), w, whole.y)  # type: ignore[arg-type]
    assert largest_error(results[:3], linear_log_probs(whole.h, whole.w, whole.y)[:3]) < 1e-12
    assert torch.equal(sharded_embedding(whole.y.clamp(min=0), w), whole.w[whole.y.clamp(min=0)])

    criterion = LinearCrossEntropyLoss(6, CLASSES, dtype=torch.float64)
    criterion.linear.weight = nn.Parameter(w.detach())
    criterion(h, whole.y).backward()
    assert isinstance(criterion.linear.weight.grad, DTensor)

    with pytest.raises(ArgumentError, match=r"linear_weight is a DTensor .* its classes must be divided, Shard\(0\)"):
        linear_cross_entropy(h, distribute_tensor(whole.w.detach(), mesh, [Shard(1)]), whole.y)
    with pytest.raises(ArgumentError, match="its classes must be divided"):
        linear_cross_entropy(h, distribute_tensor(whole.w.detach(), mesh, [Replicate()]), whole.y)
    with pytest.raises(ArgumentError, match=r"input is a DTensor .* redistribute it to Replicate\(\)"):
        linear_cross_entropy(distribute_tensor(h.detach(), mesh, [Shard(0)]), w, whole.y)
    for call in (
        lambda: linear_cross_entropy(h, whole.w, whole.y, b),
        lambda: linear_cross_entropy(distribute_tensor(h.detach(), mesh, [Replicate()]), whole.w, whole.y),
        lambda: linear_topk(h, w, 2),
        lambda: linear_divergence((h, whole.w), (h, w)),
    ):
        with pytest.raises(ArgumentError, match="is a DTensor; pass a plain tensor"):
            call()
    with pytest.raises(ArgumentError, match="softcap = -1"):
        linear_cross_entropy(distribute_tensor(h.detach(), mesh, [Replicate()]), w, whole.y, softcap=-1.0)
    square = init_device_mesh("cpu", (process.size, 1))
    with pytest.raises(ArgumentError, match="must be on a one-dimensional mesh"):
        linear_cross_entropy(h, distribute_tensor(whole.w.detach(), square, [Shard(0), Shard(0)]), whole.y)
    alone = [dist.new_group([rank]) for rank in range(process.size)]
    with pytest.raises(ArgumentError, match="divide all arguments in one way"):
        linear_cross_entropy(h, w, whole.y, group=alone[process.rank])


# -- errors --------------------------------------------------------------------------------------------------------


def case_wrong_arguments(process: Process) -> None:
    whole = problem(14, 6, CLASSES)
    p = process.shard(whole)
    group = process.group
    with pytest.raises(ArgumentError, match="target 101 of row 0 is not a class; use 0 to 100"):
        linear_cross_entropy(p.h, p.w, torch.full_like(p.y, CLASSES), group=group)
    assert linear_cross_entropy(p.h, p.w, torch.full_like(p.y, CLASSES), group=group, check_targets=False).isnan()
    with pytest.raises(ArgumentError, match="group works with class ids and a weight of shape"):
        linear_cross_entropy(p.h, p.w, torch.ones(14, CLASSES, dtype=torch.float64), group=group)
    with pytest.raises(ArgumentError, match=r"target is torch\.float64; class ids must be integers"):
        linear_log_probs(p.h, p.w, p.y.double(), group=group)
    with pytest.raises(ArgumentError, match="impl = 'reference' does not divide the classes"):
        linear_cross_entropy(p.h, p.w, p.y, group=group, impl="reference")
    with pytest.raises(ArgumentError, match=r"group is a str; pass a torch\.distributed\.ProcessGroup"):
        linear_cross_entropy(p.h, p.w, p.y, group="world")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="group does not work in a compiled graph or without values"):
        linear_cross_entropy(p.h.to("meta"), p.w.to("meta"), p.y.to("meta"), group=group)


def case_different_arguments(process: Process) -> None:
    """An error of one process is an error of all, so that no process waits for another."""
    p = process.shard(problem(14, 6, CLASSES))
    is_last = process.rank == process.size - 1
    last = process.size - 1

    def assert_all_raise(own: str, other: str, *tensors: Tensor, **arguments: Any) -> None:
        with pytest.raises(ArgumentError, match=own if is_last else other):
            linear_cross_entropy(*tensors, group=process.group, **arguments)

    rejected = f"process {last} of the group rejects its arguments"
    narrow = p.w[:, :5] if is_last else p.w
    assert_all_raise("with the same dim", rejected, p.h, narrow, p.y)
    assert_all_raise("needs at least one class", rejected, p.h, p.w[:0] if is_last else p.w, p.y)

    def assert_differs(name: str, *tensors: Tensor, **arguments: Any) -> None:
        message = f"{name} differs between processes 0 and {last}"
        assert_all_raise(message, message, *tensors, **arguments)

    part = p if not is_last else Problem(p.h[:, :5], narrow, None, p.y)
    assert_differs("the dimension of input", part.h, part.w, part.y)
    part = p if not is_last else Problem(p.h[:3], p.w, None, p.y[:3])
    assert_differs("the number of rows of input", part.h, part.w, part.y)
    assert_differs("target", p.h, p.w, p.y.flip(0) if is_last else p.y)
    assert_differs("the type of linear_weight", p.h, p.w.float() if is_last else p.w, p.y)
    assert_differs("label_smoothing", p.h, p.w, p.y, label_smoothing=0.1 if is_last else 0.0)
    assert_differs("softcap", p.h, p.w, p.y, softcap=0.1 if is_last else None)
    assert_differs("whether input needs a gradient", p.h.detach() if is_last else p.h, p.w, p.y)
    weight = p.w.new_ones(len(p.w)) if is_last else None
    assert_differs("whether classes have a weight", p.h, p.w, p.y, weight=weight)
    assert_differs("whether there is a bias", p.h, p.w, p.y, linear_bias=p.b if is_last else None)
    assert_differs("reduction", p.h, p.w, p.y, reduction="none" if is_last else "mean")
    assert_all_raise("temperature = 0", rejected, p.h, p.w, p.y, temperature=0.0 if is_last else 1.0)
    assert_all_raise("memory = -1", rejected, p.h, p.w, p.y, memory=-1.0 if is_last else None)
    with pytest.raises(ArgumentError, match="softcap = -2" if is_last else rejected):
        linear_log_probs(p.h, p.w, p.y, softcap=-2.0 if is_last else None, group=process.group)


def case_no_second_derivatives(process: Process) -> None:
    p = process.shard(problem(9, 4, CLASSES))
    loss = linear_cross_entropy(p.h, p.w, p.y, group=process.group)
    gradient = torch.autograd.grad(loss, p.h, create_graph=True)[0]
    with pytest.raises(ArgumentError, match="losses computed in blocks have no second derivatives"):
        gradient.sum().backward()


# -- processes -----------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Process], None]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}


def run_cases(rank: int, size: int, folder: Path) -> None:
    """Run all cases in one process of a group, and write the tracebacks of those that fail."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    process = Process(rank, size, dist.group.WORLD)
    failures = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        try:
            case(process)
        except Exception:
            failures[name] = traceback.format_exc()
            break  # the processes may no longer be at the same place
    (folder / f"{rank}.json").write_text(json.dumps(failures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_divide_the_classes_equal_one_process(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    context = torch.multiprocessing.spawn(run_cases, (size, tmp_path), nprocs=size, join=False)
    try:
        while not context.join():
            pass
    except Exception as error:
        written = {path.name: path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("*.json"))}
        pytest.fail(f"{error}\n{written}")
    failures = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    assert failures == [{}] * size, "\n".join(text for process in failures for text in process.values())
