"""The character CNN computes vectors from spellings, compared with a loop over single words."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import INPUTS
from reefknot.lab.tasks.initialisation import InitialisationSettings, initialise
from reefknot.nn.inputs import char_cnn
from reefknot.nn.inputs.char_cnn import CharCNN, Highway
from reefknot.nn.inputs.spelling import spell

WORDS = ["the", "<eos>", "a", "größe", "<unk>", "incomprehensibilities", "an"]
FILTERS = [[1, 3], [2, 4], [5, 2]]


def small_cnn(highway: int = 2, words: list[str] = WORDS, **options: Any) -> CharCNN:
    torch.manual_seed(0)
    return CharCNN(spell(words, max_bytes=12), 6, FILTERS, byte_dim=5, highway=highway, **options).double()


def expected_vector(model: CharCNN, word: str) -> Tensor:
    """Compute the vector of one word, one window of bytes at a time."""
    if word in ("<eos>", "<unk>"):
        return model.symbols[("<eos>", "<unk>").index(word)]
    byte_vectors = [model.bytes.weight[byte + 1] for byte in word.encode()[:12]]
    if not byte_vectors:
        byte_vectors = [torch.zeros(5, dtype=torch.float64)]

    features = []
    for convolution in model.convolutions:
        num_features, _, width = convolution.weight.shape
        padded = byte_vectors + [torch.zeros_like(byte_vectors[0])] * (width - 1)
        for feature in range(num_features):
            responses = []
            for start in range(len(byte_vectors)):
                products = [convolution.weight[feature, :, offset] @ padded[start + offset] for offset in range(width)]
                responses.append(sum(products) + convolution.bias[feature])
            features.append(torch.stack(responses).max().relu())

    hidden_F = torch.stack(features)
    for layer in model.highway:
        transformed_F, gate_F = (layer.linear.weight @ hidden_F + layer.linear.bias).view(2, -1)
        hidden_F = gate_F.sigmoid() * hidden_F + (1 - gate_F.sigmoid()) * transformed_F.relu()
    return model.projection.weight @ hidden_F + model.projection.bias


def fairseq_features(model: CharCNN, word: str, max_bytes: int) -> Tensor:
    """Return the features of a word as fairseq computes them: torch's convolutions over the padded spelling."""
    spelling_L = torch.zeros(max_bytes, dtype=torch.long)
    word_bytes = torch.tensor(list(word.encode()[:max_bytes]), dtype=torch.long)
    spelling_L[: len(word_bytes)] = word_bytes + 1
    vectors_CL = model.bytes.weight[spelling_L].T
    maxima = [convolution(vectors_CL[None]).amax(dim=-1)[0] for convolution in model.convolutions]
    return torch.cat(maxima).relu()


@pytest.mark.parametrize("max_bytes", [5, 6, 12, 30])
def test_padding_windows_equal_fairseq(max_bytes: int) -> None:
    """Includes words that fill the spelling, words for which only some filters have a window of padding, and ""."""
    words = ["a", "an", "thes", "these", "thesis", "größe", "incomprehens", "incomprehensibilities", ""]
    torch.manual_seed(0)
    model = CharCNN(spell(words, max_bytes), 6, FILTERS, byte_dim=5, highway=0, padding_windows=True).double()
    model.projection = torch.nn.Identity()  # type: ignore[assignment]
    model.symbols = torch.nn.Parameter(torch.zeros(2, 9, dtype=torch.float64))
    actual = model(torch.arange(len(words)))
    expected = torch.stack([fairseq_features(model, word, max_bytes) for word in words])
    torch.testing.assert_close(actual, expected)

    weights = torch.randn(len(words), 9, dtype=torch.float64)
    parameters = [model.bytes.weight, *model.convolutions.parameters()]
    byte_gradient, *gradients = torch.autograd.grad(actual, parameters, weights)
    expected_byte_gradient, *expected_gradients = torch.autograd.grad(expected, parameters, weights)
    # fairseq does not update the row of padding, because its embedding names this row as padding.
    torch.testing.assert_close(byte_gradient[1:], expected_byte_gradient[1:])
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_padding_windows_do_not_depend_on_the_batch() -> None:
    model = small_cnn(padding_windows=True)
    batched = model(torch.arange(len(WORDS)))
    for word in range(len(WORDS)):
        torch.testing.assert_close(model(torch.tensor([[word]]))[0, 0], batched[word], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(batched, small_cnn()(torch.arange(len(WORDS))))


@pytest.mark.parametrize("highway", [0, 1, 2])
def test_vectors_equal_a_loop_over_words(highway: int) -> None:
    model = small_cnn(highway, scale=3.0)
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 5, 6]])
    vectors = model(ids)
    assert vectors.shape == (2, 4, 6)
    for word, vector in zip(ids.flatten().tolist(), vectors.flatten(0, 1), strict=True):
        torch.testing.assert_close(vector, 3.0 * expected_vector(model, WORDS[word]))


