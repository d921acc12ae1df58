"""What every output end promises, checked for every combination of labels, normaliser and tie.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.outputs.contract import OutputEnd

from .combinations import VOCABULARY, Case

TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7])


def output_of(case: Case) -> OutputEnd:
    """In float64, every parameter drawn: a zero bias would hide that it is left out.

    In evaluation mode, because what is sampled or dropped in training is exact only there.
    """
    output = case.build().output.double().eval()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_(std=0.5)
    return output


def hidden(output: OutputEnd, rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, output.context_dim, dtype=torch.float64, requires_grad=True)


def total(output: OutputEnd, h_ND: Tensor, y_N: Tensor) -> Tensor:
    return torch.stack([part.sum for part in output.loss(h_ND, y_N, output.prepare(y_N)).values()]).sum()


def test_probabilities_sum_to_one(end_case: Case) -> None:
    output = output_of(end_case)
    logp_NV = output.log_probs(hidden(output))
    assert logp_NV.shape == (len(TARGETS), VOCABULARY)
    assert logp_NV.shape[1] == output.vocab_size
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(len(TARGETS), dtype=torch.float64))


def test_loss_is_what_log_probs_say(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    scored = TARGETS != IGNORE
    expected = -output.log_probs(h_ND)[scored].gather(1, TARGETS[scored, None]).sum()
    part = output.loss(h_ND, TARGETS, output.prepare(TARGETS))["nll"]
    torch.testing.assert_close(part.sum, expected)
    assert part.count == int(scored.sum()) == 5


def test_ignored_targets_cost_nothing_and_send_nothing(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    total(output, h_ND, TARGETS).backward()
    assert h_ND.grad is not None
    assert (h_ND.grad[TARGETS == IGNORE] == 0).all()
    assert (h_ND.grad[TARGETS != IGNORE] != 0).any(-1).all()
    nothing = torch.full_like(TARGETS, IGNORE)
    assert total(output, h_ND, nothing) == 0
    assert output.prepare(nothing).count == 0


def test_target_log_probs_agree(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    found = output.target_log_probs(h_ND, TARGETS)
    expected = output.log_probs(h_ND).gather(1, TARGETS.clamp(min=0)[:, None])[:, 0].where(TARGETS != IGNORE, 0.0)
    torch.testing.assert_close(found, expected)


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
    for row, p_V in zip(ids, output.log_probs(h_ND).exp(), strict=True):
        seen = torch.bincount(row, minlength=VOCABULARY)
        assert chisquare(seen, p_V.detach() * draws).pvalue > 1e-3
    again = output.sample(h_ND.repeat_interleave(draws, dim=0), torch.Generator().manual_seed(7))
    assert torch.equal(again.view(2, draws), ids)


def test_gradients_against_differences(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    parameters = list(output.parameters())

    def value(*_: Tensor) -> Tensor:
        # gradcheck moves its inputs in place, and the parameters are those inputs.
        return torch.stack([total(output, h_ND, TARGETS), *output.penalties().values()]).sum()

    assert torch.autograd.gradcheck(value, (h_ND, *parameters))


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


def test_bf16_autocast_is_close_to_float32(end_case: Case) -> None:
    output = output_of(end_case).float()
    h_ND = hidden(output).detach().float().requires_grad_()
    exact = total(output, h_ND, TARGETS).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = total(output, h_ND, TARGETS)
        logp_NV = output.log_probs(h_ND)
    rounded.backward()
    assert rounded.dtype == logp_NV.dtype == torch.float32
    torch.testing.assert_close(rounded.detach(), exact, rtol=0.03, atol=0.0)
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(len(TARGETS)))
    assert h_ND.grad is not None
    assert h_ND.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_loss_compiles(end_case: Case) -> None:
    output = output_of(end_case)
    h_ND = hidden(output)
    plan = output.prepare(TARGETS)

    def loss(h_ND: Tensor, y_N: Tensor) -> Tensor:
        return output.loss(h_ND, y_N, plan)["nll"].sum

    torch.compiler.reset()
    try:
        found = torch.compile(loss, backend="aot_eager")(h_ND, TARGETS)
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"torch.compile does not take this loss yet: {error}")
    expected = loss(h_ND, TARGETS)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, h_ND)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
