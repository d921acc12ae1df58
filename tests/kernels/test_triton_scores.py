"""The triton kernels against float64: small shapes in triton's interpreter on a CPU, large ones on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_scores.py      the interpreter's part by itself

The interpreter has no product of bfloat16: float32 there.

Shapes: N rows, D width, V classes, K experts of a mixture, U queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy, row_losses, summed_loss
from reefknot.kernels.passes import LossInputs
from reefknot.kernels.soft_target import soft_targets

from .dense import IGNORE, Problem, dense_losses, furthest, off, problem
from .interpreter import INTERPRETED, anywhere, on_a_gpu, run_in_interpreter, starts_the_interpreter

pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels import triton_scores
from reefknot.kernels.triton_scores import TritonScores

DEVICE = "cpu" if INTERPRETED else "cuda"
ONE_PASS, TWO_PASSES = 64.0, 1e-6
"""MiB: with a few bytes, classes come in blocks of 256."""

budgets = pytest.mark.parametrize("memory", [ONE_PASS, TWO_PASSES])


@starts_the_interpreter
def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(params=["kernels", "torch"] if INTERPRETED else ["as on this device"], autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes the products of float32 numbers: on a GPU torch does, in the interpreter either."""
    if request.param == "torch":
        monkeypatch.setattr(triton_scores, "torch_multiplies", lambda h_ND: True)


def summed(p: Problem) -> Tensor:
    return summed_loss(p.h, p.w, p.b, p.y)


def weighed(losses: tuple[Tensor | None, ...]) -> Tensor:
    """Every row of everything that comes back, weighed differently."""
    parts = []
    for each in losses:
        assert each is not None
        parts.append((torch.linspace(0.5, 1.5, len(each), dtype=torch.float64).to(each.device) * each).sum())
    return torch.stack(parts).sum()


# -- small shapes --------------------------------------------------------------------------------------------------


@anywhere
@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        ((1, 1, 2), ONE_PASS),  # one tile, nearly empty
        ((7, 12, 31), ONE_PASS),
        ((7, 25, 67), ONE_PASS),  # a width that the copy engine does not take
        ((33, 48, 130), ONE_PASS),
        ((1, 25, 300), TWO_PASSES),
        ((33, 12, 300), TWO_PASSES),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_sums(shape: tuple[int, int, int], memory: float, bias: bool) -> None:
    exact = problem(*shape, bias).to(torch.float32).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        found = summed(p)
        assert off(found, loss) < 2e-6
        assert furthest(p.gradients(found / 3), exact.gradients(loss / 3)) < 4e-6


