"""Label smoothing equals torch's, and capped scores equal their formula, for every kind of classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.choice import using
from reefknot.kernels.scores import IGNORE
from reefknot.lab.config.parts import CLASSIFIERS
from reefknot.lab.evaluation.rank import rank_bound
from reefknot.nn.classifiers.bilinear import Bilinear
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.dual import Dual
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.scorer import Scorer
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

N, D, V = 9, 6, 11
CLASSIFIER_BUILDERS: dict[str, Callable[[WordTable], Classifier]] = {
    "plain": Plain,
    "projected": lambda table: Projected(table, D),
    "bilinear": lambda table: Bilinear(table, D),
    "dual": lambda table: Dual(table, D, joint_dim=4),
    "drill": lambda table: Drill(table, depth=2),
}


def build_softmax(kind: str, smoothing: float, bias: bool = True, softcap: float | None = None) -> Softmax:
    torch.manual_seed(3)
    classifier = CLASSIFIER_BUILDERS[kind](WordTable(V, D)).double()
    if not bias:
        classifier.bias = None
    elif classifier.bias is not None:
        torch.nn.init.normal_(classifier.bias)
    return Softmax(classifier, smoothing, softcap)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    targets_N = torch.tensor([3, IGNORE, 0, 10, 3, 3, IGNORE, 7, 1])
    return torch.randn(N, D, dtype=dtype, requires_grad=True), targets_N


def objective(end: Softmax, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return the weighted sum of all parts of the loss."""
    parts = end.loss(hidden_ND, targets_N, end.prepare(targets_N)).values()
    return torch.stack([part.weight * part.sum for part in parts]).sum()


def test_every_kind_of_classifier_is_covered() -> None:
    assert CLASSIFIER_BUILDERS.keys() == set(CLASSIFIERS)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CLASSIFIER_BUILDERS)
def test_smoothed_objective_and_gradients_equal_torch(kind: str, bias: bool, impl: str) -> None:
    end, (hidden_ND, targets_N) = build_softmax(kind, 0.1, bias), batch()
    inputs = [hidden_ND, *end.parameters()]
    with using(impl):  # type: ignore[arg-type]
        actual = objective(end, hidden_ND, targets_N)
        gradients = torch.autograd.grad(actual, inputs)
    scores_NV = F.linear(end.classifier.context(hidden_ND), end.classifier.weight(), end.classifier.bias)
    expected = F.cross_entropy(scores_NV, targets_N, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-11)
    assert not gradients[0][targets_N == IGNORE].any()


def test_smoothing_does_not_change_nll_and_log_probs() -> None:
    (hidden_ND, targets_N), smoothed, plain = batch(), build_softmax("plain", 0.3), build_softmax("plain", 0.0)
    plan = plain.prepare(targets_N)
    parts, unsmoothed = smoothed.loss(hidden_ND, targets_N, plan), plain.loss(hidden_ND, targets_N, plan)
    assert torch.equal(parts["nll"].sum, unsmoothed["nll"].sum)
    assert (parts["nll"].weight, parts["smoothing"].weight, parts["smoothing"].count) == (1.0, 0.3, 7)
    assert unsmoothed.keys() == {"nll"}
    assert torch.equal(smoothed.log_probs(hidden_ND), plain.log_probs(hidden_ND))


def test_smoothing_part_is_target_score_minus_mean_score() -> None:
    end, (hidden_ND, targets_N) = build_softmax("plain", 0.1), batch()
    scores_NV = F.linear(hidden_ND, end.classifier.weight(), end.classifier.bias)[targets_N != IGNORE]
    expected = (scores_NV.gather(1, targets_N[targets_N != IGNORE][:, None])[:, 0] - scores_NV.mean(-1)).sum()
    torch.testing.assert_close(end.loss(hidden_ND, targets_N, end.prepare(targets_N))["smoothing"].sum, expected)


def test_batch_without_targets_has_zero_gradients() -> None:
    end, (hidden_ND, _) = build_softmax("plain", 0.1), batch()
    objective(end, hidden_ND, torch.full((N,), IGNORE)).backward()
    assert hidden_ND.grad is not None
    assert not hidden_ND.grad.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in end.parameters())


def test_smoothing_scores_are_float32_under_autocast() -> None:
    """Rounded to bfloat16, a score of a few hundred would be off by about one."""
    end, (hidden_ND, targets_N) = build_softmax("plain", 0.1).float(), batch(torch.float32)
    with torch.no_grad():
        end.classifier.table.weight.mul_(100.0)
    exact = end.loss(hidden_ND, targets_N, end.prepare(targets_N))["smoothing"].sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = end.loss(hidden_ND, targets_N, end.prepare(targets_N))["smoothing"].sum
    assert exact.abs() > 100
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=1e-6, atol=0.0)


def test_smoothing_of_bfloat16_states_is_summed_in_float32() -> None:
    end, (hidden_ND, targets_N) = build_softmax("plain", 0.1).float(), batch(torch.float32)
    half_ND = hidden_ND.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        smoothing = end.loss(half_ND, targets_N, end.prepare(targets_N))["smoothing"].sum
    assert smoothing.dtype == torch.float32
    smoothing.backward()
    assert half_ND.grad is not None
    assert half_ND.grad.isfinite().all()


