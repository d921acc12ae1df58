"""Numerical rank: exact constructions, numpy's own answer, and the bound that a mixture breaks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reefknot.errors import DataError, NonFiniteError, ResourceError, SettingsError
from reefknot.lab.evaluation import rank as module
from reefknot.lab.evaluation.rank import Spectrum, TriangularFactor, bound, memory, spectrum
from reefknot.lab.evaluation.windows import Lines, Sliding
from reefknot.lab.text.dataset import Split
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, WIDTH = 40, 6


@pytest.fixture
def text() -> Split:
    ids = np.random.default_rng(0).integers(0, WORDS, 301, dtype=np.int32)
    return Split("test", ids, words=301, lines=1, bytes=301, unknown=0)


def model_of(experts: int | None) -> LanguageModel:
    torch.manual_seed(0)
    classifier = Plain(WordTable(WORDS, WIDTH))
    output = (
        Softmax(classifier) if experts is None else MixtureOfSoftmaxes(classifier, WIDTH, experts=experts, dropout=0.5)
    )
    model = LanguageModel(Lookup(WordTable(WORDS, WIDTH)), LSTM(WIDTH, WIDTH, dropout=0.5), output)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.5)
    return model


@torch.no_grad()
def log_probabilities(model: LanguageModel, text: Split) -> np.ndarray:
    """The whole matrix in float64, from the model's own hidden states."""
    model.eval()
    h_ND = model(torch.from_numpy(text.ids[:-1].astype(np.int64))[None]).output[0]
    found: np.ndarray = model.output.double().log_probs(h_ND.double()).numpy()
    model.output.float()
    return found


@pytest.mark.parametrize("rows", [5, 12, 30, 200])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_singular_values_are_those_of_all_rows(rows: int, block: int) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(rows, 4, dtype=torch.float64) @ torch.randn(4, 12, dtype=torch.float64)
    factor = TriangularFactor(12)
    for part in matrix.split(block):
        factor.add(part)
    values = factor.singular_values()
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-12 * expected[0])
    found = Spectrum(values, factor.rows, 12)
    assert found.rank() == np.linalg.matrix_rank(matrix.numpy()) == 4
    assert factor.rows == rows


def test_the_factor_holds_no_more_than_its_share() -> None:
    factor = TriangularFactor(10)
    for _ in range(100):
        factor.add(torch.randn(3, 10))
        assert sum(len(block) for block in factor._blocks) < 20
    assert factor.rows == 300


def test_tolerances_by_hand() -> None:
    found = Spectrum(torch.tensor([8.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64), contexts=5, classes=7)
    assert found.numpy_tolerance == 8.0 * 7 * 2.0**-52
    assert [found.rank(), found.rank(1.0), found.rank(0.0), found.rank(100.0)] == [4, 2, 4, 0]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="tolerance"):
            found.rank(wrong)


def test_one_softmax_has_a_rank_of_its_width_and_two(text: Split) -> None:
    model = model_of(None)
    found = spectrum(model, text)
    expected = log_probabilities(model, text)
    assert (found.contexts, found.classes) == expected.shape == (300, WORDS)
    assert found.rank() == np.linalg.matrix_rank(expected) == bound(model.output) == WIDTH + 2
    assert found.rank(1.0) == np.linalg.matrix_rank(expected, tol=1.0)
    np.testing.assert_allclose(
        found.values[: WIDTH + 2].numpy(), np.linalg.svd(expected, compute_uv=False)[: WIDTH + 2], rtol=1e-10
    )


def test_a_mixture_has_full_rank(text: Split) -> None:
    model = model_of(4)
    found = spectrum(model, text)
    assert found.rank() == np.linalg.matrix_rank(log_probabilities(model, text)) == bound(model.output) == WORDS


def test_blocks_change_nothing_and_the_model_stays_as_it_is(text: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(None).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = spectrum(model, text)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 3 * WORDS)
    found = spectrum(model, text)
    assert found.rank() == reference.rank()
    np.testing.assert_allclose(found.values.numpy(), reference.values.numpy(), atol=1e-10 * float(reference.values[0]))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.output.parameters()).dtype == torch.float32


def test_fewer_contexts_than_words_bound_the_rank(text: Split) -> None:
    model = model_of(4)
    found = spectrum(model, text, limit=25)
    assert found.contexts == len(found.values) == found.rank() == 25
    assert spectrum(model, text, limit=10_000).contexts == 300


def test_what_cannot_be_computed_is_refused(text: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(None)
    with pytest.raises(SettingsError, match="contexts = 0"):
        spectrum(model, text, limit=0)
    alone = Split("test", text.ids[:1], words=1, lines=1, bytes=1, unknown=0)
    with pytest.raises(DataError, match="no context"):
        spectrum(model, alone)
    monkeypatch.setattr(module, "memory", lambda *_: 2**60)
    with pytest.raises(ResourceError, match="fewer contexts"):
        spectrum(model, text)
    monkeypatch.undo()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="test text"):
        spectrum(model, text)


def test_memory_does_not_grow_with_the_contexts() -> None:
    assert memory(100, 10_000) == 32 * 100 * 10_000
    assert memory(10**6, 10_000) == memory(10**9, 10_000) == 64 * 10_000**2


def test_windows_are_computed_afresh(text: Split) -> None:
    torch.manual_seed(0)
    table = WordTable(WORDS, WIDTH)
    model = LanguageModel(Lookup(table), Transformer(WIDTH, 1, 1, 8), Softmax(Plain(table)))
    ids = torch.from_numpy(text.ids.astype(np.int64))
    with torch.no_grad():
        blocks = [model(ids[None, start : min(start + 50, 120)]).output[0] for start in range(0, 120, 50)]
        logp = model.double().output.log_probs(torch.cat(blocks).double()).numpy()
    found = spectrum(model.float(), text, 120, windows=Sliding(0, 50))
    np.testing.assert_allclose(found.values.numpy(), np.linalg.svd(logp, compute_uv=False), atol=1e-5)
    assert spectrum(model, text, windows=Lines(), eos=3).contexts == 300
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        spectrum(model, text)