@anywhere
@pytest.mark.parametrize(("shape", "memory"), [((7, 12, 67), ONE_PASS), ((33, 25, 300), TWO_PASSES)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tau", [1.0, 20.0])
def test_rows(shape: tuple[int, int, int], memory: float, bias: bool, tau: float) -> None:
    exact = problem(*shape, bias).to(torch.float32).to(torch.float64)
    losses = dense_losses(exact, tau)
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        found = row_losses(p.h, p.w, p.b, p.y, tau)
        assert furthest(found, losses) < 2e-6
        assert furthest(p.gradients(weighed(found)), exact.gradients(weighed(losses))) < 4e-6


@anywhere
@budgets
def test_a_mixture(memory: float) -> None:
    exact = problem(12, 12, 300, ignored=False).to(torch.float32).to(torch.float64)
    y_N = torch.tensor([5, 0, IGNORE, 299])
    log_prior_NK = torch.randn(4, 3).log_softmax(-1).double().requires_grad_()
    nll_NK = dense_losses(Problem(exact.h, exact.w, exact.b, y_N.repeat_interleave(3)))[0].view(4, 3)
    loss = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(y_N != IGNORE, 0.0).sum()
    p, prior_NK = exact.to(torch.float32, DEVICE), log_prior_NK.detach().float().to(DEVICE).requires_grad_()
    with using("triton", memory):
        found = summed_loss(p.h, p.w, p.b, y_N.to(DEVICE), prior_NK)
        gradients = torch.autograd.grad(found, [*p.leaves, prior_NK])
    assert off(found, loss) < 2e-6
    assert furthest(gradients, torch.autograd.grad(loss, [*exact.leaves, log_prior_NK])) < 4e-6


@anywhere
@budgets
def test_rows_whose_sum_leaves_the_range_are_repaired(memory: float) -> None:
    exact = problem(7, 12, 300)
    # Targets less probable than 2^-100, among ordinary rows; one of them ignored.
    sharp_ND = exact.h.detach().clone()
    sharp_ND[::2] *= 1e3
    worst_N = (sharp_ND @ exact.w.T).argmin(-1)
    exact = Problem(sharp_ND, exact.w, exact.b, worst_N.where(exact.y != IGNORE, IGNORE)).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    assert loss / len(exact.h) > 500
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        found = summed(p)
        assert off(found, loss) < 2e-6
        assert furthest(p.gradients(found), exact.gradients(loss)) < 1e-5


@anywhere
@budgets
def test_extreme_scores(memory: float) -> None:
    h_ND = torch.tensor([[1.0], [-1.0], [1.0], [1.0]], device=DEVICE, requires_grad=True)
    w_VD = torch.tensor([[1e4], [-1e4], *[[0.0]] * 300], device=DEVICE, requires_grad=True)
    y_N = torch.tensor([0, 0, 1, IGNORE], device=DEVICE)
    with using("triton", memory):
        loss = summed_loss(h_ND, w_VD, None, y_N)
        dh_ND, dw_VD = torch.autograd.grad(loss, (h_ND, w_VD))
    assert loss.item() == 4e4
    assert dh_ND[:, 0].tolist() == [0.0, -2e4, 2e4, 0.0]
    assert dw_VD[:2, 0].tolist() == [2.0, -2.0]
    assert not dw_VD[2:].any()


@anywhere
@budgets
def test_classes_that_are_ruled_out(memory: float) -> None:
    """A whole tile of biases of minus infinity: nothing of it may be subtracted from itself."""
    exact = problem(7, 12, 300).to(torch.float32).to(torch.float64)
    assert exact.b is not None
    ruled_out_V = exact.b.detach().clone()
    ruled_out_V[32:256] = -torch.inf
    allowed_N = exact.y.where((exact.y < 32) | (exact.y >= 256), 5)
    exact = Problem(exact.h, exact.w, ruled_out_V.requires_grad_(), allowed_N)
    losses = dense_losses(exact)[:2]
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        found = row_losses(p.h, p.w, p.b, p.y)[:2]
        assert furthest(found, losses) < 2e-6
        assert furthest(p.gradients(summed(p)), exact.gradients(losses[0].sum())) < 4e-6


@anywhere
def test_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows at once than a GPU would be given: later blocks, the last of them short, add to what others wrote."""
    monkeypatch.setattr(TritonScores, "fewest_rows", lambda *_: 8)
    monkeypatch.setattr(TritonScores, "multiple", 8)
    exact = problem(17, 12, 300).to(torch.float32).to(torch.float64)
    rows = exact.gradients(weighed(dense_losses(exact, 5.0)))
    sums = exact.gradients(dense_losses(exact)[0].sum())
    p = exact.to(torch.float32, DEVICE)
    for memory in (0.02, TWO_PASSES):
        budget = int(memory * 2**20)
        assert LossInputs(p.h, p.w, p.b, p.y, torch.float32, TritonScores(), budget).blocks().rows <= 8
        with using("triton", memory):
            found = row_losses(p.h, p.w, p.b, p.y, 5.0)
            assert furthest(p.gradients(weighed(found)), rows) < 4e-6
            assert furthest(p.gradients(summed(p)), sums) < 4e-6


@anywhere
@budgets
def test_a_target_that_is_no_class_is_not_a_number(memory: float) -> None:
    p = problem(5, 12, 300, ignored=False).to(torch.float32, DEVICE)
    y_N = torch.tensor([3, 300, IGNORE, -1, 299], device=DEVICE)
    with using("triton", memory):
        assert row_losses(p.h, p.w, p.b, y_N).nll.isnan().tolist() == [False, True, False, True, False]
        assert summed_loss(p.h, p.w, p.b, y_N).isnan()


@anywhere
@budgets
def test_ignored_rows_send_nothing(memory: float) -> None:
    p = problem(7, 12, 300).to(torch.float32, DEVICE)
    nobody = Problem(p.h, p.w, p.b, torch.full_like(p.y, IGNORE))
    with using("triton", memory):
        loss = summed(nobody)
        assert loss.item() == 0
        assert not any(gradient.any() for gradient in p.gradients(loss))


@anywhere
@budgets
def test_strides_do_not_matter(memory: float) -> None:
    exact = problem(7, 12, 300).to(torch.float32).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(torch.float32, DEVICE)
    assert p.b is not None
    # Each second place of something twice as long.
    h, w, b, y = (torch.stack([each.detach(), each.detach() + 1], dim=-1)[..., 0] for each in (*p.leaves, p.y))
    strided = Problem(h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y)
    with using("triton", memory):
        found = summed(strided)
        assert off(found, loss) < 2e-6
        assert furthest(strided.gradients(found), exact.gradients(loss)) < 4e-6


@anywhere
@budgets
def test_two_runs_are_equal_to_the_bit(memory: float) -> None:
    p = problem(7, 25, 300).to(torch.float32, DEVICE)
    with using("triton", memory):
        runs = [(summed(p), row_losses(p.h, p.w, p.b, p.y, 2.0)) for _ in range(2)]
        found = [[loss, *p.gradients(loss), *p.gradients(weighed(rows))] for loss, rows in runs]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@anywhere
@budgets
@pytest.mark.parametrize("values", [12, 5])
def test_soft_targets(memory: float, values: int) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(shape).double().requires_grad_() for shape in ((7, 12), (300, 12), (300, values))]
    q_UV = (exact[0] @ exact[1].T / 5.0).softmax(-1)
    mean_UC, negentropy_U = q_UV @ exact[2] - exact[2].mean(0), (q_UV * q_UV.log()).sum(-1)
    own = [each.detach().float().to(DEVICE).requires_grad_() for each in exact]
    with using("triton", memory):
        found = soft_targets(own[0], own[1], own[2], tau=5.0)
        assert furthest(found, (mean_UC, negentropy_U)) < 2e-6
        gradients = torch.autograd.grad(found.mean.square().sum() + found.negentropy.square().sum(), own)
    by_definition = torch.autograd.grad(mean_UC.square().sum() + negentropy_U.square().sum(), exact)
    assert furthest(gradients, by_definition) < 1e-5


# -- large shapes --------------------------------------------------------------------------------------------------

LARGE = list(itertools.product((1, 7, 1400), (25, 400, 1023), (2, 257, 33_278, 267_735)))


def in_parts(p: Problem) -> tuple[Tensor, list[Tensor]]:
    """The loss by definition and its gradients: some rows at a time, because all scores in float64 do not fit."""
    total, gradients = p.h.new_zeros(()), [torch.zeros_like(leaf) for leaf in p.leaves]
    for rows in (slice(start, start + 200) for start in range(0, len(p.h), 200)):
        loss = dense_losses(Problem(p.h[rows], p.w, p.b, p.y[rows]))[0].sum()
        total += loss.detach()
        for sum_of_parts, gradient in zip(gradients, p.gradients(loss), strict=True):
            sum_of_parts += gradient
    return total, gradients


def largest_error(p: Problem, found: list[Tensor], exact: list[Tensor]) -> float:
    """That of the worst gradient. The biases' is relative to the sum of the sizes of what they add up: of a few rows
    the terms may cancel, and then even exact ones that are rounded once to half precision are far off."""
    errors = [off(one, other) for one, other in zip(found[:2], exact[:2], strict=True)]
    if p.b is not None:
        with torch.no_grad():
            z_NV = p.h.double() @ p.w.double().T + p.b.double()
            sizes_V = (z_NV.softmax(-1) * (p.y != IGNORE)[:, None]).sum(0)
            sizes_V += torch.bincount(p.y[p.y != IGNORE], minlength=len(p.b))
        errors.append(float((found[2].double() - exact[2]).norm() / sizes_V.norm()))
    return max(errors)


@on_a_gpu
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_on_a_gpu(shape: tuple[int, int, int], bias: bool) -> None:
    with torch.device(DEVICE):
        p = problem(*shape, bias).to(torch.bfloat16, DEVICE)
    loss, gradients = in_parts(p.to(torch.float64, DEVICE))
    for memory in (20.0, 2048.0):
        with using("triton", memory):
            found = [summed(p) for _ in range(2)]
            assert off(found[0], loss) < 1e-3, memory
            first, second = (p.gradients(each) for each in found)
            assert largest_error(p, first, gradients) < 1e-2, memory
            # Of an odd number the last few classes have a product of their own, which the norm of all would not miss.
            assert off(first[1][-7:], gradients[1][-7:]) < 2e-2, memory
            assert torch.equal(found[0], found[1])
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), memory
            rows = row_losses(p.h, p.w, p.b, p.y).nll.sum()
            assert off(rows, loss) < 1e-3, memory
            assert largest_error(p, p.gradients(rows), gradients) < 1e-2, memory


@pytest.fixture
def products_in() -> Iterator[Callable[[bool], None]]:
    """Choose between TF32 and float32. Monkeypatch cannot restore this setting: it is not an ordinary attribute."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda tf32: setattr(matmul, "allow_tf32", tf32)
    matmul.allow_tf32 = before


@on_a_gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", [(7, 25, 257), (1400, 400, 33_278)], ids=lambda shape: "x".join(map(str, shape)))
def test_float32_on_a_gpu(shape: tuple[int, int, int], tf32: bool, products_in: Callable[[bool], None]) -> None:
    products_in(tf32)
    p = problem(*shape).to(torch.float32, DEVICE)
    loss, gradients = in_parts(p.to(torch.float64, DEVICE))
    near, nearby = (3e-4, 3e-3) if tf32 else (2e-6, 2e-5)
    for memory in (5.0, 2048.0):
        with using("triton", memory):
            found = [summed(p) for _ in range(2)]
            assert off(found[0], loss) < near, memory
            first, second = (p.gradients(each) for each in found)
            assert largest_error(p, first, gradients) < nearby, memory
            assert off(first[1][-7:], gradients[1][-7:]) < 2 * nearby, memory
            assert torch.equal(found[0], found[1])
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), memory
            rows = row_losses(p.h, p.w, p.b, p.y).nll.sum()
            assert off(rows, loss) < near, memory
            assert largest_error(p, p.gradients(rows), gradients) < nearby, memory


@on_a_gpu
@pytest.mark.parametrize(("dtype", "budgets"), [(torch.bfloat16, (20, 2048)), (torch.float32, (5, 2048))])
def test_the_budgets_above_make_one_pass_and_two(dtype: torch.dtype, budgets: tuple[int, int]) -> None:
    p = problem(1400, 400, 33_278).to(dtype, DEVICE)
    whole = [
        LossInputs(p.h, p.w, p.b, p.y, dtype, TritonScores(), memory * 2**20).blocks().classes == 33_278
        for memory in budgets
    ]
    assert whole == [False, True]


@anywhere
def test_few_rows_of_float32_are_worth_a_pass_of_their_own() -> None:
    """Torch makes their products, so that a block of them is as it was without triton; bfloat16 takes two passes."""
    h_ND, w_VD = torch.zeros(8192, 64), torch.zeros(20_000, 64)
    taken = {
        dtype: LossInputs(h_ND, w_VD, None, torch.zeros(8192, dtype=torch.long), dtype, TritonScores(), 2**23).blocks()
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert taken[torch.float32].classes == 20_000
    assert 64 <= taken[torch.float32].rows < 512
    assert taken[torch.bfloat16].classes < 20_000


@on_a_gpu
def test_weights_in_float32_have_gradients_in_float32_under_autocast() -> None:
    exact = problem(1400, 400, 33_278).to(torch.float64, DEVICE)
    p = exact.to(torch.float32, DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(p.h, p.w, p.y, p.b, reduction="sum")
    expected, gradients = in_parts(exact)
    assert off(loss, expected) < 1e-3
    found = p.gradients(loss)
    assert [each.dtype for each in found] == [torch.float32] * 3
    assert furthest(found, gradients) < 1e-2


@on_a_gpu
def test_auto_takes_triton_for_bfloat16_and_float32() -> None:
    p = problem(7, 25, 300)
    taken: dict[torch.dtype, Impl] = {torch.bfloat16: "triton", torch.float32: "triton", torch.float64: "chunked"}
    for dtype, impl in taken.items():
        own = p.to(dtype, DEVICE)
        with using(impl):
            expected = own.gradients(summed(own))
        found = own.gradients(summed(own))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), dtype