def test_gradients_equal_those_of_the_loop() -> None:
    model = small_cnn()
    output_gradient = torch.randn(len(WORDS), 6, dtype=torch.float64)
    parameters = list(model.parameters())
    actual = torch.autograd.grad(model(torch.arange(len(WORDS))), parameters, output_gradient)
    expected = torch.autograd.grad(
        torch.stack([expected_vector(model, word) for word in WORDS]), parameters, output_gradient
    )
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_vector_does_not_depend_on_the_batch() -> None:
    model = small_cnn()
    batched = model(torch.arange(len(WORDS)))
    for word in range(len(WORDS)):
        torch.testing.assert_close(model(torch.tensor([[word]]))[0, 0], batched[word], rtol=1e-12, atol=1e-12)


def test_padding_stays_zero_after_initialising_all_parameters() -> None:
    model = small_cnn()
    initialise(model, InitialisationSettings(uniform=0.5))
    assert model.bytes.weight[0].abs().sum() > 0
    for word, vector in zip(WORDS, model.vectors(), strict=True):
        torch.testing.assert_close(vector, expected_vector(model, word))


def test_words_with_the_same_first_bytes_have_equal_vectors() -> None:
    model = small_cnn(words=["incomprehens", "incomprehensibilities", "incomp"])
    first, second, shorter = model.vectors()
    # Rows of a matrix product may be rounded differently.
    torch.testing.assert_close(first, second, rtol=1e-14, atol=1e-14)
    assert not torch.allclose(first, shorter)


def test_empty_word_has_a_vector_and_gradients() -> None:
    model = small_cnn(words=["", "a"])
    torch.testing.assert_close(model(torch.tensor([0])), expected_vector(model, "")[None])
    model(torch.tensor([0])).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_id_outside_the_vocabulary_raises_index_error() -> None:
    for word in (len(WORDS), -1):
        with pytest.raises(IndexError):
            small_cnn()(torch.tensor([0, word]))


def test_all_vectors_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_cnn(scale=3.0)
    whole = model(torch.arange(len(WORDS)))
    monkeypatch.setattr(char_cnn, "WORDS_PER_CHUNK", 2)
    torch.testing.assert_close(model.vectors(), whole)
    assert model.vocab_size == len(WORDS)
    assert model.tables() == []


def test_repeated_words_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_cnn()
    rows: list[int] = []
    monkeypatch.setattr(model.projection, "forward", lambda x: rows.append(len(x)) or x[:, :6])
    model(torch.tensor([[5, 2, 5, 5], [2, 5, 2, 2]]))
    assert rows == [2]