def test_smoothed_micro_batches_have_the_gradients_of_the_batch() -> None:
    end, (hidden_ND, targets_N) = build_softmax("drill", 0.1), batch()
    objective(end, hidden_ND, targets_N).backward()
    whole = [parameter.grad.clone() for parameter in end.parameters() if parameter.grad is not None]
    end.zero_grad()
    with end.cache_for_step() as join:
        objective(end, hidden_ND[:4], targets_N[:4]).backward()
        join()
        objective(end, hidden_ND[4:], targets_N[4:]).backward()
    for expected, parameter in zip(whole, end.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_invalid_smoothing_is_rejected(smoothing: float) -> None:
    with pytest.raises(SettingsError, match=f"softmax: smoothing = {smoothing}: must be at least 0 and less than 1"):
        Softmax(Plain(WordTable(V, D)), smoothing)


# -- capped scores ---------------------------------------------------------------------------------------------------

CAP = 0.8
"""Smaller than many scores of these tests, so that the cap matters."""


def capped_scores(end: Softmax, hidden_ND: Tensor) -> Tensor:
    """Return the capped scores of all classes, (N, V), by their formula."""
    scores_NV = F.linear(end.classifier.context(hidden_ND), end.classifier.weight(), end.classifier.bias)
    return CAP * torch.tanh(scores_NV / CAP)


def assert_same_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value, inputs, retain_graph=True) for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)
    assert all(gradient.any() for gradient in gradients[1])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", CLASSIFIER_BUILDERS)
def test_capped_losses_and_gradients_equal_the_formula(kind: str, smoothing: float, impl: Literal["reference"]) -> None:
    end, (hidden_ND, targets_N) = build_softmax(kind, smoothing, softcap=CAP), batch()
    inputs = [hidden_ND, *end.parameters()]
    scores_NV = capped_scores(end, hidden_ND)
    expected_N = F.cross_entropy(scores_NV, targets_N, reduction="none", label_smoothing=smoothing)
    penalty = sum(end.penalties().values(), torch.zeros((), dtype=torch.float64))
    penalised_N = expected_N + penalty / 7 * (targets_N != IGNORE)
    weight_N = torch.randn(N, dtype=torch.float64)
    with using(impl):
        results = {reduction: end(hidden_ND, targets_N, reduction=reduction) for reduction in ("mean", "sum", "none")}
        divided = end(hidden_ND, targets_N, divisor=20.0).loss
        assert_same_gradients(objective(end, hidden_ND, targets_N), expected_N.sum(), inputs)
        assert_same_gradients(results["sum"].loss, penalised_N.sum(), inputs)
        assert_same_gradients(results["mean"].loss, penalised_N.sum() / 7, inputs)
        assert_same_gradients(divided, (expected_N.sum() + penalty * 7 / 20) / 20, inputs)
        assert_same_gradients(results["none"].loss @ weight_N, penalised_N @ weight_N, inputs)
    nll_N = F.cross_entropy(scores_NV, targets_N, reduction="none")
    torch.testing.assert_close(results["none"].nll, nll_N)
    torch.testing.assert_close(results["mean"].nll, nll_N.sum() / 7)


@pytest.mark.parametrize("kind", CLASSIFIER_BUILDERS)
def test_capped_predictions_equal_the_formula(kind: str) -> None:
    end, (hidden_ND, targets_N) = build_softmax(kind, 0.1, softcap=CAP), batch()
    inputs = [hidden_ND, *end.parameters()]
    expected_NV = capped_scores(end, hidden_ND).log_softmax(-1)
    log_probs_NV = end.log_probs(hidden_ND)
    weight_NV = torch.randn(N, V, dtype=torch.float64)
    assert_same_gradients((log_probs_NV * weight_NV).sum(), (expected_NV * weight_NV).sum(), inputs)
    expected_N = expected_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0].where(targets_N != IGNORE, 0.0)
    assert_same_gradients(
        end.target_log_probs(hidden_ND, targets_N) @ weight_NV[:, 0], expected_N @ weight_NV[:, 0], inputs
    )
    values_Nk, ids_Nk = end.topk(hidden_ND, 4)
    torch.testing.assert_close(values_Nk, expected_NV.topk(4).values)
    torch.testing.assert_close(expected_NV.gather(1, ids_Nk), values_Nk)
    with torch.no_grad(), end.cache_for_evaluation():
        torch.testing.assert_close(end.log_probs(hidden_ND), expected_NV)
    # With a tiny cap, all scores are almost equal, and so are the frequencies of samples.
    end.softcap = 1e-9
    ids = end.sample(hidden_ND[:1].expand(11_000, D), torch.Generator().manual_seed(0))
    assert torch.bincount(ids, minlength=V).min() > 800


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf"), "30"])
def test_invalid_cap_is_rejected(softcap: Any) -> None:
    with pytest.raises(SettingsError, match=f"softmax: softcap = {softcap!r}: must be a number greater than 0"):
        Softmax(Plain(WordTable(V, D)), softcap=softcap)


def test_rank_of_capped_scores_has_no_bound() -> None:
    assert rank_bound(Softmax(Plain(WordTable(V, 4)))) == 6
    assert rank_bound(Softmax(Plain(WordTable(V, 4)), softcap=CAP)) == V


@pytest.mark.parametrize("kind", ["log_probs", "targets", "topk"])
def test_exported_scorer_caps_its_scores(kind: Any) -> None:
    table = WordTable(V, D)
    output = Softmax(Drill(table), softcap=CAP)
    torch.nn.init.normal_(table.weight, std=3.0)
    model = LanguageModel(input=Lookup(table), encoder=LSTM(D, D), output=output)
    tokens_BT = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
    scorer = Scorer(model, kind=kind, k=4)
    arguments = (tokens_BT, tokens_BT) if kind == "targets" else (tokens_BT,)
    program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
    expected_BTV = capped_scores(output, model.eval()(tokens_BT).output).log_softmax(-1)
    expected = {
        "log_probs": expected_BTV,
        "targets": expected_BTV.gather(-1, tokens_BT[..., None])[..., 0],
        "topk": tuple(expected_BTV.topk(4)),
    }[kind]
    torch.testing.assert_close(program.module()(*arguments), expected)
    torch.testing.assert_close(scorer(*arguments), expected)
