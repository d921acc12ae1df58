"""Language models: parameter counts, checks of dimensions, losses, carried state and tied gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.initialisation import InitialisationSettings, initialise
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.highway import RecurrentHighway
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.inputs.spelling import spell
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, DIM = 11, 6
TOKENS = torch.tensor([[1, 4, 9, 2, 2, 10], [0, 3, 5, 8, 1, 7]])


def lstm_model(words: WordTable, classes: WordTable, dropout: float = 0.0) -> LanguageModel:
    return LanguageModel(Lookup(words), LSTM(DIM, DIM, layers=1, dropout=dropout), Softmax(Plain(classes)))


@pytest.mark.parametrize(
    ("row", "parameters"),
    [
        ("Small model", 4_651_600),
        ("Small + WT", 2_651_600),
        ("Small + PR", 4_691_800),
        ("Small + WT + PR", 2_691_800),
    ],
)
def test_parameter_counts_equal_press_and_wolf(row: str, parameters: int) -> None:
    recipe = load_recipe("press2017/table6")
    with torch.device("meta"):
        model = build_model(recipe.experiments[row], 10_000)
    assert sum(model.parameter_counts().values()) == parameters == recipe.row(row).parameters
    assert model.tied == ("WT" in row)


def test_mismatched_dimensions_and_vocabularies_are_rejected() -> None:
    table = WordTable(WORDS, DIM)
    with pytest.raises(SettingsError, match=r"the encoder has dimension 9 but the output end expects 6.*project"):
        LanguageModel(Lookup(table), LSTM(DIM, 9), Softmax(Plain(table)))
    LanguageModel(Lookup(table), LSTM(DIM, 9), Softmax(Projected(table, 9)))
    with pytest.raises(SettingsError, match="the input end has dimension 6 but the encoder expects 7"):
        LanguageModel(Lookup(table), LSTM(7, DIM), Softmax(Plain(table)))
    with pytest.raises(SettingsError, match="the input end has 12 words but the output end has 11"):
        LanguageModel(Lookup(WordTable(12, DIM)), LSTM(DIM, DIM), Softmax(Plain(table)))


def test_parts_of_another_kind_are_rejected() -> None:
    words = WordTable(WORDS, DIM)
    output = Softmax(Plain(words))
    with pytest.raises(SettingsError, match=r"encoder is an LSTM of torch.nn.modules.rnn; it must be an Encoder"):
        LanguageModel(Lookup(words), torch.nn.LSTM(DIM, DIM), output)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="input is an LSTM of reefknot"):
        LanguageModel(LSTM(DIM, DIM), Lookup(words), output)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        (TOKENS[0], None, r"tokens have the shape \(6,\).*shape \(streams, steps\), and at least 2 steps"),
        (TOKENS[:, :1], None, r"tokens have the shape \(2, 1\).*at least 2 steps"),
        (TOKENS.float(), None, r"tokens have .* the type torch\.float32; they must be integer ids"),
        (TOKENS, TOKENS.float(), r"targets have .* the type torch\.float32"),
        (TOKENS, TOKENS.T, r"tokens are \(2, 6\), but targets are \(6, 2\); pass one target per token"),
        ([[1, 2]], None, "tokens is a list; it must be a tensor"),
    ],
)
def test_wrong_tokens_are_rejected(tokens: Any, targets: torch.Tensor | None, message: str) -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    with pytest.raises(ArgumentError, match=message):
        model.loss(tokens, targets)
    if targets is not None:
        with pytest.raises(ArgumentError, match=message):
            model.target_log_probs(tokens, targets)


def test_state_of_other_streams_is_rejected() -> None:
    table = WordTable(WORDS, DIM)
    encoder = RecurrentHighway(DIM, DIM, depth=2)
    model = LanguageModel(Lookup(table), encoder, Softmax(Plain(table)))
    with pytest.raises(ArgumentError, match="the window has 2 streams, but 'h' of the state has 1; pass the state"):
        model.loss(TOKENS, state=model.initial_state(1))


def test_only_a_char_cnn_may_have_more_words_than_the_output() -> None:
    encoder, output = LSTM(DIM, DIM), Softmax(Plain(WordTable(WORDS, DIM)))

    def char_cnn(words: int) -> CharCNN:
        return CharCNN(spell(["word"] * words), DIM, filters=[(1, 2)], byte_dim=3)

    for words in (WORDS, WORDS + 4):
        model = LanguageModel(char_cnn(words), encoder, output)
        losses = model.loss(torch.full((1, 3), words - 1), torch.full((1, 3), WORDS - 1))
        assert losses.parts["nll"].count == 3
    with pytest.raises(SettingsError, match="the input end has 10 words but the output end has 11"):
        LanguageModel(char_cnn(WORDS - 1), encoder, output)


def test_untrained_target_table_is_rejected() -> None:
    words, classes = WordTable(WORDS, DIM), WordTable(WORDS, DIM)

    def model(source: WordTable, detach_target: bool = True) -> LanguageModel:
        output = Augmented(Plain(classes), words, alpha=1.0, detach_target=detach_target)
        return LanguageModel(Lookup(source), LSTM(DIM, DIM), output)

    assert model(words).loss(TOKENS).parts.keys() == {"nll", "augmented"}
    model(classes, detach_target=False)
    with pytest.raises(
        SettingsError, match="this end does not train the table of the soft targets; use the table of the input end"
    ):
        model(classes)


def test_untrained_projection_of_first_band_is_rejected() -> None:
    bands = BandedTable(WORDS, DIM, sizes=[5], factor=2)
    shared, other = BandProjections(bands, DIM), BandProjections(bands, DIM)
    encoder = LSTM(DIM, DIM)
    tied = LanguageModel(AdaptiveLookup(bands, shared), encoder, AdaptiveSoftmax(bands, shared))
    assert tied.tied
    LanguageModel(AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, shared, head_projection="shared"))
    LanguageModel(
        AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, BandProjections(bands, DIM, head=False))
    )
    with pytest.raises(
        SettingsError, match=r"a matrix for the first band that no end uses; share them .* head = false"
    ):
        LanguageModel(AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, shared))


def test_model_is_tied_if_both_ends_share_a_table() -> None:
    words, classes = WordTable(WORDS, DIM), WordTable(WORDS, DIM)
    assert lstm_model(words, words).tied
    assert not lstm_model(words, classes).tied


def test_shared_table_is_counted_once() -> None:
    words = WordTable(WORDS, DIM)
    counts = lstm_model(words, words).parameter_counts()
    assert counts == {"input": WORDS * DIM, "encoder": 4 * DIM * (2 * DIM + 1), "output": WORDS}


def test_targets_default_to_the_next_tokens() -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    losses = model.loss(TOKENS)
    expected = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    assert torch.equal(losses.sum(), expected.sum())
    assert losses.parts["nll"].count == 2 * 5
    torch.testing.assert_close(losses.mean(), losses.sum() / 10)


def test_mean_includes_penalties() -> None:
    table = WordTable(WORDS, DIM)
    model = LanguageModel(Lookup(table), LSTM(DIM, DIM), Softmax(Projected(table, DIM, penalty=3.0)))
    losses = model.loss(TOKENS)
    penalty = losses.penalties["projection"]
    assert penalty > 0
    assert torch.equal(penalty, model.output.penalties()["projection"])
    torch.testing.assert_close(losses.mean(), (losses.sum() + penalty) / 10)


def test_returned_state_is_detached_and_can_be_carried() -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    state = None
    for _ in range(3):
        losses = model.loss(TOKENS, state=state)
        losses.mean().backward()  # fails if the state leads back into an earlier window
        state = losses.state
        assert not any(tensor.requires_grad for tensor in state.values())


def test_loss_equals_negative_sum_of_target_log_probs() -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    targets = TOKENS[:, 1:].clone()
    targets[0, 2] = IGNORE
    log_probs_BT, state = model.target_log_probs(TOKENS[:, :-1], targets)
    losses = model.loss(TOKENS[:, :-1], targets)
    assert log_probs_BT.shape == targets.shape
    assert log_probs_BT[0, 2] == 0
    torch.testing.assert_close(losses.sum(), -log_probs_BT.sum())
    assert all(torch.equal(losses.state[name], state[name]) for name in state)


PADDED = torch.tensor([[4, 9, IGNORE, IGNORE, IGNORE], [3, 5, 8, 1, 7]])


def input_and_output(kind: str) -> tuple[InputEnd, OutputEnd]:
    if kind == "adaptive":
        bands = BandedTable(WORDS, DIM, sizes=[4, 4], factor=2)
        shared = BandProjections(bands, DIM)
        return AdaptiveLookup(bands, shared), AdaptiveSoftmax(bands, shared)
    table = WordTable(WORDS, DIM)
    return Lookup(table), Softmax(Plain(table))


@pytest.mark.parametrize("kind", ["softmax", "adaptive"])
@pytest.mark.parametrize("encoder", [LSTM(DIM, DIM), Transformer(DIM, layers=2, heads=2, ffn_dim=8)])
def test_output_end_receives_only_rows_with_targets(
    kind: str, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients are equal with padding rows and without."""
    torch.manual_seed(0)
    source, output = input_and_output(kind)
    model = LanguageModel(source, encoder, output, RegularisationSettings(activation=0.5)).double()
    positions_M = (PADDED.flatten() != IGNORE).nonzero().squeeze(-1)
    calls: list[tuple[int, list[int]]] = []
    loss = output.loss
    monkeypatch.setattr(output, "loss", lambda h, y, plan: calls.append((len(h), y.tolist())) or loss(h, y, plan))
    whole = model.loss(TOKENS[:, :-1], PADDED)
    plan = output.prepare(PADDED.flatten()[positions_M])
    planned = model.loss(TOKENS[:, :-1], PADDED, None, plan, positions_M)
    unplanned = model.loss(TOKENS[:, :-1], PADDED, None, None, positions_M)
    assert [rows for rows, _ in calls] == [10, 7, 7]
    assert calls[1][1] == calls[2][1] == [4, 9, 3, 5, 8, 1, 7]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(whole.parts["nll"].sum, parameters)
    for losses in (planned, unplanned):
        assert losses.parts["nll"].count == losses.parts["activation"].count == 7
        torch.testing.assert_close(losses.parts["nll"].sum, whole.parts["nll"].sum)
        torch.testing.assert_close(
            torch.autograd.grad(losses.parts["nll"].sum, parameters, retain_graph=True), expected
        )


