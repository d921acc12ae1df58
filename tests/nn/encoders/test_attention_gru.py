"""The attention GRU compared with torch's GRU layers and cells on single sentences without padding.

Shapes: B streams, S source positions, T target steps, D dimensions, A dimensions of an annotation.
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
from reefknot.nn.encoders.stacked import get_weights

SOURCE_DIM, TARGET_DIM, UNITS, READOUT = 5, 6, 4, 3
LENGTHS = (7, 1, 4)
STREAMS, POSITIONS, STEPS = len(LENGTHS), max(LENGTHS), 5
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def build(**options: Any) -> AttentionGRU:
    """Build a float64 encoder with noise added to every parameter; without it attention is nearly uniform."""
    torch.manual_seed(0)
    encoder = AttentionGRU(SOURCE_DIM, TARGET_DIM, **{"units": UNITS, "readout": READOUT} | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.7)
    return encoder


def source_mask(lengths: tuple[int, ...] = LENGTHS, positions: int = POSITIONS) -> Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


def vectors() -> tuple[Tensor, Tensor]:
    """Return source vectors, with large numbers at padding, and target vectors."""
    torch.manual_seed(1)
    source_BSD = torch.randn(STREAMS, POSITIONS, SOURCE_DIM, dtype=torch.float64)
    inputs_BTD = torch.randn(STREAMS, STEPS, TARGET_DIM, dtype=torch.float64)
    return source_BSD + 100.0 * ~source_mask()[..., None], inputs_BTD


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def annotate_sentence(encoder: AttentionGRU, source_SD: Tensor) -> Tensor:
    """Return the annotations of one sentence, from one loop over torch's GRU cell per direction."""
    directions = []
    for gru, order in ((encoder.rightward, 1), (encoder.leftward, -1)):
        weights = get_weights(gru.layers[0])
        state_H = source_SD.new_zeros(UNITS)
        states = []
        for source_D in list(source_SD)[::order]:
            state_H = torch.gru_cell(source_D[None], state_H[None], *weights)[0]
            states.append(state_H)
        directions.append(torch.stack(states[::order]))
    return torch.cat(directions, dim=-1)


