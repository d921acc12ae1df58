"""The ends joined: sizes, widths, targets, and what tying means for the gradient."""

from __future__ import annotations

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.initialisation import InitialisationSettings, initialise
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.contract import Encoder
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

WORDS, WIDTH = 11, 6
TOKENS = torch.tensor([[1, 4, 9, 2, 2, 10], [0, 3, 5, 8, 1, 7]])


def model_of(words: WordTable, classes: WordTable, dropout: float = 0.0) -> LanguageModel:
    return LanguageModel(Lookup(words), LSTM(WIDTH, WIDTH, layers=1, dropout=dropout), Softmax(Plain(classes)))


@pytest.mark.parametrize(
    ("row", "parameters"),
    [
        ("Small model", 4_651_600),
        ("Small + WT", 2_651_600),
        ("Small + PR", 4_691_800),
        ("Small + WT + PR", 2_691_800),
    ],
)
def test_sizes_of_press_and_wolf(row: str, parameters: int) -> None:
    recipe = load_recipe("press2017/table6")
    with torch.device("meta"):
        model = build_model(recipe.experiments[row], 10_000)
    assert sum(model.parameter_counts().values()) == parameters == recipe.row(row).parameters
    assert model.tied == ("WT" in row)


def test_ends_that_do_not_fit_say_so() -> None:
    table = WordTable(WORDS, WIDTH)
    with pytest.raises(
        SettingsError, match=r"the encoder gives 9 numbers per token but the output end reads 6.*project"
    ):
        LanguageModel(Lookup(table), LSTM(WIDTH, 9), Softmax(Plain(table)))
    LanguageModel(Lookup(table), LSTM(WIDTH, 9), Softmax(Projected(table, 9)))
    with pytest.raises(SettingsError, match="the input end gives 6 numbers per token but the encoder reads 7"):
        LanguageModel(Lookup(table), LSTM(7, WIDTH), Softmax(Plain(table)))
    with pytest.raises(SettingsError, match="the input end has 12 words but the output end has 11"):
        LanguageModel(Lookup(WordTable(12, WIDTH)), LSTM(WIDTH, WIDTH), Softmax(Plain(table)))


def test_only_an_input_that_spells_may_know_more_words() -> None:
    encoder, output = LSTM(WIDTH, WIDTH), Softmax(Plain(WordTable(WORDS, WIDTH)))

    def spelling(words: int) -> CharCNN:
        return CharCNN(spell(["word"] * words), WIDTH, filters=[(1, 2)], byte_dim=3)

    for words in (WORDS, WORDS + 4):
        model = LanguageModel(spelling(words), encoder, output)
        losses = model.loss(torch.full((1, 3), words - 1), torch.full((1, 3), WORDS - 1))
        assert losses.parts["nll"].count == 3
    with pytest.raises(SettingsError, match="the input end has 10 words but the output end has 11"):
        LanguageModel(spelling(WORDS - 1), encoder, output)


def test_a_target_table_that_nothing_trains_is_refused() -> None:
    words, classes = WordTable(WORDS, WIDTH), WordTable(WORDS, WIDTH)

    def model(source: WordTable, detach_target: bool = True) -> LanguageModel:
        output = Augmented(Plain(classes), words, alpha=1.0, detach_target=detach_target)
        return LanguageModel(Lookup(source), LSTM(WIDTH, WIDTH), output)

    assert model(words).loss(TOKENS).parts.keys() == {"nll", "augmented"}
    model(classes, detach_target=False)
    with pytest.raises(SettingsError, match="with detach_target its table is not trained here; give it the table of"):
        model(classes)


def test_a_projection_of_the_first_band_that_nothing_trains_is_refused() -> None:
    bands = BandedTable(WORDS, WIDTH, sizes=[5], factor=2)
    shared, other = BandProjections(bands, WIDTH), BandProjections(bands, WIDTH)
    encoder = LSTM(WIDTH, WIDTH)
    tied = LanguageModel(AdaptiveLookup(bands, shared), encoder, AdaptiveSoftmax(bands, shared))
    assert tied.tied
    LanguageModel(AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, shared, head_projection="shared"))
    LanguageModel(
        AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, BandProjections(bands, WIDTH, head=False))
    )
    with pytest.raises(
        SettingsError, match=r"a matrix for the first band that no end uses; share them .* head = false"
    ):
        LanguageModel(AdaptiveLookup(bands, other), encoder, AdaptiveSoftmax(bands, shared))


