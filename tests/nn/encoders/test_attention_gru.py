"""The attention GRU against torch's layers and cells, sentence by sentence and without padding.

Shapes: B streams, S source positions, T target steps, D width.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import ENCODERS
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import Encoder, State, select_streams
from reefknot.nn.encoders.stacked import weights_of

SOURCE, TARGET, UNITS, READOUT = 5, 6, 4, 3
LENGTHS = (7, 1, 4)
STREAMS, POSITIONS, STEPS = len(LENGTHS), max(LENGTHS), 5
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def build(**options: Any) -> AttentionGRU:
    """In float64, with every parameter away from where it starts: there the weights are nearly all the same."""
    torch.manual_seed(0)
    encoder = AttentionGRU(SOURCE, TARGET, **{"units": UNITS, "readout": READOUT} | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.7)
    return encoder


def there(lengths: tuple[int, ...] = LENGTHS, positions: int = POSITIONS) -> Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


def vectors() -> tuple[Tensor, Tensor]:
    """A source, with anything at all in its padding, and a target."""
    torch.manual_seed(1)
    source_BSD = torch.randn(STREAMS, POSITIONS, SOURCE, dtype=torch.float64)
    x_BTD = torch.randn(STREAMS, STEPS, TARGET, dtype=torch.float64)
    return source_BSD + 100.0 * ~there()[..., None], x_BTD


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def read_alone(encoder: AttentionGRU, source_SD: Tensor) -> Tensor:
    """Those of one sentence, by two loops over torch's cell, one from either end."""
    states = []
    for reader, order in ((encoder.rightward, 1), (encoder.leftward, -1)):
        h = source_SD.new_zeros(UNITS)
        found = []
        for x in list(source_SD)[::order]:
            h = torch.gru_cell(x[None], h[None], *weights_of(reader.layers[0]))[0]
            found.append(h)
        states.append(torch.stack(found[::order]))
    return torch.cat(states, dim=-1)


