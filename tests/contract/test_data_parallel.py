"""Every output end trains under plain `DistributedDataParallel`, in two processes that communicate with gloo.

DDP raises an error in the second step if a parameter did not get a gradient in the first.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from reefknot.kernels.scores import IGNORE
from reefknot.nn.outputs.contract import OutputEnd

from .combinations import Case, meaningful_cases

TARGETS_BY_STEP = [
    # The first process has only frequent words in the first step, the second has all words.
    [[0, 1, 2, 3], [10, 0, 5, IGNORE]],
    # The second process has no targets.
    [[9, 4, 0, 7], [IGNORE] * 4],
    [[5, 6, 7, 10], [1, 1, 2, 10]],
]
"""For each step, the targets of the two processes."""


def distinct_ends() -> list[Case]:
    """Return one combination for each output and classifier, with ends that are not tied."""
    cases: dict[tuple[str, str | None], Case] = {}
    for case in meaningful_cases():
        if not case.tied:
            cases.setdefault((case.output, case.classifier), case)
    return list(cases.values())


def train(end: nn.Module, context_dim: int, rank: int) -> list[dict[str, Tensor]]:
    """Return the gradients of an end after each step on the targets of a process."""
    gradients = []
    for step, targets_by_rank in enumerate(TARGETS_BY_STEP):
        torch.manual_seed(10 * step + rank)
        hidden_ND = torch.randn(4, context_dim, dtype=torch.float64)
        end.zero_grad()
        end(hidden_ND, torch.tensor(targets_by_rank[rank])).loss.backward()
        module: OutputEnd = end.module if isinstance(end, DistributedDataParallel) else end  # type: ignore[assignment]
        gradients.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})  # type: ignore[union-attr]
    return gradients


def compare_with_one_process(rank: int, file: Path) -> None:
    """Train every end in two processes, and compare its gradients with the mean of those of single processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for case in distinct_ends():
        end = case.build().output.double().eval()  # a sampled softmax would draw different classes in training
        alone = copy.deepcopy(end)
        actual = train(DistributedDataParallel(end), end.context_dim, rank)
        expected = [train(alone, end.context_dim, process) for process in range(2)]
        for parallel, first, second in zip(actual, *expected, strict=True):
            mean = {name: (first[name] + second[name]) / 2 for name in first}
            torch.testing.assert_close(parallel, mean, msg=lambda message, case=case: f"{case.name}: {message}")
    dist.destroy_process_group()


def test_every_end_trains_in_two_processes(tmp_path: Path) -> None:
    assert len(distinct_ends()) >= 25
    torch.multiprocessing.spawn(compare_with_one_process, (tmp_path / "group",), nprocs=2)