def translate_sentence(encoder: AttentionGRU, source_SD: Tensor, inputs_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the read-outs and attention weights of one pair without padding, computed with torch's GRU cell."""
    annotations_SA = annotate_sentence(encoder, source_SD)
    state_H = torch.tanh(encoder.start(annotations_SA.mean(0)))
    no_bias = state_H.new_zeros(3 * UNITS)
    first_gru = (encoder.word.weight, encoder.word_recurrent.weight, encoder.word.bias, no_bias)
    second_gru = (encoder.context.weight, encoder.context_recurrent.weight, no_bias, encoder.context_recurrent.bias)
    outputs = []
    attentions = []
    for word_D in inputs_TD:
        state_H = torch.gru_cell(word_D[None], state_H[None], *first_gru)[0]
        scores = []
        for annotation_A in annotations_SA:
            activation = torch.tanh(encoder.keys(annotation_A) + encoder.query(state_H))
            scores.append(encoder.score.weight[0] @ activation + encoder.score.bias[0])
        attention_S = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
        attentions.append(attention_S)
        context_A = sum(weight * annotation_A for weight, annotation_A in zip(attention_S, annotations_SA, strict=True))
        state_H = torch.gru_cell(context_A[None], state_H[None], *second_gru)[0]
        sum_R = encoder.read_state(state_H) + encoder.read_word(word_D) + encoder.read_context(context_A)
        outputs.append(torch.tanh(sum_R))
    return torch.stack(outputs), torch.stack(attentions)


def test_each_sentence_equals_torch_gru_cells_without_padding() -> None:
    """Outputs and all gradients are compared; padding gets no gradient."""
    encoder, (source_BSD, inputs_BTD) = build(), vectors()
    inputs = [source_BSD.requires_grad_(), inputs_BTD.requires_grad_(), *encoder.parameters()]
    state = encoder.encode_source(source_BSD, source_mask())
    encoded = encoder(inputs_BTD, state)
    references = [
        translate_sentence(encoder, source_SD[:length], inputs_TD)
        for source_SD, inputs_TD, length in zip(source_BSD, inputs_BTD, LENGTHS, strict=True)
    ]
    expected = torch.stack([output for output, _ in references])
    torch.testing.assert_close(encoded.output, expected, **EXACT)
    assert torch.equal(encoded.output, encoded.raw)
    expected_gradients = gradients(expected, inputs)
    torch.testing.assert_close(gradients(encoded.output, inputs), expected_gradients, rtol=1e-10, atol=1e-12)
    assert not expected_gradients[0][~source_mask()].any()
    weights_BTS = encoder.attention(inputs_BTD, state)
    for row, (_, weights_TS), length in zip(weights_BTS, references, LENGTHS, strict=True):
        torch.testing.assert_close(row[:, :length], weights_TS, **EXACT)


def test_annotations_equal_torch_bidirectional_gru() -> None:
    encoder, (source_BSD, _) = build(), vectors()
    layer = nn.GRU(SOURCE_DIM, UNITS, bidirectional=True, batch_first=True).double()
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    with torch.no_grad():
        for reader, ending in ((encoder.rightward, ""), (encoder.leftward, "_reverse")):
            for name, tensor in zip(names, get_weights(reader.layers[0]), strict=True):
                getattr(layer, name + ending).copy_(tensor)
    packed = pack_padded_sequence(source_BSD, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    expected_BSA, _ = pad_packed_sequence(layer(packed)[0], batch_first=True)
    actual_BSA = encoder.encode_source(source_BSD, source_mask())["annotations"][0]
    torch.testing.assert_close(actual_BSA[source_mask()], expected_BSA[source_mask()], **EXACT)


def test_gradients_match_finite_differences() -> None:
    encoder, (source_BSD, inputs_BTD) = build(units=2, readout=2), vectors()
    inputs = source_BSD[1:, :4].contiguous().requires_grad_(), inputs_BTD[1:, :2].contiguous().requires_grad_()

    def translate(source_BSD: Tensor, inputs_BTD: Tensor, *_: Tensor) -> Tensor:
        return encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask((1, 4), 4))).output  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(translate, (*inputs, *encoder.parameters()))


@pytest.mark.parametrize(
    "splits", [splits for n in range(STEPS) for splits in itertools.combinations(range(1, STEPS), n)]
)
def test_target_read_in_parts_equals_target_read_at_once(splits: tuple[int, ...]) -> None:
    encoder, (source_BSD, inputs_BTD) = build(), vectors()
    whole = encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask()))
    state = encoder.decoding_state(STREAMS) | encoder.encode_source(source_BSD, source_mask())
    outputs = []
    weights = []
    for part_BTD in inputs_BTD.tensor_split(splits, dim=1):
        weights.append(encoder.attention(part_BTD, state))
        encoded = encoder(part_BTD, state)
        assert encoded.state.keys() == state.keys()
        outputs.append(encoded.output)
        state = encoded.state
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole.output, **EXACT)
    torch.testing.assert_close(state["h"], whole.state["h"], **EXACT)
    attention_BTS = encoder.attention(inputs_BTD, encoder.encode_source(source_BSD, source_mask()))
    torch.testing.assert_close(torch.cat(weights, dim=1), attention_BTS, **EXACT)


def test_state_can_be_reordered_and_repeated_by_beam_search() -> None:
    encoder, (source_BSD, inputs_BTD) = build(), vectors()
    order = torch.tensor([2, 0, 0, 1, 2])
    state = encoder(inputs_BTD[:, :2], encoder.encode_source(source_BSD, source_mask())).state
    reordered: State = {name: tensor.index_select(1, order) for name, tensor in state.items()}
    actual = encoder(inputs_BTD[order, 2:], reordered).output
    expected = encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask())).output[order, 2:]
    torch.testing.assert_close(actual, expected, **EXACT)