def sentence(encoder: AttentionGRU, source_SD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One pair without padding, the two GRUs of a step by torch's cell: the read-out of every step, and the weights."""
    a_SA = read_alone(encoder, source_SD)
    s = torch.tanh(encoder.start(a_SA.mean(0)))
    no_bias = s.new_zeros(3 * UNITS)
    first = encoder.word.weight, encoder.word_recurrent.weight, encoder.word.bias, no_bias
    second = encoder.context.weight, encoder.context_recurrent.weight, no_bias, encoder.context_recurrent.bias
    outputs, weights = [], []
    for y in x_TD:
        s = torch.gru_cell(y[None], s[None], *first)[0]
        scores = [
            encoder.score.weight[0] @ torch.tanh(encoder.keys(a) + encoder.query(s)) + encoder.score.bias[0]
            for a in a_SA
        ]
        weights.append(torch.stack(scores).exp() / torch.stack(scores).exp().sum())
        c = sum(weight * a for weight, a in zip(weights[-1], a_SA, strict=True))
        s = torch.gru_cell(c[None], s[None], *second)[0]
        outputs.append(torch.tanh(encoder.read_state(s) + encoder.read_word(y) + encoder.read_context(c)))
    return torch.stack(outputs), torch.stack(weights)


def test_every_sentence_is_what_torchs_cells_make_of_it_alone() -> None:
    """Values and all gradients; what stands in the padding counts for nothing."""
    encoder, (source_BSD, x_BTD) = build(), vectors()
    inputs = [source_BSD.requires_grad_(), x_BTD.requires_grad_(), *encoder.parameters()]
    state = encoder.read(source_BSD, there())
    found = encoder(x_BTD, state)
    alone = [
        sentence(encoder, source_SD[:length], x_TD)
        for source_SD, x_TD, length in zip(source_BSD, x_BTD, LENGTHS, strict=True)
    ]
    expected = torch.stack([output for output, _ in alone])
    torch.testing.assert_close(found.output, expected, **EXACT)
    assert torch.equal(found.output, found.raw)
    theirs = gradients(expected, inputs)
    torch.testing.assert_close(gradients(found.output, inputs), theirs, rtol=1e-10, atol=1e-12)
    assert not theirs[0][~there()].any()
    weights_BTS = encoder.attention(x_BTD, state)
    for row, (_, weights_TS), length in zip(weights_BTS, alone, LENGTHS, strict=True):
        torch.testing.assert_close(row[:, :length], weights_TS, **EXACT)


def test_the_source_is_read_as_by_torchs_bidirectional_layer() -> None:
    encoder, (source_BSD, _) = build(), vectors()
    layer = nn.GRU(SOURCE, UNITS, bidirectional=True, batch_first=True).double()
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    with torch.no_grad():
        for reader, ending in ((encoder.rightward, ""), (encoder.leftward, "_reverse")):
            for name, tensor in zip(names, weights_of(reader.layers[0]), strict=True):
                getattr(layer, name + ending).copy_(tensor)
    packed = pack_padded_sequence(source_BSD, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    expected_BSA, _ = pad_packed_sequence(layer(packed)[0], batch_first=True)
    found_BSA = encoder.read(source_BSD, there())["annotations"][0]
    torch.testing.assert_close(found_BSA[there()], expected_BSA[there()], **EXACT)


def test_gradients_are_those_of_differences() -> None:
    encoder, (source_BSD, x_BTD) = build(units=2, readout=2), vectors()
    inputs = source_BSD[1:, :4].contiguous().requires_grad_(), x_BTD[1:, :2].contiguous().requires_grad_()

    def translate(source_BSD: Tensor, x_BTD: Tensor, *_: Tensor) -> Tensor:
        return encoder(x_BTD, encoder.read(source_BSD, there((1, 4), 4))).output  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(translate, (*inputs, *encoder.parameters()))


@pytest.mark.parametrize("cuts", [cuts for n in range(STEPS) for cuts in itertools.combinations(range(1, STEPS), n)])
def test_a_target_may_come_in_any_pieces(cuts: tuple[int, ...]) -> None:
    encoder, (source_BSD, x_BTD) = build(), vectors()
    whole = encoder(x_BTD, encoder.read(source_BSD, there()))
    state = encoder.decoding_state(STREAMS) | encoder.read(source_BSD, there())
    outputs, weights = [], []
    for piece_BTD in x_BTD.tensor_split(cuts, dim=1):
        weights.append(encoder.attention(piece_BTD, state))
        found = encoder(piece_BTD, state)
        assert found.state.keys() == state.keys()
        outputs.append(found.output)
        state = found.state
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole.output, **EXACT)
    torch.testing.assert_close(state["h"], whole.state["h"], **EXACT)
    a_BTS = encoder.attention(x_BTD, encoder.read(source_BSD, there()))
    torch.testing.assert_close(torch.cat(weights, dim=1), a_BTS, **EXACT)


def test_streams_are_selected_and_put_in_order_as_a_search_does_it() -> None:
    encoder, (source_BSD, x_BTD) = build(), vectors()
    order = torch.tensor([2, 0, 0, 1, 2])
    state = encoder(x_BTD[:, :2], encoder.read(source_BSD, there())).state
    chosen: State = {name: tensor.index_select(1, order) for name, tensor in state.items()}
    found = encoder(x_BTD[order, 2:], chosen).output
    expected = encoder(x_BTD, encoder.read(source_BSD, there())).output[order, 2:]
    torch.testing.assert_close(found, expected, **EXACT)


def test_neither_neighbours_nor_padding_change_a_sentence() -> None:
    encoder, (source_BSD, x_BTD) = build(), vectors()
    state = encoder.read(source_BSD, there())
    together, weights_BTS = encoder(x_BTD, state).output, encoder.attention(x_BTD, state)
    longer_BSD = F.pad(source_BSD, (0, 0, 0, 9), value=-50.0)
    padded = encoder.read(longer_BSD, there(positions=POSITIONS + 9))
    torch.testing.assert_close(encoder(x_BTD, padded).output, together, **EXACT)
    torch.testing.assert_close(encoder.attention(x_BTD, padded), F.pad(weights_BTS, (0, 9)), **EXACT)
    for row, length in enumerate(LENGTHS):
        one = slice(row, row + 1)
        alone = encoder.read(source_BSD[one, :length], there((length,), length))
        torch.testing.assert_close(encoder(x_BTD[one], alone).output, together[one], **EXACT)
        torch.testing.assert_close(encoder(x_BTD[one], select_streams(state, one)).output, together[one], **EXACT)


def test_attention_is_a_distribution_over_the_words_that_are_there() -> None:
    encoder, (source_BSD, x_BTD) = build(), vectors()
    weights_BTS = encoder.attention(x_BTD, encoder.read(source_BSD, there()))
    assert weights_BTS.shape == (STREAMS, STEPS, POSITIONS)
    torch.testing.assert_close(weights_BTS.sum(-1), torch.ones(STREAMS, STEPS, dtype=torch.float64), **EXACT)
    assert ((weights_BTS > 0) == there()[:, None]).all()
    assert weights_BTS[0].std() > 0.01


def test_the_published_model_is_counted_exactly() -> None:
    """Press & Wolf (2017), without the word vectors and the bias of the vocabulary; the names are the tutorial's."""
    word, units = 500, 1000
    annotation = 2 * units
    gru = word * 3 * units + units * 3 * units + 3 * units  # W, Wx; U, Ux; b, bx
    source = 2 * gru
    start = annotation * units + units  # ff_state
    attention = annotation * annotation + units * annotation  # Wc_att, W_comb_att
    attention += annotation + annotation + 1  # b_att, U_att, c_tt
    second = annotation * 3 * units + units * 3 * units + 3 * units  # Wc, Wcx; U_nl, Ux_nl; b_nl, bx_nl
    readout = (units + word + annotation + 3) * word  # ff_logit_lstm, ff_logit_prev, ff_logit_ctx
    assert source + start + gru + attention + second + readout == 32_268_501
    with torch.device("meta"):
        encoder = AttentionGRU(word, word)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 32_268_501
    assert (encoder.source_dim, encoder.input_dim, encoder.dim) == (500, 500, 500)


def test_it_starts_as_the_tutorials_program_does() -> None:
    torch.manual_seed(0)
    encoder = AttentionGRU(40, 50, units=30).double()
    square = ("word_recurrent", "context_recurrent", "keys", "weight_hh")
    for name, parameter in encoder.named_parameters():
        if "bias" in name:
            assert not parameter.any(), name
        elif any(part in name for part in square):
            for matrix in parameter.chunk(len(parameter) // parameter.shape[1]):
                torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)).double(), atol=1e-5, rtol=0.0)
        else:
            assert 0.5 < parameter.std() / 0.01 < 1.5, name
            assert parameter.mean().abs() < 0.01, name


