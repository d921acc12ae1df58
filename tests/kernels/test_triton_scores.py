"""The triton kernels match float64: small shapes in triton's interpreter on a CPU, large shapes on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_scores.py      runs only the interpreted tests

The interpreter cannot multiply bfloat16, so its tests use float32.

Shapes: N rows, D dimensions, V classes, K experts of a mixture, U queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.log_probs import LogProbs, linear_log_probs
from reefknot.kernels.losses import row_losses, summed_loss
from reefknot.kernels.passes import LossInputs
from reefknot.kernels.small import general_kernels
from reefknot.kernels.soft_target import soft_targets

from .dense import IGNORE, Problem, dense_losses, largest_error, problem, relative_error
from .interpreter import INTERPRETED, gpu_only, gpu_or_interpreter
from .scored import TRANSFORMS, Transform, dense_cross_entropy, dense_log_probs, objective

pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels import triton_scores
from reefknot.kernels.triton_scores import TritonBackend

DEVICE = "cpu" if INTERPRETED else "cuda"
ONE_PASS, TWO_PASSES = 64.0, 1e-6
"""Memory budgets in MiB. With a few bytes, classes are computed in blocks of 256."""

budgets = pytest.mark.parametrize("memory", [ONE_PASS, TWO_PASSES])
ALL_SETTINGS = list(itertools.product((ONE_PASS, TWO_PASSES), ("negative scale", "all"), (True, False)))
HALF_OF_SETTINGS = [settings for index, settings in enumerate(ALL_SETTINGS) if index.bit_count() % 2 == 0]
"""Half of the settings, with every pair of values. The interpreter is slow."""
settings_of_transforms = pytest.mark.parametrize(
    ("memory", "transform", "bias"),
    [(memory, TRANSFORMS[name], bias) for memory, name, bias in (HALF_OF_SETTINGS if INTERPRETED else ALL_SETTINGS)],
)


@pytest.fixture(params=["kernels", "torch"] if INTERPRETED else ["device default"], autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute float32 products by torch, as on a GPU; the interpreter also tests products by the kernels."""
    if request.param == "torch":
        monkeypatch.setattr(triton_scores, "torch_multiplies", lambda hidden_ND: True)


def summed(p: Problem) -> Tensor:
    return summed_loss(p.h, p.w, p.b, p.y)


def weighted_sum(losses: tuple[Tensor | None, ...]) -> Tensor:
    """Return a sum of all outputs, with a different weight for every row."""
    parts = []
    for losses_N in losses:
        assert losses_N is not None
        parts.append(
            (torch.linspace(0.5, 1.5, len(losses_N), dtype=torch.float64).to(losses_N.device) * losses_N).sum()
        )
    return torch.stack(parts).sum()


# -- small shapes --------------------------------------------------------------------------------------------------


@gpu_or_interpreter
@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        ((1, 1, 2), ONE_PASS),  # one tile, nearly empty
        ((7, 12, 31), ONE_PASS),
        ((7, 25, 67), ONE_PASS),  # a dimension that the copy engine does not support
        ((33, 48, 130), ONE_PASS),
        ((1, 25, 300), TWO_PASSES),
        ((33, 12, 300), TWO_PASSES),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_summed_loss_matches_dense(shape: tuple[int, int, int], memory: float, bias: bool) -> None:
    exact = problem(*shape, bias).to(torch.float32).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        actual = summed(p)
        assert relative_error(actual, loss) < 2e-6
        assert largest_error(p.gradients(actual / 3), exact.gradients(loss / 3)) < 4e-6


