"""Every output end is a layer: `loss, nll, count = end(hidden, targets)`, compared with formulas in float64.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.models.language_model import Losses
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.softmax import Softmax

from .combinations import VOCABULARY, Case

SHAPES = [(), (2, 3), (2, 3, 2)]
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, 7, IGNORE, 5, 9, 0, 1, 10])
"""Targets of all bands, with ignored targets."""


def output_of(case: Case, training: bool = False) -> OutputEnd:
    """Return the output end in float64 with random parameters. A plain softmax has label smoothing."""
    output = case.build().output.double().train(training)
    if type(output) is Softmax:
        output.smoothing = 0.1
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_(std=0.5)
    return output


def hidden(output: OutputEnd, *leading_shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*leading_shape, output.context_dim, dtype=torch.float64, requires_grad=True)


def objective_by_hand(output: OutputEnd, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the loss parts and the sum of the nll. The nll comes from the log-probabilities."""
    scored_N = targets_N != IGNORE
    log_probs_NV = output.log_probs(hidden_ND)
    nll = -log_probs_NV[scored_N].gather(1, targets_N[scored_N][:, None]).sum()
    parts = output.loss(hidden_ND, targets_N, output.prepare(targets_N))
    other_parts = [part.weight * part.sum for name, part in parts.items() if name != "nll"]
    return torch.stack([parts["nll"].weight * nll, *other_parts]).sum(), nll


def penalty_of(output: OutputEnd) -> Tensor:
    return sum(output.penalties().values(), torch.zeros((), dtype=torch.float64))


