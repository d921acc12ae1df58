"""The kernel of skip-gram: in triton's interpreter against the loop in float64, on a GPU by what it learns.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_skip_gram.py      the interpreter's part by itself
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.skip_gram import Rates, resolve, train_stretch

from .interpreter import INTERPRETED, interpreted, on_a_gpu, run_in_interpreter, starts_the_interpreter
from .skip_gram_texts import draws_of, rates_of, tables, text, topic_score

triton = pytest.importorskip("triton", reason="triton is not installed")


@starts_the_interpreter
def test_the_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def trained(impl: Any, tied: bool, **settings: float) -> tuple[Tensor, Tensor]:
    ids = text(30)
    found = tables(tied)
    draws, rates = draws_of(ids, window=2, **settings), rates_of(ids)
    # Two stretches: the second has neighbours that are no centres.
    for start, stop in ((0, 12), (12, len(ids))):
        train_stretch(*found, ids, start, stop, draws, 2, rates, impl=impl)
    return found


@interpreted
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_programs_in_turn_are_the_reference(tied: bool) -> None:
    # One negative: of two that are equal word2vec lets the second see what the first has done.
    both = zip(trained("triton", tied, negatives=1), trained("reference", tied, negatives=1), strict=True)
    for found, exact in both:
        torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-5)


@interpreted
def test_programs_in_turn_with_more_negatives() -> None:
    ids = text(12, vocabulary=4000, topics=2)
    draws, rates = draws_of(ids, 4000, power=0.0, negatives=5, sample=0.0, window=2), rates_of(ids)
    ways: list[list[Tensor]] = []
    for impl in ("triton", "reference"):
        found = list(tables(False, vocabulary=4000, dim=5))
        train_stretch(*found, ids, 0, len(ids), draws, 1, rates, impl=impl)  # type: ignore[arg-type]
        ways.append(found)
    for found, exact in zip(*ways, strict=True):
        # Few of the negatives are equal, but some are.
        assert float((found - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.skipif(INTERPRETED, reason="the compiler's part")
@pytest.mark.parametrize(("capability", "dim", "negatives"), [(80, 300, 10), (90, 100, 5)])
def test_the_kernel_compiles(capability: int, dim: int, negatives: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reefknot.kernels.triton_skip_gram import constants
    from reefknot.kernels.triton_skip_gram_kernels import skip_gram_kernel as kernel

    cut = constants(dim, negatives, window=5)
    types = {name: "*i64" if name.endswith("_ptr") else "fp32" for name in kernel.arg_names}
    types |= {"input_ptr": "*fp32", "output_ptr": "*fp32", "count": "i32", "centres": "i32", "V": "i32", "key": "i64"}
    types |= dict.fromkeys(cut, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in cut.items()}
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(ASTSource(kernel, types, values), target=target, options={"num_warps": 2})
    assert done.metadata.shared <= 49_152
    assert "ld.global.cg" in done.asm["ptx"]


@on_a_gpu
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gpu_learns_as_much(tied: bool) -> None:
    ids = text(30_000, topics=6, vocabulary=302)
    scores = {}
    for place in ("cuda", "cpu"):
        draws = draws_of(ids, 302, window=5, negatives=5, sample=1e-3).to(torch.device(place))
        generator = torch.Generator().manual_seed(0)
        first = torch.empty(302, 16).uniform_(-0.5 / 16, 0.5 / 16, generator=generator).to(place)
        second = first if tied else torch.zeros_like(first)
        for epoch in range(1, 4):
            rates = Rates(0.05, 5e-6, 3 * len(ids), (epoch - 1) * len(ids))
            train_stretch(first, second, ids, 0, len(ids), draws, epoch, rates)
        assert resolve(first) == "triton" or place == "cpu"
        scores[place] = topic_score(first.cpu(), topics=6)
    assert scores["cuda"] > scores["cpu"] - 0.05