def test_kv_cache_gives_equal_log_probs_for_a_split_text() -> None:
    table = WordTable(WORDS, DIM)
    encoder = Transformer(DIM, layers=2, heads=2, ffn_dim=8)
    model = LanguageModel(Lookup(table), encoder, Softmax(Plain(table)))
    whole, _ = model.target_log_probs(TOKENS[:, :-1], TOKENS[:, 1:])
    first, state = model.target_log_probs(TOKENS[:, :2], TOKENS[:, 1:3], model.decoding_state(2))
    second, _ = model.target_log_probs(TOKENS[:, 2:-1], TOKENS[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_carried_state_gives_equal_log_probs_for_a_split_text() -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    whole, _ = model.target_log_probs(TOKENS[:, :-1], TOKENS[:, 1:])
    first, state = model.target_log_probs(TOKENS[:, :2], TOKENS[:, 1:3])
    second, _ = model.target_log_probs(TOKENS[:, 2:-1], TOKENS[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_loss_uses_dropped_activations_in_training_only() -> None:
    torch.manual_seed(0)
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table, dropout=0.5)
    assert not torch.equal(model.loss(TOKENS).sum(), model.loss(TOKENS).sum())
    model.eval()
    assert torch.equal(model.loss(TOKENS).sum(), model.loss(TOKENS).sum())


def test_tied_table_gradient_is_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    words, classes = WordTable(WORDS, DIM), WordTable(WORDS, DIM)
    classes.load_state_dict(words.state_dict())
    untied = lstm_model(words, classes).double()
    tied = LanguageModel(untied.input, untied.encoder, Softmax(Plain(words))).double()
    untied.loss(TOKENS).sum().backward()
    assert words.weight.grad is not None
    assert classes.weight.grad is not None
    expected = words.weight.grad + classes.weight.grad
    tied.zero_grad()
    tied.loss(TOKENS).sum().backward()
    torch.testing.assert_close(words.weight.grad, expected)


def test_uniform_initialisation_draws_every_parameter_once() -> None:
    table = WordTable(WORDS, DIM)
    model = lstm_model(table, table)
    torch.manual_seed(3)
    initialise(model, InitialisationSettings(uniform=0.1))
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() <= 0.1, name
        assert parameter.any(), name
    torch.manual_seed(3)
    assert torch.equal(table.weight, torch.empty(WORDS, DIM).uniform_(-0.1, 0.1))


def test_no_initialisation_keeps_the_parameters() -> None:
    table = WordTable(WORDS, DIM)
    before = table.weight.clone()
    initialise(lstm_model(table, table), InitialisationSettings())
    assert torch.equal(table.weight, before)


def test_evaluating_computes_class_vectors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the model is in training mode again and uses changed parameters."""
    table = WordTable(WORDS, DIM)
    model = LanguageModel(Lookup(table), LSTM(DIM, DIM), Softmax(Drill(table, depth=1, dropout=0.5)))
    calls = 0
    encode = Drill.encode

    def count_calls(self: Drill, ids: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert not self.training
        return encode(self, ids)

    def scores() -> torch.Tensor:
        with evaluating(model), torch.no_grad():
            windows = [model.target_log_probs(tokens[:, :-1], tokens[:, 1:])[0] for tokens in (TOKENS, TOKENS.flip(1))]
        return torch.cat(windows)

    monkeypatch.setattr(Drill, "encode", count_calls)
    first = scores()
    assert calls == 1
    assert model.training
    with torch.no_grad():
        table.weight.add_(1.0)
    assert not torch.equal(scores(), first)
    assert calls == 2
