"""What every output end promises, checked for every combination of classifiers, normaliser and tie.

Shapes: N rows, D width, V classes.
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
"""A right sampler fails so seldom, even with two tests for each of a hundred combinations."""

both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
"""For what must hold of the exact loss and of the one trained with, which an end may sample."""


def output_of(case: Case, training: bool = False) -> OutputEnd:
    """In float64, every parameter drawn: a zero bias would hide that it is left out.

    In evaluation mode unless asked otherwise, because what is sampled in training is exact only there. Nothing is
    dropped in either: drop rates are 0 by default.
    """
    output = case.build().output.double().train(training)
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_(std=0.5)
    return output


def hidden(output: OutputEnd, rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, output.context_dim, dtype=torch.float64, requires_grad=True)


def total(output: OutputEnd, h_ND: Tensor, y_N: Tensor, plan: Plan) -> Tensor:
    return torch.stack([part.sum for part in output.loss(h_ND, y_N, plan).values()]).sum()


def gathered(logp_NV: Tensor) -> Tensor:
    """The targets' log-probabilities, zero where ignored."""
    return logp_NV.gather(1, TARGETS.clamp(min=0)[:, None])[:, 0].where(TARGETS != IGNORE, 0.0)


def test_probabilities_sum_to_one(end_case: Case) -> None:
    output = output_of(end_case)
    logp_NV = output.log_probs(hidden(output))
    assert logp_NV.shape == (len(TARGETS), VOCABULARY)
    assert logp_NV.shape[1] == output.vocab_size
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(len(TARGETS), dtype=torch.float64))


def test_loss_is_what_log_probs_say(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    part = output.loss(h_ND, TARGETS, output.prepare(TARGETS))["nll"]
    torch.testing.assert_close(part.sum, -gathered(output.log_probs(h_ND)).sum())
    assert part.count == 5


@both_modes
def test_ignored_targets_cost_nothing_and_send_nothing(end_case: Case, training: bool) -> None:
    output = output_of(end_case, training)
    h_ND = hidden(output)
    total(output, h_ND, TARGETS, output.prepare(TARGETS)).backward()
    assert h_ND.grad is not None
    assert (h_ND.grad[TARGETS == IGNORE] == 0).all()
    assert (h_ND.grad[TARGETS != IGNORE] != 0).any(-1).all()
    nothing = torch.full_like(TARGETS, IGNORE)
    plan = output.prepare(nothing)
    assert plan.count == 0
    assert total(output, h_ND, nothing, plan) == 0


def test_target_log_probs_agree(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    torch.testing.assert_close(output.target_log_probs(h_ND, TARGETS), gathered(output.log_probs(h_ND)))


@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_topk_agrees(end_case: Case, k: int) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    values, ids = output.topk(h_ND, k)
    logp_NV = output.log_probs(h_ND)
    torch.testing.assert_close(values, logp_NV.sort(-1, descending=True).values[:, :k])
    torch.testing.assert_close(values, logp_NV.gather(1, ids))


def test_samples_follow_the_distribution(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output, 2).detach()
    draws = 20_000
    generator = torch.Generator().manual_seed(7)
    ids = output.sample(h_ND.repeat_interleave(draws, dim=0), generator).view(2, draws)
    for row, p_V in zip(ids, output.log_probs(h_ND).detach().exp(), strict=True):
        seen = torch.bincount(row, minlength=VOCABULARY)
        assert chisquare(seen, p_V * draws).pvalue > CHANCE
        assert chisquare(seen.roll(1), p_V * draws).pvalue < CHANCE, "what is off by one class must not pass"
    again = output.sample(h_ND.repeat_interleave(draws, dim=0), torch.Generator().manual_seed(7))
    assert torch.equal(again.view(2, draws), ids)


def test_gradients_against_differences(end_case: Case) -> None:
    """Of what training differentiates. One plan, so that a sampled loss is a function."""
    output = output_of(end_case, training=True)
    h_ND = hidden(output)
    plan = output.prepare(TARGETS)

    def value(*_: Tensor) -> Tensor:
        # gradcheck moves its inputs in place, and the parameters are those inputs.
        return torch.stack([total(output, h_ND, TARGETS, plan), *output.penalties().values()]).sum()

    assert torch.autograd.gradcheck(value, (h_ND, *output.parameters()))


def test_penalties_are_sums_with_a_gradient(end_case: Case) -> None:
    output = output_of(end_case)
    for name, penalty in output.penalties().items():
        assert penalty.shape == (), name
        assert penalty >= 0, name
        output.zero_grad()
        penalty.backward()
        assert any(p.grad is not None and p.grad.any() for p in output.parameters()), name


def test_losses_add_up_over_rows(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    whole = output.loss(h_ND, TARGETS, output.prepare(TARGETS))
    cuts = (slice(0, 1), slice(1, 3), slice(3, None))
    pieces = [output.loss(h_ND[rows], TARGETS[rows], output.prepare(TARGETS[rows])) for rows in cuts]
    for name, part in whole.items():
        torch.testing.assert_close(sum(piece[name].sum for piece in pieces), part.sum)
        assert sum(piece[name].count for piece in pieces) == part.count


def test_vectors_are_one_per_class(end_case: Case) -> None:
    assert output_of(end_case).vectors().shape[0] == VOCABULARY


@both_modes
def test_bf16_autocast_is_close_to_float32(end_case: Case, training: bool) -> None:
    output = output_of(end_case, training).float()
    h_ND = hidden(output).detach().float().requires_grad_()
    plan = output.prepare(TARGETS)
    exact = total(output, h_ND, TARGETS, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = total(output, h_ND, TARGETS, plan)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.0)
    wanted, found = (torch.autograd.grad(value, h_ND)[0] for value in (exact, rounded))
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_bf16_autocast_rounds_all_log_probs_alike(end_case: Case) -> None:
    """Biases of the size that rare classes learn: rounded with a score, they would be off by a tenth of a nat."""
    output = output_of(end_case).float()
    with torch.no_grad():
        for name, parameter in output.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(mean=-8.0, std=4.0)
    h_ND = hidden(output).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_N, logp_NV = output.target_log_probs(h_ND, TARGETS), output.log_probs(h_ND)
    assert found_N.dtype == logp_NV.dtype == torch.float32
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(len(TARGETS)))
    torch.testing.assert_close(found_N, gathered(logp_NV))


def test_a_target_that_is_no_class_is_refused(end_case: Case) -> None:
    """Where the host sees it; scored all the same it is not a number, never a loss of nothing."""
    output = output_of(end_case)
    for wrong in (output.vocab_size, -1):
        y_N = TARGETS.clone()
        y_N[0] = wrong
        with pytest.raises(ArgumentError, match=f"target {wrong} is not a class: there are {output.vocab_size}"):
            output.prepare(y_N)
        try:
            assert output.target_log_probs(hidden(output), y_N)[0].isnan()
        except ArgumentError:
            assert isinstance(output, AdaptiveSoftmax)  # which has to sort the targets first


def test_loss_compiles(end_case: Case) -> None:
    """As it is trained with, in one graph."""
    output = output_of(end_case, training=True)
    h_ND = hidden(output)
    plan = output.prepare(TARGETS)
    torch.compiler.reset()
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    found, expected = (each(output, h_ND, TARGETS, plan) for each in (compiled, total))
    torch.testing.assert_close(found, expected)
    wanted = [h_ND, *output.parameters()]
    # The head of projections shared with the input end has no part in this loss: zero.
    gradients = (torch.autograd.grad(value, wanted, materialize_grads=True) for value in (found, expected))
    torch.testing.assert_close(*gradients)