def test_batch_and_padding_do_not_change_a_sentence() -> None:
    encoder, (source_BSD, inputs_BTD) = build(), vectors()
    state = encoder.encode_source(source_BSD, source_mask())
    batched, weights_BTS = encoder(inputs_BTD, state).output, encoder.attention(inputs_BTD, state)
    longer_BSD = F.pad(source_BSD, (0, 0, 0, 9), value=-50.0)
    padded = encoder.encode_source(longer_BSD, source_mask(positions=POSITIONS + 9))
    torch.testing.assert_close(encoder(inputs_BTD, padded).output, batched, **EXACT)
    torch.testing.assert_close(encoder.attention(inputs_BTD, padded), F.pad(weights_BTS, (0, 9)), **EXACT)
    for row, length in enumerate(LENGTHS):
        stream = slice(row, row + 1)
        alone = encoder.encode_source(source_BSD[stream, :length], source_mask((length,), length))
        torch.testing.assert_close(encoder(inputs_BTD[stream], alone).output, batched[stream], **EXACT)
        torch.testing.assert_close(
            encoder(inputs_BTD[stream], select_streams(state, stream)).output, batched[stream], **EXACT
        )


def test_attention_is_a_distribution_without_padding() -> None:
    encoder, (source_BSD, inputs_BTD) = build(), vectors()
    weights_BTS = encoder.attention(inputs_BTD, encoder.encode_source(source_BSD, source_mask()))
    assert weights_BTS.shape == (STREAMS, STEPS, POSITIONS)
    torch.testing.assert_close(weights_BTS.sum(-1), torch.ones(STREAMS, STEPS, dtype=torch.float64), **EXACT)
    assert ((weights_BTS > 0) == source_mask()[:, None]).all()
    assert weights_BTS[0].std() > 0.01


def test_published_model_has_the_published_parameter_count() -> None:
    """Press & Wolf (2017) without word vectors and output bias; comments give the tutorial's parameter names."""
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


def test_parameters_are_initialised_as_in_the_tutorial() -> None:
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


def test_dropout_acts_on_source_target_and_readout(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, plain, (source_BSD, inputs_BTD) = build(dropout=0.5), build(), vectors()
    calls: list[tuple[Tensor, Tensor]] = []
    dropout = F.dropout

    def record(x: Tensor, rate: float, training: bool) -> Tensor:
        output = dropout(x, rate, training)
        if rate > 0:
            calls.append((x, output))
        return output

    monkeypatch.setattr(F, "dropout", record)
    encoded = encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask()))
    (source, dropped_source), (target, dropped_target), (readout, dropped_readout) = calls
    assert source is source_BSD
    assert target is inputs_BTD
    assert readout is encoded.raw
    assert dropped_readout is encoded.output
    assert all(torch.equal(after[after != 0], 2 * before[after != 0]) and (after == 0).any() for before, after in calls)
    expected = plain.eval()(dropped_target, plain.encode_source(dropped_source, source_mask()))
    torch.testing.assert_close(encoded.raw, expected.output, **EXACT)
    torch.testing.assert_close(encoded.state["h"], expected.state["h"], **EXACT)
    encoder.eval()
    undropped = encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask())).output
    assert torch.equal(undropped, plain(inputs_BTD, plain.encode_source(source_BSD, source_mask())).output)


def test_every_parameter_but_the_score_bias_has_nonzero_gradient() -> None:
    """This bias shifts all scores equally. Its gradient is 0 but not None, because processes exchange it."""
    encoder, (source_BSD, inputs_BTD) = build(dropout=0.1), vectors()
    encoder(inputs_BTD, encoder.encode_source(source_BSD, source_mask())).output.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs() > 1e-9).any() == (name != "score.bias"), name