def test_dropout_is_on_both_sides_vectors_and_on_the_read_out(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, plain, (source_BSD, x_BTD) = build(dropout=0.5), build(), vectors()
    drawn: list[tuple[Tensor, Tensor]] = []
    draw = F.dropout

    def record(x: Tensor, rate: float, training: bool) -> Tensor:
        kept = draw(x, rate, training)
        if rate > 0:
            drawn.append((x, kept))
        return kept

    monkeypatch.setattr(F, "dropout", record)
    found = encoder(x_BTD, encoder.read(source_BSD, there()))
    (source, kept_source), (target, kept_target), (readout, kept_readout) = drawn
    assert source is source_BSD
    assert target is x_BTD
    assert readout is found.raw
    assert kept_readout is found.output
    assert all(torch.equal(kept[kept != 0], 2 * before[kept != 0]) and (kept == 0).any() for before, kept in drawn)
    expected = plain.eval()(kept_target, plain.read(kept_source, there()))
    torch.testing.assert_close(found.raw, expected.output, **EXACT)
    torch.testing.assert_close(found.state["h"], expected.state["h"], **EXACT)
    encoder.eval()
    undropped = encoder(x_BTD, encoder.read(source_BSD, there())).output
    assert torch.equal(undropped, plain(x_BTD, plain.read(source_BSD, there())).output)


def test_training_reaches_every_parameter_but_the_bias_that_means_nothing() -> None:
    """A constant beside all scores: it has a gradient, as processes that train together must find, and it is 0."""
    encoder, (source_BSD, x_BTD) = build(dropout=0.1), vectors()
    encoder(x_BTD, encoder.read(source_BSD, there())).output.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs() > 1e-9).any() == (name != "score.bias"), name