def test_tied_is_holding_the_same_table() -> None:
    words, classes = WordTable(WORDS, WIDTH), WordTable(WORDS, WIDTH)
    assert model_of(words, words).tied
    assert not model_of(words, classes).tied


def test_parts_share_the_count_once() -> None:
    words = WordTable(WORDS, WIDTH)
    counts = model_of(words, words).parameter_counts()
    assert counts == {"input": WORDS * WIDTH, "encoder": 4 * WIDTH * (2 * WIDTH + 1), "output": WORDS}


def test_without_targets_each_token_is_the_target_of_the_one_before() -> None:
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table)
    found = model.loss(TOKENS)
    given = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    assert torch.equal(found.sum(), given.sum())
    assert found.parts["nll"].count == 2 * 5
    torch.testing.assert_close(found.mean(), found.sum() / 10)


def test_the_mean_is_the_objective_of_a_step() -> None:
    table = WordTable(WORDS, WIDTH)
    model = LanguageModel(Lookup(table), LSTM(WIDTH, WIDTH), Softmax(Projected(table, WIDTH, penalty=3.0)))
    losses = model.loss(TOKENS)
    penalty = losses.penalties["projection"]
    assert penalty > 0
    assert torch.equal(penalty, model.output.penalties()["projection"])
    torch.testing.assert_close(losses.mean(), (losses.sum() + penalty) / 10)


def test_a_loop_of_ones_own_carries_the_state() -> None:
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table)
    state = None
    for _ in range(3):
        losses = model.loss(TOKENS, state=state)
        losses.mean().backward()  # a second time through the first window would be an error
        state = losses.state
        assert not any(tensor.requires_grad for tensor in state.values())


def test_loss_is_the_sum_of_target_log_probs() -> None:
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table)
    targets = TOKENS[:, 1:].clone()
    targets[0, 2] = IGNORE
    logp_BT, state = model.target_log_probs(TOKENS[:, :-1], targets)
    losses = model.loss(TOKENS[:, :-1], targets)
    assert logp_BT.shape == targets.shape
    assert logp_BT[0, 2] == 0
    torch.testing.assert_close(losses.sum(), -logp_BT.sum())
    assert all(torch.equal(losses.state[name], state[name]) for name in state)


PADDED = torch.tensor([[4, 9, IGNORE, IGNORE, IGNORE], [3, 5, 8, 1, 7]])


def ends_of(kind: str) -> tuple[InputEnd, OutputEnd]:
    if kind == "adaptive":
        bands = BandedTable(WORDS, WIDTH, sizes=[4, 4], factor=2)
        shared = BandProjections(bands, WIDTH)
        return AdaptiveLookup(bands, shared), AdaptiveSoftmax(bands, shared)
    table = WordTable(WORDS, WIDTH)
    return Lookup(table), Softmax(Plain(table))