def test_copies_train_in_float32_and_bfloat16() -> None:
    encoder, (source_BSD, inputs_BTD) = build(dropout=0.1), vectors()
    copied = copy.deepcopy(encoder).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = copied.encode_source(source_BSD.float(), source_mask())
        encoded = copied(inputs_BTD.float(), state)
    encoded.output.float().square().sum().backward()
    assert state["h"].dtype == encoded.state["h"].dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in encoder.parameters())
    rounded = copy.deepcopy(encoder).bfloat16()
    state = rounded.encode_source(source_BSD.bfloat16(), source_mask())
    assert rounded(inputs_BTD.bfloat16(), state).output.isfinite().all()


def test_bfloat16_autocast_is_close_to_float32() -> None:
    encoder, (source_BSD, inputs_BTD) = build().float(), vectors()
    expected = encoder(inputs_BTD.float(), encoder.encode_source(source_BSD.float(), source_mask())).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = encoder(inputs_BTD.float(), encoder.encode_source(source_BSD.float(), source_mask())).output
    torch.testing.assert_close(actual.float(), expected, rtol=0.0, atol=0.1)
    assert (actual.float() - expected).abs().mean() < 0.02


def test_forward_reads_no_tensor_values() -> None:
    """Reading a value of a meta tensor fails; on a GPU it would wait for the device."""
    encoder = AttentionGRU(SOURCE_DIM, TARGET_DIM, units=UNITS, dropout=0.1).to("meta")
    source_BSD, inputs_BTD = torch.empty(2, 7, SOURCE_DIM, device="meta"), torch.empty(2, 3, TARGET_DIM, device="meta")
    encoded = encoder(inputs_BTD, encoder.encode_source(source_BSD, torch.ones(2, 7, dtype=torch.bool, device="meta")))
    assert encoded.output.shape == (2, 3, TARGET_DIM)
    assert not encoder.synchronizes


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_agrees_with_cpu_without_synchronising(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # By default cuDNN rounds the factors of a recurrence in float32 to TF32, which is not what is compared here.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    encoder, (source_BSD, inputs_BTD) = build().float(), vectors()
    expected = encoder(inputs_BTD.float(), encoder.encode_source(source_BSD.float(), source_mask())).output
    expected_gradients = gradients(expected, list(encoder.parameters()))
    on_gpu = copy.deepcopy(encoder).cuda()
    arguments = [tensor.cuda() for tensor in (source_BSD.float(), inputs_BTD.float(), source_mask())]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            warnings.simplefilter("error")
            actual = on_gpu(arguments[1], on_gpu.encode_source(arguments[0], arguments[2])).output.float()
        actual_gradients = gradients(actual, list(on_gpu.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 0.2 if autocast else 1e-3}
    torch.testing.assert_close(actual.cpu(), expected, **tolerance)
    if not autocast:
        torch.testing.assert_close(
            [gradient.cpu() for gradient in actual_gradients], list(expected_gradients), **tolerance
        )


def test_recipe_builds_the_encoder() -> None:
    settings = TypeAdapter(ENCODERS.entry_type()).validate_python({"kind": "attention_gru", "units": UNITS})
    encoder = ENCODERS.build(settings, {"source_dim": SOURCE_DIM, "input_dim": TARGET_DIM})
    assert isinstance(encoder, AttentionGRU)
    assert (encoder.source_dim, encoder.input_dim, encoder.dim) == (SOURCE_DIM, TARGET_DIM, TARGET_DIM)
    assert encoder.reads_source
    assert not encoder.carries_state
    assert not Encoder.reads_source
    assert encoder.initial_state(STREAMS) == encoder.decoding_state(STREAMS) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "AttentionGRU: units = 0: must be at least 1"),
        ({"source_dim": 0}, "AttentionGRU: source_dim = 0: must be at least 1"),
        ({"readout": -1}, "AttentionGRU: readout = -1: must be at least 1"),
        ({"dropout": 1.0}, "AttentionGRU: dropout = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        AttentionGRU(**{"source_dim": SOURCE_DIM, "input_dim": TARGET_DIM, "units": UNITS} | arguments)
