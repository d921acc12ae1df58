"""Changes made by one update: against autograd, the formulas of Press & Wolf, and a step of torch's SGD."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.lab.evaluation.updates import SIDES, SeparateEnds, mean_by_frequency, measure_updates
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.inputs.spelling import spell
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, DIM, STREAMS, STEPS = 23, 5, 2, 4


def make_model(*, tied: bool, augmented: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    words = WordTable(WORDS, DIM)
    classifier = Plain(words if tied else WordTable(WORDS, DIM), bias=True)
    output = Augmented(classifier, words, alpha=3.0) if augmented else Softmax(classifier)
    return LanguageModel(Lookup(words), LSTM(DIM, DIM, dropout=0.5), output).double()


def window(seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (STREAMS, STEPS + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def norms(gradient: Tensor | None) -> NDArray[np.float64]:
    assert gradient is not None
    lengths: NDArray[np.float64] = gradient.norm(dim=-1).numpy()
    return lengths


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_changes_of_both_sides_equal_the_gradient(tied: bool, augmented: bool) -> None:
    model, (tokens, targets) = make_model(tied=tied, augmented=augmented), window()
    changes, _ = SeparateEnds(model).changes(tokens, targets)

    model.eval().loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]

    tables = {"input": model.input.tables()[0], "output": model.output.tables()[0]}
    tables = {"tied": tables["input"]} if tied else tables
    assert list(changes) == list(tables)
    for name, table in tables.items():
        np.testing.assert_allclose(changes[name]["both"], norms(table.weight.grad), rtol=1e-10, atol=1e-15)


def test_change_equals_a_plain_sgd_step_at_rate_one() -> None:
    model, (tokens, targets) = make_model(tied=True), window()
    changes, _ = SeparateEnds(model).changes(tokens, targets)
    table = model.input.tables()[0]
    before = table.weight.detach().clone()

    optimiser = torch.optim.SGD(model.eval().parameters(), lr=1.0)
    model.loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]
    optimiser.step()

    np.testing.assert_allclose(changes["tied"]["both"], norms(table.weight.detach() - before), rtol=1e-10)


def test_change_of_each_side_equals_the_papers_formula() -> None:
    tied, (tokens, targets) = make_model(tied=True), window()
    untied = copy.deepcopy(tied)
    untied.input = copy.deepcopy(untied.input)
    untied.eval()

    changes, _ = SeparateEnds(tied).changes(tokens, targets)
    untied.loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        hidden_ND = untied(tokens).output.flatten(0, 1)
        probs_NV = untied.output.log_probs(hidden_ND).exp()
    probs_NV[torch.arange(len(probs_NV)), targets.flatten()] -= 1.0
    formula_VD = probs_NV.T @ hidden_ND / targets.numel()

    np.testing.assert_allclose(changes["tied"]["output"], norms(formula_VD), rtol=1e-10)
    np.testing.assert_allclose(changes["tied"]["input"], norms(untied.input.tables()[0].weight.grad), rtol=1e-10)


def test_input_rows_change_if_read_and_output_rows_always() -> None:
    tokens, targets = window()
    was_read = np.isin(np.arange(WORDS), tokens.numpy())
    untied, _ = SeparateEnds(make_model(tied=False)).changes(tokens, targets)
    tied, _ = SeparateEnds(make_model(tied=True)).changes(tokens, targets)

    assert 0 < was_read.sum() < WORDS
    assert ((untied["input"]["both"] > 0) == was_read).all()
    assert (untied["input"]["output"] == 0).all()
    assert (untied["output"]["input"] == 0).all()
    assert (untied["output"]["both"] > 0).all()
    assert ((tied["tied"]["input"] > 0) == was_read).all()
    assert (tied["tied"]["both"] > 0).all()


def test_augmented_loss_changes_every_input_row() -> None:
    changes, _ = SeparateEnds(make_model(tied=False, augmented=True)).changes(*window())

    assert (changes["input"]["output"] > 0).all()


def test_measuring_changes_neither_model_nor_mode() -> None:
    model, (tokens, targets) = make_model(tied=True), window()
    before = copy.deepcopy(model.state_dict())

    SeparateEnds(model).changes(tokens, targets)

    assert model.training
    assert model.tied
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_frozen_table_does_not_change() -> None:
    model = make_model(tied=False)
    model.input.tables()[0].weight.requires_grad_(False)

    changes, _ = SeparateEnds(model).changes(*window())

    assert (changes["input"]["both"] == 0).all()
    assert (changes["output"]["both"] > 0).all()


def test_bands_are_rows_of_one_table() -> None:
    torch.manual_seed(0)
    table = BandedTable(WORDS, 8, sizes=[5, 8], factor=2)
    matrices = BandProjections(table, 8)
    output = AdaptiveSoftmax(table, matrices, context_dim=8)
    model = LanguageModel(AdaptiveLookup(table, matrices), LSTM(8, 8), output).double()
    tokens, targets = window()

    changes, _ = SeparateEnds(model).changes(tokens, targets)
    model.eval().loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]

    expected = np.concatenate([norms(band.weight.grad) for band in table.tables])
    np.testing.assert_allclose(changes["tied"]["both"], expected, rtol=1e-10, atol=1e-15)


def test_input_end_without_table_has_no_changes() -> None:
    torch.manual_seed(0)
    source = CharCNN(spell([f"w{number}" for number in range(WORDS)]), DIM, filters=[(1, 3), (2, 3)], byte_dim=4)
    model = LanguageModel(source, LSTM(DIM, DIM), Softmax(Plain(WordTable(WORDS, DIM))))

    changes, _ = SeparateEnds(model).changes(*window())

    assert list(changes) == ["output"]


def test_probability_of_the_current_word_equals_log_probs() -> None:
    model, (tokens, _) = make_model(tied=True), window()

    result = SeparateEnds(model).repeat_probabilities(tokens)

    with torch.no_grad():
        log_probs_NV = model.eval().output.log_probs(model(tokens).output.flatten(0, 1))
    expected = log_probs_NV.exp()[torch.arange(tokens.numel()), tokens.flatten()].numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_update_rule_is_the_mean_over_consecutive_windows() -> None:
    model = make_model(tied=True)
    text = np.random.default_rng(0).integers(0, WORDS, 2 * 13, dtype=np.int32)
    counts = [10_000, 500, *[20] * 5, *[3] * 16]

    result = measure_updates(model, text, counts, streams=2, steps=STEPS, windows=2)

    ends = SeparateEnds(model)
    ids = torch.from_numpy(text.astype(np.int64)).view(2, 13)
    state = None
    windows, current = [], []
    for start in (0, STEPS):
        tokens, targets = ids[:, start : start + STEPS], ids[:, start + 1 : start + STEPS + 1]
        current.append(ends.repeat_probabilities(tokens, state))
        changes, state = ends.changes(tokens, targets, state)
        windows.append(changes["tied"])
    assert (result["windows"], result["tokens"], result["types"]) == (2, 16, WORDS)
    for side in SIDES:
        mean_V = np.mean([changes_of_window[side] for changes_of_window in windows], axis=0)
        side_result = result["tables"]["tied"][side]
        assert side_result["mean"] == pytest.approx(mean_V.mean())
        bands = [(band["low"], band["high"], band["types"]) for band in side_result["bands"]]
        assert bands == [(0, 9, 16), (10, 99, 5), (100, 999, 1), (10_000, 99_999, 1)]
        assert [band["mean"] for band in side_result["bands"]] == pytest.approx(
            [mean_V[7:].mean(), mean_V[2:7].mean(), mean_V[1], mean_V[0]]
        )
    assert result["tables"]["tied"]["both"]["changed"] == 1.0
    assert result["tables"]["tied"]["input"]["changed"] == pytest.approx(result["words_in"] / WORDS)
    assert result["current"]["mean"] == pytest.approx(np.concatenate(current).mean())
    assert result["current"]["quantiles"]["0.5"] == pytest.approx(np.median(np.concatenate(current)))
    assert result["current"]["uniform"] == 1 / WORDS


def test_improbable_repetition_is_below_uniform() -> None:
    model = make_model(tied=False)
    with torch.no_grad():
        dict(model.output.named_parameters())["classifier.bias"][0] = -50.0
    text = np.zeros(40, dtype=np.int32)

    result = measure_updates(model, text, [100] * WORDS, streams=2, steps=4)["current"]

    assert result["mean"] < 1e-20
    assert result["below_uniform"] == 1.0
    assert result["repeats"] == 1.0


def test_bands_group_words_by_count() -> None:
    result = mean_by_frequency(np.array([1.0, 2.0, 4.0, 8.0]), [99, 10, 9, 0])

    assert result == [
        {"low": 0, "high": 9, "types": 2, "mean": 6.0},
        {"low": 10, "high": 99, "types": 2, "mean": 1.5},
    ]
