"""Numerical rank: exact constructions, numpy's rank, and the bound that a mixture exceeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reefknot.errors import DataError, NonFiniteError, ResourceError, SettingsError
from reefknot.lab.evaluation import rank as module
from reefknot.lab.evaluation.rank import Spectrum, TriangularFactor, compute_spectrum, rank_bound, required_memory
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

WORDS, DIM = 40, 6


@pytest.fixture
def text() -> Split:
    ids = np.random.default_rng(0).integers(0, WORDS, 301, dtype=np.int32)
    return Split("test", ids, words=301, lines=1, bytes=301, unknown=0)


def model_of(experts: int | None) -> LanguageModel:
    torch.manual_seed(0)
    classifier = Plain(WordTable(WORDS, DIM))
    output = (
        Softmax(classifier) if experts is None else MixtureOfSoftmaxes(classifier, DIM, experts=experts, dropout=0.5)
    )
    model = LanguageModel(Lookup(WordTable(WORDS, DIM)), LSTM(DIM, DIM, dropout=0.5), output)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.5)
    return model


@torch.no_grad()
def log_probabilities(model: LanguageModel, text: Split) -> np.ndarray:
    """Return the whole matrix in float64, from the model's hidden states."""
    model.eval()
    hidden_ND = model(torch.from_numpy(text.ids[:-1].astype(np.int64))[None]).output[0]
    log_probs_NV: np.ndarray = model.output.double().log_probs(hidden_ND.double()).numpy()
    model.output.float()
    return log_probs_NV


@pytest.mark.parametrize("rows", [5, 12, 30, 200])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_singular_values_equal_numpy_for_any_block_size(rows: int, block: int) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(rows, 4, dtype=torch.float64) @ torch.randn(4, 12, dtype=torch.float64)
    factor = TriangularFactor(12)
    for part in matrix.split(block):
        factor.add(part)
    values = factor.singular_values()
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-12 * expected[0])
    result = Spectrum(values, factor.rows, 12)
    assert result.rank() == np.linalg.matrix_rank(matrix.numpy()) == 4
    assert factor.rows == rows


def test_factor_holds_few_rows() -> None:
    factor = TriangularFactor(10)
    for _ in range(100):
        factor.add(torch.randn(3, 10))
        assert sum(len(block) for block in factor._blocks) < 20
    assert factor.rows == 300


def test_rank_depends_on_the_tolerance() -> None:
    result = Spectrum(torch.tensor([8.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64), contexts=5, classes=7)
    assert result.numpy_tolerance == 8.0 * 7 * 2.0**-52
    assert [result.rank(), result.rank(1.0), result.rank(0.0), result.rank(100.0)] == [4, 2, 4, 0]
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="tolerance"):
            result.rank(tolerance)


def test_softmax_has_rank_dim_plus_two(text: Split) -> None:
    model = model_of(None)
    result = compute_spectrum(model, text)
    expected = log_probabilities(model, text)
    assert (result.contexts, result.classes) == expected.shape == (300, WORDS)
    assert result.rank() == np.linalg.matrix_rank(expected) == rank_bound(model.output) == DIM + 2
    assert result.rank(1.0) == np.linalg.matrix_rank(expected, tol=1.0)
    np.testing.assert_allclose(
        result.values[: DIM + 2].numpy(), np.linalg.svd(expected, compute_uv=False)[: DIM + 2], rtol=1e-10
    )


def test_mixture_of_softmaxes_has_full_rank(text: Split) -> None:
    model = model_of(4)
    result = compute_spectrum(model, text)
    assert result.rank() == np.linalg.matrix_rank(log_probabilities(model, text)) == rank_bound(model.output) == WORDS


def test_spectrum_is_independent_of_blocks_and_leaves_the_model(text: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(None).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = compute_spectrum(model, text)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 3 * WORDS)
    result = compute_spectrum(model, text)
    assert result.rank() == reference.rank()
    np.testing.assert_allclose(result.values.numpy(), reference.values.numpy(), atol=1e-10 * float(reference.values[0]))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.output.parameters()).dtype == torch.float32


def test_number_of_contexts_bounds_the_rank(text: Split) -> None:
    model = model_of(4)
    result = compute_spectrum(model, text, limit=25)
    assert result.contexts == len(result.values) == result.rank() == 25
    assert compute_spectrum(model, text, limit=10_000).contexts == 300


def test_uncomputable_spectrum_is_rejected(text: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(None)
    with pytest.raises(SettingsError, match="contexts = 0"):
        compute_spectrum(model, text, limit=0)
    alone = Split("test", text.ids[:1], words=1, lines=1, bytes=1, unknown=0)
    with pytest.raises(DataError, match="no token to predict"):
        compute_spectrum(model, alone)
    monkeypatch.setattr(module, "required_memory", lambda *_: 2**60)
    with pytest.raises(ResourceError, match="fewer contexts"):
        compute_spectrum(model, text)
    monkeypatch.undo()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="test text"):
        compute_spectrum(model, text)


def test_memory_estimate_is_bounded_in_the_contexts() -> None:
    assert required_memory(100, 10_000) == 32 * 100 * 10_000
    assert required_memory(10**6, 10_000) == required_memory(10**9, 10_000) == 64 * 10_000**2


def test_windows_are_computed_independently(text: Split) -> None:
    torch.manual_seed(0)
    table = WordTable(WORDS, DIM)
    model = LanguageModel(Lookup(table), Transformer(DIM, 1, 1, 8), Softmax(Plain(table)))
    ids = torch.from_numpy(text.ids.astype(np.int64))
    with torch.no_grad():
        blocks = [model(ids[None, start : min(start + 50, 120)]).output[0] for start in range(0, 120, 50)]
        logp = model.double().output.log_probs(torch.cat(blocks).double()).numpy()
    result = compute_spectrum(model.float(), text, 120, windows=Sliding(0, 50))
    np.testing.assert_allclose(result.values.numpy(), np.linalg.svd(logp, compute_uv=False), atol=1e-5)
    assert compute_spectrum(model, text, windows=Lines(), eos=3).contexts == 300
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        compute_spectrum(model, text)