def test_copies_and_narrow_numbers_train() -> None:
    encoder, (source_BSD, x_BTD) = build(dropout=0.1), vectors()
    copied = copy.deepcopy(encoder).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = copied.read(source_BSD.float(), there())
        found = copied(x_BTD.float(), state)
    found.output.float().square().sum().backward()
    assert state["h"].dtype == found.state["h"].dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in encoder.parameters())
    narrow = copy.deepcopy(encoder).bfloat16()
    state = narrow.read(source_BSD.bfloat16(), there())
    assert narrow(x_BTD.bfloat16(), state).output.isfinite().all()


def test_bfloat16_products_stay_near_the_numbers() -> None:
    encoder, (source_BSD, x_BTD) = build().float(), vectors()
    expected = encoder(x_BTD.float(), encoder.read(source_BSD.float(), there())).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder(x_BTD.float(), encoder.read(source_BSD.float(), there())).output
    torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=0.1)
    assert (found.float() - expected).abs().mean() < 0.02


def test_no_number_is_asked_for() -> None:
    """Where tensors have no values, whatever asks for one fails: on a GPU it would wait."""
    encoder = AttentionGRU(SOURCE, TARGET, units=UNITS, dropout=0.1).to("meta")
    source_BSD, x_BTD = torch.empty(2, 7, SOURCE, device="meta"), torch.empty(2, 3, TARGET, device="meta")
    found = encoder(x_BTD, encoder.read(source_BSD, torch.ones(2, 7, dtype=torch.bool, device="meta")))
    assert found.output.shape == (2, 3, TARGET)
    assert not encoder.waits


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gpu_is_not_waited_for_and_agrees(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # By default cuDNN rounds the factors of a recurrence in float32 to TF32, which is not what is compared here.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    encoder, (source_BSD, x_BTD) = build().float(), vectors()
    expected = encoder(x_BTD.float(), encoder.read(source_BSD.float(), there())).output
    theirs = gradients(expected, list(encoder.parameters()))
    on_gpu = copy.deepcopy(encoder).cuda()
    arguments = [each.cuda() for each in (source_BSD.float(), x_BTD.float(), there())]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            warnings.simplefilter("error")
            found = on_gpu(arguments[1], on_gpu.read(arguments[0], arguments[2])).output.float()
        ours = gradients(found, list(on_gpu.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 0.2 if autocast else 1e-3}
    torch.testing.assert_close(found.cpu(), expected, **tolerance)
    if not autocast:
        torch.testing.assert_close([each.cpu() for each in ours], list(theirs), **tolerance)


def test_a_recipe_builds_it() -> None:
    settings = TypeAdapter(ENCODERS.settings()).validate_python({"kind": "attention_gru", "units": UNITS})
    encoder = ENCODERS.build(settings, {"source_dim": SOURCE, "input_dim": TARGET})
    assert isinstance(encoder, AttentionGRU)
    assert (encoder.source_dim, encoder.input_dim, encoder.dim) == (SOURCE, TARGET, TARGET)
    assert encoder.reads_source
    assert not encoder.carries
    assert not Encoder.reads_source
    assert encoder.initial_state(STREAMS) == encoder.decoding_state(STREAMS) == {}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"units": 0}, "AttentionGRU: units = 0: must be at least 1"),
        ({"source_dim": 0}, "AttentionGRU: source_dim = 0: must be at least 1"),
        ({"readout": -1}, "AttentionGRU: readout = -1: must be at least 1"),
        ({"dropout": 1.0}, "AttentionGRU: dropout = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        AttentionGRU(**{"source_dim": SOURCE, "input_dim": TARGET, "units": UNITS} | wrong)