@gpu_or_interpreter
@pytest.mark.parametrize(("shape", "memory"), [((7, 12, 67), ONE_PASS), ((33, 25, 300), TWO_PASSES)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tau", [1.0, 20.0])
def test_row_losses_match_dense(shape: tuple[int, int, int], memory: float, bias: bool, tau: float) -> None:
    exact = problem(*shape, bias).to(torch.float32).to(torch.float64)
    losses = dense_losses(exact, tau)
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        actual = row_losses(p.h, p.w, p.b, p.y, tau)
        assert largest_error(actual, losses) < 2e-6
        assert largest_error(p.gradients(weighted_sum(actual)), exact.gradients(weighted_sum(losses))) < 4e-6


@gpu_or_interpreter
@settings_of_transforms
def test_transformed_losses_match_dense(memory: float, transform: Transform, bias: bool) -> None:
    exact = problem(33, 12, 300, bias).to(torch.float32).to(torch.float64)
    p = exact.to(torch.float32, DEVICE)
    class_weight_V = torch.linspace(0.2, 2.0, 300, dtype=torch.float64)
    for weight, smoothing, z_loss in ((None, 0.0, 0.0), (class_weight_V, 0.0, 0.0), (class_weight_V, 0.1, 1e-2)):
        settings: dict[str, Any] = {"reduction": "mean", "label_smoothing": smoothing, "z_loss": z_loss}
        expected = dense_cross_entropy(exact, transform, weight=weight, **settings)
        device_weight = None if weight is None else weight.to(DEVICE, torch.float32)
        actual = linear_cross_entropy(
            *(p.h, p.w, p.y, p.b), weight=device_weight, **settings, **transform.arguments, impl="triton", memory=memory
        )
        assert relative_error(actual, expected) < 2e-6
        assert largest_error(p.gradients(actual), exact.gradients(expected)) < 1e-5


@gpu_or_interpreter
@settings_of_transforms
def test_log_probs_and_entropies_match_dense(memory: float, transform: Transform, bias: bool) -> None:
    exact = problem(33, 12, 300, bias).to(torch.float32).to(torch.float64)
    p = exact.to(torch.float32, DEVICE)
    expected = dense_log_probs(exact, transform)
    actual = linear_log_probs(*(p.h, p.w, p.y), linear_bias=p.b, **transform.arguments, impl="triton", memory=memory)
    assert largest_error(actual[:3], expected[:3]) < 4e-6
    assert torch.equal(actual.argmax.cpu(), expected.argmax)
    for which in ("log_probs", "entropy", "lse", "all"):
        total = objective(LogProbs(*(result.cpu() for result in actual)), which)
        gradients = torch.autograd.grad(total, p.leaves, retain_graph=True)
        assert largest_error(gradients, exact.gradients(objective(dense_log_probs(exact, transform), which))) < 1e-5


@gpu_or_interpreter
@budgets
def test_entropies_of_large_scores_keep_their_digits(memory: float) -> None:
    """Every class exists twice, so the probability of every row is divided between two tiles."""
    half = problem(9, 12, 350, ignored=False).to(torch.float32)
    exact = Problem(half.h * 1e3, torch.cat([half.w, half.w]), None, half.y).to(torch.float64)
    p = exact.to(torch.float32, DEVICE)
    actual = linear_log_probs(p.h, p.w, p.y, impl="triton", memory=memory).entropy
    expected = dense_log_probs(exact, Transform()).entropy
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=2e-3)


@gpu_or_interpreter
@budgets
def test_mixture_loss_matches_dense(memory: float) -> None:
    exact = problem(12, 12, 300, ignored=False).to(torch.float32).to(torch.float64)
    targets_N = torch.tensor([5, 0, IGNORE, 299])
    log_prior_NK = torch.randn(4, 3).log_softmax(-1).double().requires_grad_()
    nll_NK = dense_losses(Problem(exact.h, exact.w, exact.b, targets_N.repeat_interleave(3)))[0].view(4, 3)
    loss = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(targets_N != IGNORE, 0.0).sum()
    p, prior_NK = exact.to(torch.float32, DEVICE), log_prior_NK.detach().float().to(DEVICE).requires_grad_()
    with using("triton", memory):
        actual = summed_loss(p.h, p.w, p.b, targets_N.to(DEVICE), prior_NK)
        gradients = torch.autograd.grad(actual, [*p.leaves, prior_NK])
    assert relative_error(actual, loss) < 2e-6
    assert largest_error(gradients, torch.autograd.grad(loss, [*exact.leaves, log_prior_NK])) < 4e-6


@gpu_or_interpreter
@budgets
def test_rows_that_overflow_are_recomputed(memory: float) -> None:
    exact = problem(7, 12, 300)
    # Some targets have a probability below 2^-100. One of them is ignored.
    sharp_ND = exact.h.detach().clone()
    sharp_ND[::2] *= 1e3
    worst_N = (sharp_ND @ exact.w.T).argmin(-1)
    exact = Problem(sharp_ND, exact.w, exact.b, worst_N.where(exact.y != IGNORE, IGNORE)).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    assert loss / len(exact.h) > 500
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        actual = summed(p)
        assert relative_error(actual, loss) < 2e-6
        assert largest_error(p.gradients(actual), exact.gradients(loss)) < 1e-5


@gpu_or_interpreter
def test_kept_blocks_of_a_row_are_relative_to_different_scores() -> None:
    """Some blocks are kept and some are computed twice. In a few rows, only some of them overflow."""
    exact = problem(33, 12, 3000)
    sharp_ND = exact.h.detach().clone()
    sharp_ND[::4] *= 40.0
    unlikely_N = (sharp_ND @ exact.w.T).kthvalue(5, dim=-1).indices
    exact = Problem(sharp_ND, exact.w, exact.b, unlikely_N.where(exact.y != IGNORE, IGNORE))
    exact = exact.to(torch.float32).to(torch.float64)
    losses_N = dense_losses(exact)[0]
    assert losses_N.max() > 100
    p = exact.to(torch.float32, DEVICE)
    with using("triton", TWO_PASSES):
        actual = summed(p)
        assert relative_error(actual, losses_N.sum()) < 2e-6
        assert largest_error(p.gradients(actual), exact.gradients(losses_N.sum())) < 1e-5


@gpu_or_interpreter
@pytest.mark.parametrize("bias", [60.0, 90.0, 1e4])
def test_scores_that_are_not_kept_may_be_much_larger(bias: float) -> None:
    """The first 256 classes, with all targets, are kept. A later class has a probability of almost one."""
    exact = problem(8, 4, 600).to(torch.float32)
    assert exact.b is not None
    bias_V = exact.b.detach().index_fill(0, torch.tensor(500), bias)
    exact = Problem(exact.h, exact.w, bias_V.requires_grad_(), exact.y % 250).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(torch.float32, DEVICE)
    with using("triton", TWO_PASSES):
        actual = summed(p)
        assert relative_error(actual, loss) < 2e-6
        assert largest_error(p.gradients(actual), exact.gradients(loss)) < 4e-6


@gpu_or_interpreter
@budgets
def test_extreme_scores_do_not_overflow(memory: float) -> None:
    hidden_ND = torch.tensor([[1.0], [-1.0], [1.0], [1.0]], device=DEVICE, requires_grad=True)
    weight_VD = torch.tensor([[1e4], [-1e4], *[[0.0]] * 300], device=DEVICE, requires_grad=True)
    targets_N = torch.tensor([0, 0, 1, IGNORE], device=DEVICE)
    with using("triton", memory):
        loss = summed_loss(hidden_ND, weight_VD, None, targets_N)
        grad_hidden_ND, grad_weight_VD = torch.autograd.grad(loss, (hidden_ND, weight_VD))
    assert loss.item() == 4e4
    assert grad_hidden_ND[:, 0].tolist() == [0.0, -2e4, 2e4, 0.0]
    assert grad_weight_VD[:2, 0].tolist() == [2.0, -2.0]
    assert not grad_weight_VD[2:].any()


@gpu_or_interpreter
@budgets
def test_biases_of_minus_infinity_rule_out_classes(memory: float) -> None:
    """A whole tile has biases of minus infinity, where -inf - (-inf) would give NaN."""
    exact = problem(7, 12, 300).to(torch.float32).to(torch.float64)
    assert exact.b is not None
    ruled_out_V = exact.b.detach().clone()
    ruled_out_V[32:256] = -torch.inf
    allowed_N = exact.y.where((exact.y < 32) | (exact.y >= 256), 5)
    exact = Problem(exact.h, exact.w, ruled_out_V.requires_grad_(), allowed_N)
    losses = dense_losses(exact)[:2]
    p = exact.to(torch.float32, DEVICE)
    with using("triton", memory):
        actual = row_losses(p.h, p.w, p.b, p.y)[:2]
        assert largest_error(actual, losses) < 2e-6
        assert largest_error(p.gradients(summed(p)), exact.gradients(losses[0].sum())) < 4e-6


@gpu_or_interpreter
def test_several_blocks_of_rows_match_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 of 17 rows: later blocks, of which the last is short, add to the gradients of the first."""
    monkeypatch.setattr(TritonBackend, "min_rows", lambda *_: 8)
    monkeypatch.setattr(TritonBackend, "size_multiple", 8)
    exact = problem(17, 12, 300).to(torch.float32).to(torch.float64)
    rows = exact.gradients(weighted_sum(dense_losses(exact, 5.0)))
    sums = exact.gradients(dense_losses(exact)[0].sum())
    p = exact.to(torch.float32, DEVICE)
    for memory in (0.02, TWO_PASSES):
        budget = int(memory * 2**20)
        assert LossInputs(p.h, p.w, p.b, p.y, torch.float32, TritonBackend(), budget).block_size().rows <= 8
        with using("triton", memory):
            actual = row_losses(p.h, p.w, p.b, p.y, 5.0)
            assert largest_error(p.gradients(weighted_sum(actual)), rows) < 4e-6
            assert largest_error(p.gradients(summed(p)), sums) < 4e-6


@gpu_or_interpreter
@budgets
def test_invalid_targets_give_nan(memory: float) -> None:
    p = problem(5, 12, 300, ignored=False).to(torch.float32, DEVICE)
    targets_N = torch.tensor([3, 300, IGNORE, -1, 299], device=DEVICE)
    with using("triton", memory):
        assert row_losses(p.h, p.w, p.b, targets_N).nll.isnan().tolist() == [False, True, False, True, False]
        assert summed_loss(p.h, p.w, p.b, targets_N).isnan()


@gpu_or_interpreter
@budgets
def test_ignored_rows_have_zero_loss_and_gradients(memory: float) -> None:
    p = problem(7, 12, 300).to(torch.float32, DEVICE)
    ignored = Problem(p.h, p.w, p.b, torch.full_like(p.y, IGNORE))
    with using("triton", memory):
        loss = summed(ignored)
        assert loss.item() == 0
        assert not any(gradient.any() for gradient in p.gradients(loss))


@gpu_or_interpreter
@budgets
def test_noncontiguous_inputs_give_the_same_gradients(memory: float) -> None:
    exact = problem(7, 12, 300).to(torch.float32).to(torch.float64)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(torch.float32, DEVICE)
    assert p.b is not None
    # Every second element of a tensor that is twice as large.
    h, w, b, y = (torch.stack([tensor.detach(), tensor.detach() + 1], dim=-1)[..., 0] for tensor in (*p.leaves, p.y))
    strided = Problem(h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y)
    with using("triton", memory):
        actual = summed(strided)
        assert relative_error(actual, loss) < 2e-6
        assert largest_error(strided.gradients(actual), exact.gradients(loss)) < 4e-6


@gpu_or_interpreter
@budgets
def test_repeated_calls_are_bitwise_equal(memory: float) -> None:
    p = problem(7, 25, 300).to(torch.float32, DEVICE)
    with using("triton", memory):
        runs = [(summed(p), row_losses(p.h, p.w, p.b, p.y, 2.0)) for _ in range(2)]
        results = [[loss, *p.gradients(loss), *p.gradients(weighted_sum(rows))] for loss, rows in runs]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@gpu_or_interpreter
@budgets
@pytest.mark.parametrize("values", [12, 5])
def test_soft_targets_match_dense(memory: float, values: int) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(shape).double().requires_grad_() for shape in ((7, 12), (300, 12), (300, values))]
    queries_UV = (exact[0] @ exact[1].T / 5.0).softmax(-1)
    mean_UC, negentropy_U = queries_UV @ exact[2] - exact[2].mean(0), (queries_UV * queries_UV.log()).sum(-1)
    leaves = [tensor.detach().float().to(DEVICE).requires_grad_() for tensor in exact]
    with using("triton", memory):
        targets = soft_targets(leaves[0], leaves[1], leaves[2], tau=5.0)
        assert largest_error(targets, (mean_UC, negentropy_U)) < 2e-6
        gradients = torch.autograd.grad(targets.mean.square().sum() + targets.negentropy.square().sum(), leaves)
    by_definition = torch.autograd.grad(mean_UC.square().sum() + negentropy_U.square().sum(), exact)
    assert largest_error(gradients, by_definition) < 1e-5


# -- large shapes --------------------------------------------------------------------------------------------------

LARGE = list(itertools.product((1, 7, 1400), (25, 400, 1023), (2, 257, 33_278, 267_735)))


def dense_loss_and_gradients(p: Problem) -> tuple[Tensor, list[Tensor]]:
    """Return the dense loss and its gradients, 200 rows at a time to save memory."""
    total, gradients = p.h.new_zeros(()), [torch.zeros_like(leaf) for leaf in p.leaves]
    for rows in (slice(start, start + 200) for start in range(0, len(p.h), 200)):
        loss = dense_losses(Problem(p.h[rows], p.w, p.b, p.y[rows]))[0].sum()
        total += loss.detach()
        for sum_of_parts, gradient in zip(gradients, p.gradients(loss), strict=True):
            sum_of_parts += gradient
    return total, gradients


def largest_gradient_error(p: Problem, actual: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest error of the gradients.

    The error of the biases is relative to the sum of the sizes of their terms. The terms of a few rows may cancel, and
    then even exact gradients have a large relative error after one rounding to half precision.
    """
    errors = [
        relative_error(gradient, exact_gradient) for gradient, exact_gradient in zip(actual[:2], exact[:2], strict=True)
    ]
    if p.b is not None:
        with torch.no_grad():
            scores_NV = p.h.double() @ p.w.double().T + p.b.double()
            sizes_V = (scores_NV.softmax(-1) * (p.y != IGNORE)[:, None]).sum(0)
            sizes_V += torch.bincount(p.y[p.y != IGNORE], minlength=len(p.b))
        errors.append(float((actual[2].double() - exact[2]).norm() / sizes_V.norm()))
    return max(errors)


@gpu_only
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_matches_float64_on_a_gpu(shape: tuple[int, int, int], bias: bool) -> None:
    with torch.device(DEVICE):
        p = problem(*shape, bias).to(torch.bfloat16, DEVICE)
    loss, gradients = dense_loss_and_gradients(p.to(torch.float64, DEVICE))
    for memory in (20.0, 200.0, 2048.0):
        with using("triton", memory):
            losses = [summed(p) for _ in range(2)]
            assert relative_error(losses[0], loss) < 1e-3, memory
            first, second = (p.gradients(loss_value) for loss_value in losses)
            assert largest_gradient_error(p, first, gradients) < 1e-2, memory
            # The last classes of an odd number have a separate product, which the norm of all classes would not show.
            assert relative_error(first[1][-7:], gradients[1][-7:]) < 2e-2, memory
            assert torch.equal(losses[0], losses[1])
            assert all(
                torch.equal(first_gradient, second_gradient)
                for first_gradient, second_gradient in zip(first, second, strict=True)
            ), memory
            rows = row_losses(p.h, p.w, p.b, p.y).nll.sum()
            assert relative_error(rows, loss) < 1e-3, memory
            assert largest_gradient_error(p, p.gradients(rows), gradients) < 1e-2, memory


@pytest.fixture
def products_in() -> Iterator[Callable[[bool], None]]:
    """Choose between TF32 and float32. Monkeypatch cannot restore this setting, because it is not a plain attribute."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda tf32: setattr(matmul, "allow_tf32", tf32)
    matmul.allow_tf32 = before


@gpu_only
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", [(7, 25, 257), (1400, 400, 33_278)], ids=lambda shape: "x".join(map(str, shape)))
def test_float32_matches_float64_on_a_gpu(
    shape: tuple[int, int, int], tf32: bool, products_in: Callable[[bool], None]
) -> None:
    products_in(tf32)
    p = problem(*shape).to(torch.float32, DEVICE)
    loss, gradients = dense_loss_and_gradients(p.to(torch.float64, DEVICE))
    loss_tolerance, gradient_tolerance = (3e-4, 3e-3) if tf32 else (2e-6, 2e-5)
    for memory in (5.0, 2048.0):
        with using("triton", memory):
            losses = [summed(p) for _ in range(2)]
            assert relative_error(losses[0], loss) < loss_tolerance, memory
            first, second = (p.gradients(loss_value) for loss_value in losses)
            assert largest_gradient_error(p, first, gradients) < gradient_tolerance, memory
            assert relative_error(first[1][-7:], gradients[1][-7:]) < 2 * gradient_tolerance, memory
            assert torch.equal(losses[0], losses[1])
            assert all(
                torch.equal(first_gradient, second_gradient)
                for first_gradient, second_gradient in zip(first, second, strict=True)
            ), memory
            rows = row_losses(p.h, p.w, p.b, p.y).nll.sum()
            assert relative_error(rows, loss) < loss_tolerance, memory
            assert largest_gradient_error(p, p.gradients(rows), gradients) < gradient_tolerance, memory


@gpu_only
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory", [64, 256, 1024])
def test_peak_memory_fits_the_budget_on_a_gpu(weights: torch.dtype, memory: int) -> None:
    """With these budgets, blocks of classes are kept in the memory of the gradient, and in working memory."""
    hidden_ND = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(150_000, 1024, device=DEVICE, dtype=weights, requires_grad=True)
    targets_N = torch.randint(150_000, (4096,), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with using("triton", memory), torch.autocast("cuda", dtype=torch.bfloat16):
        loss = summed_loss(hidden_ND, weight_VD, None, targets_N)
    torch.autograd.grad(loss, (hidden_ND, weight_VD))
    used = torch.cuda.max_memory_allocated() - before - hidden_ND.nbytes - weight_VD.nbytes
    assert used < 1.25 * memory * 2**20 + 2**20


@gpu_only
@pytest.mark.parametrize(("dtype", "budgets"), [(torch.bfloat16, (20, 2048)), (torch.float32, (5, 2048))])
def test_memory_budgets_cover_one_and_two_passes(dtype: torch.dtype, budgets: tuple[int, int]) -> None:
    p = problem(1400, 400, 33_278).to(dtype, DEVICE)
    one_pass = [
        LossInputs(p.h, p.w, p.b, p.y, dtype, TritonBackend(), memory * 2**20).block_size().classes == 33_278
        for memory in budgets
    ]
    assert one_pass == [False, True]


@gpu_or_interpreter
def test_float32_takes_one_pass_where_bfloat16_takes_two() -> None:
    """Torch computes float32 products, for which blocks of few rows are fast enough. The kernels need more rows."""
    hidden_ND, weight_VD = torch.zeros(8192, 64), torch.zeros(20_000, 64)
    blocks = {
        dtype: LossInputs(
            hidden_ND, weight_VD, None, torch.zeros(8192, dtype=torch.long), dtype, TritonBackend(), 2**23
        ).block_size()
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert blocks[torch.float32].classes == 20_000
    assert 64 <= blocks[torch.float32].rows < 512
    assert blocks[torch.bfloat16].classes < 20_000


@gpu_only
def test_float32_weights_get_float32_gradients_under_autocast() -> None:
    exact = problem(1400, 400, 33_278).to(torch.float64, DEVICE)
    p = exact.to(torch.float32, DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(p.h, p.w, p.y, p.b, reduction="sum")
    expected, gradients = dense_loss_and_gradients(exact)
    assert relative_error(loss, expected) < 1e-3
    actual = p.gradients(loss)
    assert [gradient.dtype for gradient in actual] == [torch.float32] * 3
    assert largest_error(actual, gradients) < 1e-2


@gpu_only
def test_auto_chooses_triton_for_bfloat16_and_float32() -> None:
    p = problem(7, 25, 300)
    implementations: dict[torch.dtype, Impl] = {
        torch.bfloat16: "triton",
        torch.float32: "triton",
        torch.float64: "chunked",
    }
    for dtype, impl in implementations.items():
        inputs = p.to(dtype, DEVICE)
        with using(impl):
            expected = inputs.gradients(summed(inputs))
        with general_kernels():
            actual = inputs.gradients(summed(inputs))
        assert all(
            torch.equal(gradient, expected_gradient)
            for gradient, expected_gradient in zip(actual, expected, strict=True)
        ), dtype