@pytest.mark.parametrize("kind", ["softmax", "adaptive"])
@pytest.mark.parametrize("encoder", [LSTM(WIDTH, WIDTH), Transformer(WIDTH, layers=2, heads=2, ffn_dim=8)])
def test_an_output_end_sees_no_row_without_a_target(
    kind: str, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows that have one, or all of them and padding that counts for nothing: the loss and its gradients."""
    torch.manual_seed(0)
    source, output = ends_of(kind)
    model = LanguageModel(source, encoder, output, RegularisationSettings(activation=0.5)).double()
    positions_M = (PADDED.flatten() != IGNORE).nonzero().squeeze(-1)
    seen: list[tuple[int, list[int]]] = []
    loss = output.loss
    monkeypatch.setattr(output, "loss", lambda h, y, plan: seen.append((len(h), y.tolist())) or loss(h, y, plan))
    whole = model.loss(TOKENS[:, :-1], PADDED)
    plan = output.prepare(PADDED.flatten()[positions_M])
    given, own = (model.loss(TOKENS[:, :-1], PADDED, None, each, positions_M) for each in (plan, None))
    assert [rows for rows, _ in seen] == [10, 7, 7]
    assert seen[1][1] == seen[2][1] == [4, 9, 3, 5, 8, 1, 7]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(whole.parts["nll"].sum, parameters)
    for found in (given, own):
        assert found.parts["nll"].count == found.parts["activation"].count == 7
        torch.testing.assert_close(found.parts["nll"].sum, whole.parts["nll"].sum)
        torch.testing.assert_close(torch.autograd.grad(found.parts["nll"].sum, parameters, retain_graph=True), expected)


def test_a_memory_reads_a_text_in_pieces() -> None:
    table = WordTable(WORDS, WIDTH)
    encoder = Transformer(WIDTH, layers=2, heads=2, ffn_dim=8)
    model = LanguageModel(Lookup(table), encoder, Softmax(Plain(table)))
    whole, _ = model.target_log_probs(TOKENS[:, :-1], TOKENS[:, 1:])
    first, state = model.target_log_probs(TOKENS[:, :2], TOKENS[:, 1:3], model.decoding_state(2))
    second, _ = model.target_log_probs(TOKENS[:, 2:-1], TOKENS[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_the_state_is_carried() -> None:
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table)
    whole, _ = model.target_log_probs(TOKENS[:, :-1], TOKENS[:, 1:])
    first, state = model.target_log_probs(TOKENS[:, :2], TOKENS[:, 1:3])
    second, _ = model.target_log_probs(TOKENS[:, 2:-1], TOKENS[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_the_output_end_reads_what_was_dropped() -> None:
    torch.manual_seed(0)
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table, dropout=0.5)
    assert not torch.equal(model.loss(TOKENS).sum(), model.loss(TOKENS).sum())
    model.eval()
    assert torch.equal(model.loss(TOKENS).sum(), model.loss(TOKENS).sum())


def test_a_tied_table_gets_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    words, classes = WordTable(WORDS, WIDTH), WordTable(WORDS, WIDTH)
    classes.load_state_dict(words.state_dict())
    untied = model_of(words, classes).double()
    tied = LanguageModel(untied.input, untied.encoder, Softmax(Plain(words))).double()
    untied.loss(TOKENS).sum().backward()
    assert words.weight.grad is not None
    assert classes.weight.grad is not None
    expected = words.weight.grad + classes.weight.grad
    tied.zero_grad()
    tied.loss(TOKENS).sum().backward()
    torch.testing.assert_close(words.weight.grad, expected)


def test_a_uniform_start_draws_every_parameter_once() -> None:
    table = WordTable(WORDS, WIDTH)
    model = model_of(table, table)
    torch.manual_seed(3)
    initialise(model, InitialisationSettings(uniform=0.1))
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() <= 0.1, name
        assert parameter.any(), name
    torch.manual_seed(3)
    assert torch.equal(table.weight, torch.empty(WORDS, WIDTH).uniform_(-0.1, 0.1))


def test_no_start_leaves_the_parts_alone() -> None:
    table = WordTable(WORDS, WIDTH)
    before = table.weight.clone()
    initialise(model_of(table, table), InitialisationSettings())
    assert torch.equal(table.weight, before)


def test_evaluating_computes_a_label_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all windows; afterwards the model is in the mode it was in and sees its parameters change."""
    table = WordTable(WORDS, WIDTH)
    model = LanguageModel(Lookup(table), LSTM(WIDTH, WIDTH), Softmax(Drill(table, depth=1, dropout=0.5)))
    calls = 0
    encode = Drill.encode

    def counted(self: Drill, ids: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert not self.training
        return encode(self, ids)

    def scores() -> torch.Tensor:
        with evaluating(model), torch.no_grad():
            windows = [model.target_log_probs(each[:, :-1], each[:, 1:])[0] for each in (TOKENS, TOKENS.flip(1))]
        return torch.cat(windows)

    monkeypatch.setattr(Drill, "encode", counted)
    first = scores()
    assert calls == 1
    assert model.training
    with torch.no_grad():
        table.weight.add_(1.0)
    assert not torch.equal(scores(), first)
    assert calls == 2