def gradients(output: OutputEnd, *losses: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients that several backward passes accumulate."""
    output.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: parameter.grad for name, parameter in output.named_parameters()}


@pytest.mark.parametrize("leading_shape", SHAPES, ids=str)
def test_loss_nll_and_count_of_any_leading_shape(end_case: Case, leading_shape: tuple[int, ...]) -> None:
    output = output_of(end_case)
    hidden_states = hidden(output, *leading_shape)
    targets = TARGETS[: torch.Size(leading_shape).numel()].reshape(leading_shape)
    total, nll = objective_by_hand(output, hidden_states.reshape(-1, output.context_dim), targets.reshape(-1))
    count = int((targets != IGNORE).sum())
    result = output(hidden_states, targets)
    assert result.count == count
    torch.testing.assert_close(result.nll, nll / count)
    torch.testing.assert_close(result.loss, (total + penalty_of(output)) / count)
    assert not result.nll.requires_grad

    summed = output(hidden_states, targets, reduction="sum")
    torch.testing.assert_close(summed.nll, nll)
    torch.testing.assert_close(summed.loss, total + penalty_of(output))

    separate = output(hidden_states, targets, reduction="none")
    assert separate.loss.shape == separate.nll.shape == leading_shape
    torch.testing.assert_close(separate.nll, -output.target_log_probs(hidden_states, targets))
    torch.testing.assert_close(separate.loss.sum(), summed.loss)
    assert (separate.loss[targets == IGNORE] == 0).all()


def test_loss_equals_the_mean_of_a_language_model(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output, len(TARGETS))
    parts = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))
    expected = Losses(parts, output.penalties(), None).mean()  # type: ignore[arg-type]
    torch.testing.assert_close(output(hidden_ND, TARGETS).loss, expected)


@pytest.mark.parametrize("leading_shape", SHAPES, ids=str)
def test_predictions_have_the_leading_shape(end_case: Case, leading_shape: tuple[int, ...]) -> None:
    output = output_of(end_case)
    hidden_states = hidden(output, *leading_shape)
    hidden_ND = hidden_states.reshape(-1, output.context_dim)
    targets = TARGETS[: len(hidden_ND)].reshape(leading_shape)
    torch.testing.assert_close(
        output.log_probs(hidden_states), output.log_probs(hidden_ND).reshape(*leading_shape, VOCABULARY)
    )
    torch.testing.assert_close(
        output.target_log_probs(hidden_states, targets),
        output.target_log_probs(hidden_ND, targets.reshape(-1)).reshape(leading_shape),
    )
    for actual, expected in zip(output.topk(hidden_states, 4), output.topk(hidden_ND, 4), strict=True):
        torch.testing.assert_close(actual, expected.reshape(*leading_shape, 4))
    samples = output.sample(hidden_states, torch.Generator().manual_seed(3))
    assert torch.equal(samples, output.sample(hidden_ND, torch.Generator().manual_seed(3)).reshape(leading_shape))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_have_equal_gradients(end_case: Case, reduction: str) -> None:
    """Also of the training loss, which a sampled softmax computes from one plan."""
    output = output_of(end_case, training=True)
    hidden_ND = hidden(output, len(TARGETS))
    plan = output.prepare(TARGETS)
    result = output(hidden_ND, TARGETS, plan=plan, reduction=reduction)
    loss = result.loss * result.count if reduction == "mean" else result.loss.sum()
    parts = output.loss(hidden_ND, TARGETS, plan)
    expected = torch.stack([part.weight * part.sum for part in parts.values()]).sum() + penalty_of(output)
    torch.testing.assert_close(loss, expected)
    inputs = [hidden_ND, *output.parameters()]
    for actual, wanted in zip(
        torch.autograd.grad(loss, inputs),
        torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_three_micro_batches_equal_the_whole_batch(end_case: Case, reduction: str) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output, len(TARGETS)).detach()
    whole = output(hidden_ND, TARGETS, reduction=reduction)
    cuts = (slice(0, 1), slice(1, 7), slice(7, None))
    for divisor in (whole.count, torch.tensor([whole.count])):
        parts = [output(hidden_ND[cut], TARGETS[cut], reduction=reduction, divisor=divisor) for cut in cuts]
        torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
        assert sum(part.count for part in parts) == whole.count
        if reduction == "mean":
            torch.testing.assert_close(sum(part.nll * part.count for part in parts) / whole.count, whole.nll)
        accumulated = {
            name: gradient.clone()
            for name, gradient in gradients(output, *(part.loss for part in parts)).items()
            if gradient is not None
        }
        expected = gradients(output, output(hidden_ND, TARGETS, reduction=reduction).loss)
        torch.testing.assert_close(accumulated, expected)


def test_ignore_index(end_case: Case) -> None:
    output = output_of(end_case)
    hidden_ND = hidden(output, len(TARGETS))
    expected = output(hidden_ND, TARGETS)
    for ignore_index in (-1, VOCABULARY, 4):
        assert 4 not in TARGETS
        targets_N = TARGETS.where(TARGETS != IGNORE, ignore_index)
        for dtype in (torch.int64, torch.int32):
            result = output(hidden_ND, targets_N.to(dtype), ignore_index=ignore_index)
            assert torch.equal(result.loss, expected.loss)
            assert result.count == expected.count
        with pytest.raises(ArgumentError, match="target -100 of row 2 is not a class"):
            output(hidden_ND, TARGETS, ignore_index=ignore_index)
        with pytest.raises(ArgumentError, match="leave out the plan"):
            output(hidden_ND, targets_N, ignore_index=ignore_index, plan=output.prepare(TARGETS))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_parameter_has_a_gradient(end_case: Case, reduction: str, training: bool) -> None:
    """So that plain data parallelism works: also if all targets are ignored, where every gradient is zero."""
    output = output_of(end_case, training)
    hidden_states = hidden(output, 3, 4)
    for targets in (TARGETS.reshape(3, 4), torch.full((3, 4), IGNORE)):
        hidden_states.grad = None
        result = output(hidden_states, targets, reduction=reduction)
        by_name = gradients(output, result.loss.sum())
        assert [name for name, gradient in by_name.items() if gradient is None] == []
        assert hidden_states.grad is not None
        if result.count == 0:
            assert result.loss.sum() == result.nll.sum() == 0
            assert not any(gradient.any() for gradient in by_name.values() if gradient is not None)
            assert not hidden_states.grad.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"hidden": torch.zeros(2, 5)},
            r"hidden is \(2, 5\), but this end reads hidden states of 8 numbers, \(..., 8\)",
        ),
        ({"hidden": torch.zeros(())}, r"hidden is \(\), but"),
        ({"hidden": torch.zeros(2, 8, dtype=torch.long)}, r"hidden is \(2, 8\) and torch.int64; .* floating-point"),
        ({"hidden": [1.0]}, "hidden is a list; it must be a tensor"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets is \(3,\) but hidden is \(2, 8\); .*, \(2,\)"),
        ({"targets": torch.zeros(2)}, r"targets is \(2,\) and torch.float32; classes must be integers"),
        ({"targets": torch.tensor([0, 11])}, "target 11 is not a class"),
        ({"reduction": "max"}, "reduction = 'max': must be one of mean, sum, none"),
        ({"divisor": 0}, "divisor = 0: must be above 0"),
        ({"divisor": torch.ones(2)}, r"divisor is \(2,\); it must be one number"),
        ({"ignore_index": 1.5}, "ignore_index = 1.5: must be an integer"),
        ({"plan": 3}, "plan is an int; pass the result of `prepare`"),
    ],
)
def test_wrong_arguments_are_reported(end_case: Case, wrong: dict[str, Any], message: str) -> None:
    output = output_of(end_case).float()
    arguments = {"hidden": torch.zeros(2, 8), "targets": torch.tensor([1, 2])} | wrong
    with pytest.raises(ArgumentError, match=message):
        output(**arguments)
    if "hidden" in wrong:
        for method in (output.log_probs, output.sample, lambda hidden: output.topk(hidden, 2)):
            with pytest.raises(ArgumentError, match=message):
                method(wrong["hidden"])


def test_hidden_states_of_another_type_are_reported(end_case: Case) -> None:
    """Unless the end only computes dot products, which accept any floating-point type."""
    output = output_of(end_case).float()
    hidden_ND, targets_N = torch.zeros(2, 8, dtype=torch.bfloat16), torch.tensor([1, 2])
    if output.maps_hidden():
        message = r"hidden is \(2, 8\) and torch.bfloat16, but the parameters of the end are torch.float32"
        for call in (lambda: output(hidden_ND, targets_N), lambda: output.log_probs(hidden_ND)):
            with pytest.raises(ArgumentError, match=message):
                call()
    else:
        assert output(hidden_ND, targets_N).loss.isfinite()
    with torch.autocast("cpu", torch.bfloat16):
        assert output(hidden_ND, targets_N).loss.isfinite()


def test_sums_of_losses_need_rows(end_case: Case) -> None:
    output = output_of(end_case).float()
    targets = TARGETS.reshape(3, 4)
    with pytest.raises(ArgumentError, match=r"loss reads rows, \(N, 8\), but hidden is \(3, 4, 8\)"):
        output.loss(torch.zeros(3, 4, 8), targets, output.prepare(targets))
    with pytest.raises(SettingsError, match=r"k = 2\.5: the number of classes must be an integer"):
        output.topk(torch.zeros(3, 4, 8), 2.5)  # type: ignore[arg-type]
