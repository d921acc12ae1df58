"""What a step changes: autograd on the model itself, the formulas of Press & Wolf, and a plain step of torch's SGD."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.lab.evaluation.updates import SIDES, SeparateEnds, by_frequency, update_rule
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

WORDS, WIDTH, STREAMS, STEPS = 23, 5, 2, 4


def model_of(*, tied: bool, augmented: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    words = WordTable(WORDS, WIDTH)
    classifier = Plain(words if tied else WordTable(WORDS, WIDTH), bias=True)
    output = Augmented(classifier, words, alpha=3.0) if augmented else Softmax(classifier)
    return LanguageModel(Lookup(words), LSTM(WIDTH, WIDTH, dropout=0.5), output).double()


def window(seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (STREAMS, STEPS + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def norms(gradient: Tensor | None) -> NDArray[np.float64]:
    assert gradient is not None
    found: NDArray[np.float64] = gradient.norm(dim=-1).numpy()
    return found


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_both_sides_together_are_the_gradient_of_the_model_itself(tied: bool, augmented: bool) -> None:
    model, (tokens, targets) = model_of(tied=tied, augmented=augmented), window()
    changes, _ = SeparateEnds(model).changes(tokens, targets)

    model.eval().loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]

    tables = {"input": model.input.tables()[0], "output": model.output.tables()[0]}
    tables = {"tied": tables["input"]} if tied else tables
    assert list(changes) == list(tables)
    for name, table in tables.items():
        np.testing.assert_allclose(changes[name]["both"], norms(table.weight.grad), rtol=1e-10, atol=1e-15)


def test_a_change_is_what_a_plain_step_at_rate_one_changes() -> None:
    model, (tokens, targets) = model_of(tied=True), window()
    changes, _ = SeparateEnds(model).changes(tokens, targets)
    table = model.input.tables()[0]
    before = table.weight.detach().clone()

    optimiser = torch.optim.SGD(model.eval().parameters(), lr=1.0)
    model.loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]
    optimiser.step()

    np.testing.assert_allclose(changes["tied"]["both"], norms(table.weight.detach() - before), rtol=1e-10)


def test_the_outputs_side_is_the_papers_formula_and_the_inputs_that_of_the_untied_model() -> None:
    tied, (tokens, targets) = model_of(tied=True), window()
    untied = copy.deepcopy(tied)
    untied.input = copy.deepcopy(untied.input)
    untied.eval()

    changes, _ = SeparateEnds(tied).changes(tokens, targets)
    untied.loss(tokens, targets).mean().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        h_ND = untied(tokens).output.flatten(0, 1)
        p_NV = untied.output.log_probs(h_ND).exp()
    p_NV[torch.arange(len(p_NV)), targets.flatten()] -= 1.0
    formula_VD = p_NV.T @ h_ND / targets.numel()

    np.testing.assert_allclose(changes["tied"]["output"], norms(formula_VD), rtol=1e-10)
    np.testing.assert_allclose(changes["tied"]["input"], norms(untied.input.tables()[0].weight.grad), rtol=1e-10)


def test_an_input_table_changes_in_the_words_that_went_in_and_an_output_table_everywhere() -> None:
    tokens, targets = window()
    went_in = np.isin(np.arange(WORDS), tokens.numpy())
    untied, _ = SeparateEnds(model_of(tied=False)).changes(tokens, targets)
    tied, _ = SeparateEnds(model_of(tied=True)).changes(tokens, targets)

    assert 0 < went_in.sum() < WORDS
    assert ((untied["input"]["both"] > 0) == went_in).all()
    assert (untied["input"]["output"] == 0).all()
    assert (untied["output"]["input"] == 0).all()
    assert (untied["output"]["both"] > 0).all()
    assert ((tied["tied"]["input"] > 0) == went_in).all()
    assert (tied["tied"]["both"] > 0).all()


def test_the_augmented_loss_changes_every_row_of_the_input_table_by_way_of_the_output() -> None:
    changes, _ = SeparateEnds(model_of(tied=False, augmented=True)).changes(*window())

    assert (changes["input"]["output"] > 0).all()


def test_looking_changes_neither_the_model_nor_its_mode() -> None:
    model, (tokens, targets) = model_of(tied=True), window()
    before = copy.deepcopy(model.state_dict())

    SeparateEnds(model).changes(tokens, targets)

    assert model.training
    assert model.tied
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_frozen_table_does_not_change() -> None:
    model = model_of(tied=False)
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


def test_an_input_end_without_a_table_has_none() -> None:
    torch.manual_seed(0)
    source = CharCNN(spell([f"w{number}" for number in range(WORDS)]), WIDTH, filters=[(1, 3), (2, 3)], byte_dim=4)
    model = LanguageModel(source, LSTM(WIDTH, WIDTH), Softmax(Plain(WordTable(WORDS, WIDTH))))

    changes, _ = SeparateEnds(model).changes(*window())

    assert list(changes) == ["output"]


def test_the_probability_of_the_current_word_is_that_of_all_log_probabilities() -> None:
    model, (tokens, _) = model_of(tied=True), window()

    found = SeparateEnds(model).current_words(tokens)

    with torch.no_grad():
        logp_NV = model.eval().output.log_probs(model(tokens).output.flatten(0, 1))
    expected = logp_NV.exp()[torch.arange(tokens.numel()), tokens.flatten()].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_the_rule_of_a_text_is_the_mean_over_windows_that_go_on_from_each_other() -> None:
    model = model_of(tied=True)
    text = np.random.default_rng(0).integers(0, WORDS, 2 * 13, dtype=np.int32)
    counts = [10_000, 500, *[20] * 5, *[3] * 16]

    found = update_rule(model, text, counts, streams=2, steps=STEPS, windows=2)

    ends, ids, state = SeparateEnds(model), torch.from_numpy(text.astype(np.int64)).view(2, 13), None
    windows, current = [], []
    for start in (0, STEPS):
        tokens, targets = ids[:, start : start + STEPS], ids[:, start + 1 : start + STEPS + 1]
        current.append(ends.current_words(tokens, state))
        changes, state = ends.changes(tokens, targets, state)
        windows.append(changes["tied"])
    assert (found["windows"], found["tokens"], found["types"]) == (2, 16, WORDS)
    for side in SIDES:
        mean_V = np.mean([each[side] for each in windows], axis=0)
        shown = found["tables"]["tied"][side]
        assert shown["mean"] == pytest.approx(mean_V.mean())
        bands = [(band["low"], band["high"], band["types"]) for band in shown["bands"]]
        assert bands == [(0, 9, 16), (10, 99, 5), (100, 999, 1), (10_000, None, 1)]
        assert [band["mean"] for band in shown["bands"]] == pytest.approx(
            [mean_V[7:].mean(), mean_V[2:7].mean(), mean_V[1], mean_V[0]]
        )
    assert found["tables"]["tied"]["both"]["changed"] == 1.0
    assert found["tables"]["tied"]["input"]["changed"] == pytest.approx(found["words_in"] / WORDS)
    assert found["current"]["mean"] == pytest.approx(np.concatenate(current).mean())
    assert found["current"]["quantiles"]["0.5"] == pytest.approx(np.median(np.concatenate(current)))
    assert found["current"]["uniform"] == 1 / WORDS


def test_a_word_that_is_never_expected_to_follow_itself_is_told() -> None:
    model = model_of(tied=False)
    with torch.no_grad():
        dict(model.output.named_parameters())["classifier.bias"][0] = -50.0
    text = np.zeros(40, dtype=np.int32)

    found = update_rule(model, text, [100] * WORDS, streams=2, steps=4)["current"]

    assert found["mean"] < 1e-20
    assert found["below_uniform"] == 1.0
    assert found["repeats"] == 1.0


def test_bands_hold_the_words_seen_so_often() -> None:
    found = by_frequency(np.array([1.0, 2.0, 4.0, 8.0]), [99, 10, 9, 0])

    assert found == [
        {"low": 0, "high": 9, "types": 2, "mean": 6.0},
        {"low": 10, "high": 99, "types": 2, "mean": 1.5},
    ]