@pytest.mark.parametrize("ids", [[1, 4], [0, 3], []])
def test_every_parameter_has_a_gradient_in_every_batch(ids: list[int]) -> None:
    model = small_cnn()
    model(torch.tensor(ids, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.symbols.grad is not None
    assert bool(model.symbols.grad.any()) == (ids == [1, 4])
    assert bool(model.projection.weight.grad.any()) == (ids == [0, 3])


def test_highway_starts_xavier_normal_and_carries() -> None:
    """The matrix has 2 x 600 rows and 600 columns, so Xavier's standard deviation is sqrt(2 / 1800)."""
    layer = Highway(600).linear
    weights = layer.weight.detach()
    assert float(weights.std()) == pytest.approx((2 / 1800) ** 0.5, rel=0.01)
    assert float(weights.abs().max()) > 4 * (2 / 1800) ** 0.5  # a uniform distribution ends at sqrt(3) deviations
    assert layer.bias.tolist() == [0.0] * 600 + [1.0] * 600


def test_dropout_acts_only_in_training() -> None:
    model = small_cnn(dropout=0.5)
    ids = torch.arange(len(WORDS))
    whole = model.vectors()
    torch.testing.assert_close(model.eval()(ids), whole)
    ratio = (model.train()(ids) / whole).detach()
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_spellings_survive_moving_the_module_and_are_not_saved() -> None:
    model = small_cnn()
    assert "spellings" not in model.state_dict()
    assert not model.spellings.is_floating_point()
    assert torch.equal(deepcopy(model).spellings, spell(WORDS, max_bytes=12).int())
    assert list(model.buffers()) == []
    emptied = deepcopy(model).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(model.state_dict())
    assert torch.equal(emptied.vectors(), model.vectors())


def test_added_words_have_the_same_vectors_as_initial_words() -> None:
    few, whole = small_cnn(words=WORDS[:4], scale=3.0), small_cnn(scale=3.0)
    more = few.with_spelled_words(WORDS[4:])
    assert torch.equal(more.spellings, whole.spellings)
    assert torch.equal(more.vectors(), whole.vectors())
    assert more.vocab_size == len(WORDS)
    assert all(shared is parameter for shared, parameter in zip(few.parameters(), more.parameters(), strict=True))
    assert more.state_dict().keys() == few.state_dict().keys()
    assert few.vocab_size == len(few.spellings) == 4
    assert torch.equal(few.with_spelled_words([]).vectors(), few.vectors())


def test_autocast_and_compile_give_close_vectors() -> None:
    model = small_cnn().float()
    ids = torch.arange(len(WORDS))
    with torch.autocast("cpu", torch.bfloat16):
        vectors = model(ids)
    assert vectors.dtype == torch.bfloat16
    torch.testing.assert_close(vectors.float(), model(ids), rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(ids), model(ids))


@pytest.mark.parametrize(("highway", "count"), [(1, 20_458_880), (2, 20_458_880 + 15_865_344)])
def test_parameter_counts_equal_the_paper(highway: int, count: int) -> None:
    with torch.device("meta"):
        model = CharCNN(spell(WORDS), 1024, highway=highway)
    parts = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in model.named_children()}
    assert parts["bytes"] == 32_896
    assert parts["convolutions"] == 1_673_984
    assert parts["highway"] == highway * 15_865_344
    assert parts["projection"] == 2_884_608
    assert model.symbols.numel() == 2_048
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_recipe_lists_filters_and_rejects_invalid_ones() -> None:
    adapter = TypeAdapter(INPUTS.entry_type())
    settings = adapter.validate_python({"kind": "char_cnn", "dim": 6, "filters": FILTERS})
    model = INPUTS.build(settings, {"spellings": spell(WORDS)})
    assert [tuple(c.weight.shape) for c in model.convolutions] == [(3, 128, 1), (4, 128, 2), (2, 128, 5)]
    for filters in ([], [[1, 2, 3]], [[0, 4]], [["1", 4]]):
        with pytest.raises(ValidationError):
            adapter.validate_python({"kind": "char_cnn", "dim": 6, "filters": filters})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": []}, "filters is empty"),
        ({"filters": [[1, 4], [0, 4]]}, r"filters has \[0, 4\]: each must be \[width in bytes, features\]"),
        ({"filters": [[1, 4, 4]]}, r"filters has \[1, 4, 4\]"),
        ({"dim": 0}, "dim = 0: must be at least 1"),
        ({"byte_dim": 0}, "byte_dim = 0: must be at least 1"),
        ({"highway": -1}, "highway = -1: must be at least 0"),
        ({"scale": -1.0}, "char-CNN: scale = -1.0"),
        ({"dropout": 1.0}, "char-CNN: dropout = 1.0"),
        (
            {"padding_windows": True, "filters": [[51, 4]]},
            "a filter of width 51 does not fit into spellings of 50 bytes",
        ),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        CharCNN(spell(WORDS), **{"dim": 6, **options})
