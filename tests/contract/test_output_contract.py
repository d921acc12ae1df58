"""The contract of every output end, for all combinations of classifier, normaliser and tie.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import OutputEnd, Plan

from .combinations import VOCABULARY, Case

TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7])
CHANCE = 1e-5
"""Significance level: a correct sampler hardly ever fails, even in hundreds of tests."""

both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
"""For properties of both the exact loss and the training loss, which an end may sample."""


def output_of(case: Case, training: bool = False) -> OutputEnd:
    """Return the output end in float64, with random parameters, because a missing bias of zero would not show.

    In evaluation mode by default, because some training losses are sampled. Dropout rates are 0 by default.
    """
    output = case.build().output.double().train(training)
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_(std=0.5)
    return output


def hidden(output: OutputEnd, rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, output.context_dim, dtype=torch.float64, requires_grad=True)


def total_loss(output: OutputEnd, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> Tensor:
    return torch.stack([part.sum for part in output.loss(hidden_ND, targets_N, plan).values()]).sum()


def gather_targets(log_probs_NV: Tensor) -> Tensor:
    """Return the log-probabilities of the targets, with zeros for ignored targets."""
    return log_probs_NV.gather(1, TARGETS.clamp(min=0)[:, None])[:, 0].where(TARGETS != IGNORE, 0.0)


def test_probabilities_sum_to_one(end_case: Case) -> None:
    output = output_of(end_case)
    log_probs_NV = output.log_probs(hidden(output))
    assert log_probs_NV.shape == (len(TARGETS), VOCABULARY)
    assert log_probs_NV.shape[1] == output.vocab_size
    torch.testing.assert_close(log_probs_NV.exp().sum(-1), torch.ones(len(TARGETS), dtype=torch.float64))


def test_loss_equals_gathered_log_probs(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output)
    part = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))["nll"]
    torch.testing.assert_close(part.sum, -gather_targets(output.log_probs(hidden_ND)).sum())
    assert part.count == 5


@both_modes
def test_ignored_targets_have_zero_loss_and_gradients(end_case: Case, training: bool) -> None:
    output = output_of(end_case, training)
    hidden_ND = hidden(output)
    total_loss(output, hidden_ND, TARGETS, output.prepare(TARGETS)).backward()
    assert hidden_ND.grad is not None
    assert (hidden_ND.grad[TARGETS == IGNORE] == 0).all()
    assert (hidden_ND.grad[TARGETS != IGNORE] != 0).any(-1).all()
    all_ignored = torch.full_like(TARGETS, IGNORE)
    plan = output.prepare(all_ignored)
    assert plan.count == 0
    assert total_loss(output, hidden_ND, all_ignored, plan) == 0


def test_target_log_probs_equal_gathered_log_probs(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output)
    torch.testing.assert_close(output.target_log_probs(hidden_ND, TARGETS), gather_targets(output.log_probs(hidden_ND)))


@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_topk_equals_a_sort_of_log_probs(end_case: Case, k: int) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output)
    values, ids = output.topk(hidden_ND, k)
    log_probs_NV = output.log_probs(hidden_ND)
    torch.testing.assert_close(values, log_probs_NV.sort(-1, descending=True).values[:, :k])
    torch.testing.assert_close(values, log_probs_NV.gather(1, ids))


def test_samples_follow_the_distribution(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output, 2).detach()
    samples = 20_000
    generator = torch.Generator().manual_seed(7)
    ids = output.sample(hidden_ND.repeat_interleave(samples, dim=0), generator).view(2, samples)
    for row, probs_V in zip(ids, output.log_probs(hidden_ND).detach().exp(), strict=True):
        counts = torch.bincount(row, minlength=VOCABULARY)
        assert chisquare(counts, probs_V * samples).pvalue > CHANCE
        assert chisquare(counts.roll(1), probs_V * samples).pvalue < CHANCE, (
            "a sampler that is off by one class must fail"
        )
    again = output.sample(hidden_ND.repeat_interleave(samples, dim=0), torch.Generator().manual_seed(7))
    assert torch.equal(again.view(2, samples), ids)


def test_training_loss_passes_gradcheck(end_case: Case, pytestconfig: pytest.Config) -> None:
    """Check the training loss, with one plan, so that a sampled loss is deterministic.

    The derivative is compared in a random direction of every parameter, and of all elements with `--combinations all`.
    """
    output = output_of(end_case, training=True)
    hidden_ND = hidden(output)
    plan = output.prepare(TARGETS)

    def value(*_: Tensor) -> Tensor:
        # gradcheck changes its inputs in place, and the parameters are inputs.
        return torch.stack([total_loss(output, hidden_ND, TARGETS, plan), *output.penalties().values()]).sum()

    fast = pytestconfig.getoption("--combinations") != "all"
    assert torch.autograd.gradcheck(value, (hidden_ND, *output.parameters()), fast_mode=fast)


def test_penalties_are_nonnegative_scalars_with_gradients(end_case: Case) -> None:
    output = output_of(end_case)
    for name, penalty in output.penalties().items():
        assert penalty.shape == (), name
        assert penalty >= 0, name
        output.zero_grad()
        penalty.backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in output.parameters()), name


def test_losses_add_up_over_rows(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output)
    whole = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))
    cuts = (slice(0, 1), slice(1, 3), slice(3, None))
    part_losses = [output.loss(hidden_ND[rows], TARGETS[rows], output.prepare(TARGETS[rows])) for rows in cuts]
    for name, part in whole.items():
        torch.testing.assert_close(sum(part_loss[name].sum for part_loss in part_losses), part.sum)
        assert sum(part_loss[name].count for part_loss in part_losses) == part.count


def test_there_is_one_vector_per_class(end_case: Case) -> None:
    assert output_of(end_case).vectors().shape[0] == VOCABULARY


@both_modes
def test_bfloat16_loss_is_close_to_float32(end_case: Case, training: bool) -> None:
    output = output_of(end_case, training).float()
    hidden_ND = hidden(output).detach().float().requires_grad_()
    plan = output.prepare(TARGETS)
    exact = total_loss(output, hidden_ND, TARGETS, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = total_loss(output, hidden_ND, TARGETS, plan)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.0)
    expected, actual = (torch.autograd.grad(value, hidden_ND)[0] for value in (exact, rounded))
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_target_log_probs_equal_log_probs_under_autocast(end_case: Case) -> None:
    """The biases are as large as those of rare classes. Rounding them to bfloat16 would cost a tenth of a nat."""
    output = output_of(end_case).float()
    with torch.no_grad():
        for name, parameter in output.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(mean=-8.0, std=4.0)
    hidden_ND = hidden(output).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs_N, log_probs_NV = output.target_log_probs(hidden_ND, TARGETS), output.log_probs(hidden_ND)
    assert log_probs_N.dtype == log_probs_NV.dtype == torch.float32
    torch.testing.assert_close(log_probs_NV.exp().sum(-1), torch.ones(len(TARGETS)))
    torch.testing.assert_close(log_probs_N, gather_targets(log_probs_NV))


def test_invalid_target_is_rejected_or_gives_nan(end_case: Case) -> None:
    """`prepare` raises an error. Scored without it, the log-probability is NaN and never zero."""
    output = output_of(end_case)
    for target in (output.vocab_size, -1):
        targets_N = TARGETS.clone()
        targets_N[0] = target
        with pytest.raises(ArgumentError, match=f"target {target} is not a class"):
            output.prepare(targets_N)
        try:
            assert output.target_log_probs(hidden(output), targets_N)[0].isnan()
        except ArgumentError:
            assert isinstance(output, AdaptiveSoftmax)  # sorts the targets by band first


def test_compiled_loss_equals_eager_loss(end_case: Case) -> None:
    """The training loss compiles into one graph."""
    output = output_of(end_case, training=True)
    hidden_ND = hidden(output)
    plan = output.prepare(TARGETS)
    torch.compiler.reset()
    compiled = torch.compile(total_loss, backend="aot_eager", fullgraph=True)
    actual, expected = (loss(output, hidden_ND, TARGETS, plan) for loss in (compiled, total_loss))
    torch.testing.assert_close(actual, expected)
    inputs = [hidden_ND, *output.parameters()]
    # The first of the projections that are shared with the input end is not used, so its gradient is zero.
    gradients = (torch.autograd.grad(value, inputs, materialize_grads=True) for value in (actual, expected))
    torch.testing.assert_close(*gradients)
