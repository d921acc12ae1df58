"""The skip-gram kernel equals the reference in triton's interpreter, and learns as well as a CPU on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_skip_gram.py      runs only the interpreted tests
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.skip_gram import RateSchedule, resolve_impl, train_range

from .interpreter import INTERPRETED, gpu_only, interpreter_only
from .skip_gram_texts import draws_of, rates_of, tables, text, topic_score

triton = pytest.importorskip("triton", reason="triton is not installed")


def train(impl: Any, tied: bool, **settings: float) -> tuple[Tensor, Tensor]:
    ids = text(30)
    vectors = tables(tied)
    draws, rates = draws_of(ids, window=2, **settings), rates_of(ids)
    # Two stretches, so that the second has context words that are not centres.
    for start, stop in ((0, 12), (12, len(ids))):
        train_range(*vectors, ids, start, stop, draws, 2, rates, impl=impl)
    return vectors


@interpreter_only
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_kernel_equals_the_reference(tied: bool) -> None:
    # One negative, because of two equal negatives word2vec updates the second after the first.
    results = zip(train("triton", tied, negatives=1), train("reference", tied, negatives=1), strict=True)
    for actual, exact in results:
        torch.testing.assert_close(actual, exact, rtol=2e-5, atol=2e-5)


@interpreter_only
def test_kernel_with_five_negatives_is_close_to_the_reference() -> None:
    ids = text(12, vocabulary=4000, topics=2)
    draws, rates = draws_of(ids, 4000, power=0.0, negatives=5, sample=0.0, window=2), rates_of(ids)
    results: list[list[Tensor]] = []
    for impl in ("triton", "reference"):
        vectors = list(tables(False, vocabulary=4000, dim=5))
        train_range(*vectors, ids, 0, len(ids), draws, 1, rates, impl=impl)  # type: ignore[arg-type]
        results.append(vectors)
    for actual, exact in zip(*results, strict=True):
        # A few negatives are equal, and the reference updates those one after the other.
        assert float((actual - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.skipif(INTERPRETED, reason="needs triton's compiler")
@pytest.mark.parametrize(("capability", "dim", "negatives"), [(80, 300, 10), (90, 100, 5)])
def test_kernel_compiles_and_fits_shared_memory(capability: int, dim: int, negatives: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reefknot.kernels.triton_skip_gram import kernel_constants
    from reefknot.kernels.triton_skip_gram_kernels import skip_gram_kernel as kernel

    constants = kernel_constants(dim, negatives, window=5)
    types = {name: "*i64" if name.endswith("_ptr") else "fp32" for name in kernel.arg_names}
    types |= {"input_ptr": "*fp32", "output_ptr": "*fp32", "V": "i32", "key": "i64"}
    types |= {"num_kept": "i32", "centres_per_program": "i32"}
    types |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, types, values), target=target, options={"num_warps": 2})
    assert compiled.metadata.shared <= 49_152
    assert "ld.global.cg" in compiled.asm["ptx"]


@gpu_only
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gpu_learns_as_well_as_the_cpu(tied: bool) -> None:
    ids = text(30_000, topics=6, vocabulary=302)
    scores = {}
    for device in ("cuda", "cpu"):
        draws = draws_of(ids, 302, window=5, negatives=5, sample=1e-3).to(torch.device(device))
        generator = torch.Generator().manual_seed(0)
        first = torch.empty(302, 16).uniform_(-0.5 / 16, 0.5 / 16, generator=generator).to(device)
        second = first if tied else torch.zeros_like(first)
        for epoch in range(1, 4):
            rates = RateSchedule(0.05, 5e-6, 3 * len(ids), (epoch - 1) * len(ids))
            train_range(first, second, ids, 0, len(ids), draws, epoch, rates)
        assert resolve_impl(first) == "triton" or device == "cpu"
        scores[device] = topic_score(first.cpu(), topics=6)
    assert scores["cuda"] > scores["cpu"] - 0.05
