"""The encoder-decoder Transformer equals torch's layers; neither a KV cache nor padding changes its outputs.

Shapes: B streams, S source steps, T target steps, D dimensions.
"""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.contract import State
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder, SourceBlock, TargetBlock
from reefknot.nn.encoders.transformer import CacheSlots
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import Translator
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

from .torch_stacks import (
    DIM,
    HEADS,
    LAYERS,
    LENGTHS,
    SMALL,
    SOURCE,
    STEPS,
    STREAMS,
    UNITS,
    assert_near,
    build,
    gradients,
    source,
    torch_output_and_attention,
    vectors,
)

NORMS = pytest.mark.parametrize("norm", ["pre", "post"])


@NORMS
def test_outputs_gradients_and_attention_equal_torch(norm: str) -> None:
    encoder = build(norm=norm)
    source_BSD, mask_BS = source()
    source_BSD.requires_grad_()
    inputs_BTD = vectors().requires_grad_()
    state = encoder.encode_source(source_BSD, mask_BS)
    encoded = encoder(inputs_BTD, state)
    expected, attention = torch_output_and_attention(encoder, source_BSD, mask_BS, inputs_BTD)
    inputs = [source_BSD, inputs_BTD, *encoder.parameters()]
    assert_near(encoded.output, expected)
    assert_near(gradients(encoded.output, inputs), gradients(expected, inputs))
    assert_near(encoder.attention(inputs_BTD, state), attention)
    assert encoded.raw is encoded.output


def test_cache_slots_are_computed_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build()
    state = encoder.encode_source(*source()) | encoder.decoding_state(STREAMS, steps=vectors().shape[1])
    expected = encoder.attention(vectors(), encoder.encode_source(*source()))
    for_window = Mock(wraps=CacheSlots.for_window)
    monkeypatch.setattr(CacheSlots, "for_window", for_window)
    assert_near(encoder.attention(vectors(), state), expected)
    assert for_window.call_count == 1


def test_parameter_count_equals_torch_transformer() -> None:
    reference = nn.Transformer(DIM, HEADS, LAYERS, LAYERS, UNITS, batch_first=True)
    assert sum(parameter.numel() for parameter in build().parameters()) == sum(
        parameter.numel() for parameter in reference.parameters()
    )


# -- the source ------------------------------------------------------------------------------------------------------


@NORMS
def test_padding_and_batching_do_not_change_outputs(norm: str) -> None:
    """A pair alone and without padding has the same output as in a batch with any values at padding."""
    encoder = build(norm=norm)
    source_BSD, mask_BS = source()
    state = encoder.encode_source(source_BSD, mask_BS)
    filled = source_BSD.masked_fill(~mask_BS[..., None], 1e3)
    longer = torch.cat([filled, vectors(3, seed=9)], dim=1)
    padded = encoder.encode_source(longer, torch.cat([mask_BS, torch.zeros(STREAMS, 3, dtype=torch.bool)], dim=1))
    batched = encoder(vectors(), state).output
    assert_near(encoder(vectors(), padded).output, batched)
    assert_near(encoder.attention(vectors(), padded)[..., :SOURCE], encoder.attention(vectors(), state))
    for row, length in enumerate(LENGTHS):
        stream = slice(row, row + 1)
        alone = encoder.encode_source(source_BSD[stream, :length], mask_BS[stream, :length])
        assert_near(encoder(vectors()[stream], alone).output, batched[stream])
        assert_near(encoder(vectors()[stream, :4], alone).output, batched[stream, :4])
        assert_near(
            encoder.attention(vectors()[stream], alone), encoder.attention(vectors(), state)[stream, :, :length]
        )


@NORMS
def test_padding_has_no_gradient(norm: str) -> None:
    encoder = build(norm=norm)
    source_BSD, mask_BS = source()
    source_BSD.requires_grad_()
    output = encoder(vectors(), encoder.encode_source(source_BSD, mask_BS)).output
    (gradient,) = gradients(output, [source_BSD])
    assert not gradient[~mask_BS].any()
    assert (gradient[mask_BS].abs().amax(-1) > 1e-6).all()


def test_source_keys_and_values_are_computed_once() -> None:
    """State entries have streams in dimension 1, and keys and values of the source are computed once."""
    encoder = build()
    state = encoder.encode_source(*source())
    assert list(state) == ["source_mask", "source.0", "source.1"]
    assert torch.equal(state["source_mask"], source()[1][None])
    assert {state[f"source.{number}"].shape for number in range(LAYERS)} == {(2, STREAMS, HEADS, SOURCE, DIM // HEADS)}
    calls: list[int] = []
    encoder.source_in.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        after = encoder(vectors(), state).state
        assert all(after[name] is tensor for name, tensor in state.items())
        assert len(after) == len(state)
    encoder.attention(vectors(), state)
    assert not calls
    encoder.encode_source(*source())
    assert calls == [1]


# -- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
def test_later_token_does_not_change_earlier_outputs(step: int) -> None:
    encoder = build()
    state = encoder.encode_source(*source())
    changed = vectors()
    changed[:, step, 0] += 1.0
    before, after = encoder(vectors(), state).output, encoder(changed, state).output
    assert torch.equal(before[:, :step], after[:, :step])
    assert ((before[:, step:] - after[:, step:]).abs().amax(-1) > 1e-6).all()


@NORMS
@pytest.mark.parametrize("lengths", [[7], [1] * 7, [3, 4], [4, 1, 2], [0, 2, 5]])
def test_kv_cache_equals_one_window_for_any_split(norm: str, lengths: list[int]) -> None:
    encoder = build(norm=norm)
    whole = encoder(vectors(), encoder.encode_source(*source())).output
    attention = encoder.attention(vectors(), encoder.encode_source(*source()))
    state, read = encoder.decoding_state(STREAMS) | encoder.encode_source(*source()), 0
    for part in torch.split(vectors(), lengths, dim=1):
        steps = slice(read, read + part.shape[1])
        assert_near(encoder.attention(part, state), attention[:, steps])
        encoded = encoder(part, state)
        assert encoded.state.keys() == state.keys()
        state, read = encoded.state, steps.stop
        assert_near(encoded.output, whole[:, steps])
        for number in range(LAYERS):
            assert state[f"block.{number}"].shape == (2, STREAMS, HEADS, read, DIM // HEADS)


def test_state_can_be_reordered_and_repeated_by_beam_search() -> None:
    """Every stream of a reordered state gives the same output as its source and steps read at once."""
    encoder = build()
    source_BSD, mask_BS = source()
    inputs_BTD = vectors()
    state = encoder.decoding_state(STREAMS) | encoder.encode_source(source_BSD, mask_BS)
    rows, steps = torch.arange(STREAMS), inputs_BTD[:, :0]
    for step, survivors in enumerate(([2, 0, 0, 1], [3, 3, 1], [0, 2, 1, 1, 0], [4, 1])):
        new = inputs_BTD[rows, step, None]
        output = encoder(new, state)
        steps = torch.cat([steps, new], dim=1)
        expected = encoder(steps, encoder.encode_source(source_BSD[rows], mask_BS[rows])).output[:, -1:]
        assert_near(output.output, expected)
        order = torch.tensor(survivors)
        state = {name: tensor.index_select(1, order) for name, tensor in output.state.items()}
        rows, steps = rows[order], steps[order]


def test_gradients_flow_through_the_kv_cache() -> None:
    encoder = build()
    source_BSD, mask_BS = source()
    inputs_BTD, source_BSD = vectors().requires_grad_(), source_BSD.requires_grad_()
    inputs = [inputs_BTD, source_BSD, *encoder.parameters()]
    first = encoder(inputs_BTD[:, :4], encoder.decoding_state(STREAMS) | encoder.encode_source(source_BSD, mask_BS))
    second = encoder(inputs_BTD[:, 4:], first.state)
    parts = torch.cat([first.output, second.output], dim=1)
    whole = encoder(inputs_BTD, encoder.encode_source(source_BSD, mask_BS)).output
    assert_near(gradients(parts, inputs), gradients(whole, inputs))


@NORMS
def test_attention_sums_to_one_and_is_zero_on_padding(norm: str) -> None:
    encoder = build(norm=norm)
    attention = encoder.attention(vectors(), encoder.encode_source(*source()))
    assert attention.shape == (STREAMS, STEPS, SOURCE)
    assert_near(attention.sum(-1), torch.ones(STREAMS, STEPS, dtype=torch.float64))
    mask_BTS = source()[1][:, None].expand_as(attention)
    assert not attention[~mask_BTS].any()
    assert (attention[mask_BTS] > 0).all()


# -- dropout and recomputing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["dropout", "dropout_attention", "dropout_relu"])
def test_every_rate_acts_in_both_stacks_in_training_only(rate: str) -> None:
    encoder, plain = build(**{rate: 0.5}), build()
    read, undropped = encoder.encode_source(*source()), plain.encode_source(*source())
    for name, tensor in undropped.items():
        assert torch.equal(read[name], tensor) == (name == "source_mask"), name
    assert_near(plain(vectors(), undropped).output, encoder.eval()(vectors(), encoder.encode_source(*source())).output)
    dropped, expected = encoder.train()(vectors(), undropped).output, plain(vectors(), undropped).output
    assert ((dropped - expected).abs().amax((-1, -2)) > 1e-6).all()
    torch.manual_seed(4)
    first = encoder(vectors(), encoder.encode_source(*source())).output
    torch.manual_seed(4)
    assert torch.equal(encoder(vectors(), encoder.encode_source(*source())).output, first)


@pytest.mark.parametrize(("rate", "norm", "calls"), [("dropout", "pre", 12), ("dropout_relu", "post", 4)])
def test_dropout_is_called_on_inputs_sublayers_or_hidden_units(
    rate: str, norm: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both inputs, 2 sublayers of a source block and 3 of a target block; or on the hidden units of each block."""
    encoder = build(**{rate: 0.25}, norm=norm)
    dropout, dropped = nn.functional.dropout, []

    def record(x: Tensor, p: float, training: bool) -> Tensor:
        if p:
            dropped.append((p, training, x.shape[-1]))
        return dropout(x, p, training)

    monkeypatch.setattr(nn.functional, "dropout", record)
    encoder(vectors(), encoder.encode_source(*source()))
    assert dropped == [(0.25, True, UNITS if rate == "dropout_relu" else DIM)] * calls


@NORMS
@pytest.mark.parametrize("training", [True, False])
def test_recomputing_gives_bitwise_equal_results(norm: str, training: bool) -> None:
    rates = {"dropout": 0.3, "dropout_attention": 0.2, "dropout_relu": 0.4}
    results = []
    call_counts = []
    for recompute in (False, True):
        encoder = build(**rates, norm=norm, recompute=recompute).train(training)
        assert encoder.synchronizes is recompute
        calls: list[int] = []
        for block in encoder.blocks:
            block.get_submodule("ffn_in").register_forward_hook(lambda *_, calls=calls: calls.append(1))
        source_BSD, mask_BS = source()
        inputs = [source_BSD.requires_grad_(), vectors().requires_grad_(), *encoder.parameters()]
        torch.manual_seed(3)
        output = encoder(inputs[1], encoder.encode_source(source_BSD, mask_BS)).output
        after = torch.rand(1)  # recomputing must not advance the generator
        results.append((output, after, *gradients(output, inputs)))
        call_counts.append(len(calls))
    assert all(torch.equal(value, recomputed) for value, recomputed in zip(*results, strict=True))
    assert call_counts == [2 * LAYERS, 4 * LAYERS]


# -- types, copies, devices ------------------------------------------------------------------------------------------


@NORMS
def test_autocast_keeps_sums_norms_and_outputs_in_float32(norm: str) -> None:
    """Under autocast residual sums, norms and outputs are float32; the state is bfloat16."""
    encoder = build(norm=norm).float()
    sums: list[torch.dtype] = []
    for block in encoder.blocks:
        block.register_forward_hook(
            lambda _module, _inputs, out: sums.append((out[0] if isinstance(out, tuple) else out).dtype)
        )
    inputs_BTD, (source_BSD, mask_BS) = vectors().bfloat16(), source()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = encoder.encode_source(source_BSD.bfloat16(), mask_BS)
        whole = encoder(inputs_BTD, state)
        first = encoder(inputs_BTD[:, :4], encoder.decoding_state(STREAMS) | state)
        second = encoder(inputs_BTD[:, 4:], first.state)
        attention = encoder.attention(inputs_BTD, state)
    assert whole.output.dtype == attention.dtype == torch.float32
    assert set(sums) == {torch.float32}
    assert {name: tensor.dtype for name, tensor in second.state.items()} == {
        name: torch.bool if name == "source_mask" else torch.bfloat16 for name in second.state
    }
    torch.testing.assert_close(attention.sum(-1), torch.ones(STREAMS, STEPS))
    torch.testing.assert_close(torch.cat([first.output, second.output], 1), whole.output, rtol=0.03, atol=0.03)
    reference = copy.deepcopy(encoder).double()
    exact = reference(inputs_BTD.double(), reference.encode_source(source_BSD.bfloat16().double(), mask_BS)).output
    assert 0.0 < float(((whole.output - exact).norm() / exact.norm()).detach()) < 0.02
    assert encoder(inputs_BTD.float(), state).output.dtype == torch.float32, "a bfloat16 state can be used in float32"


def test_copy_gives_equal_outputs_and_moves_to_meta_device() -> None:
    encoder = build()
    expected = encoder(vectors(), encoder.encode_source(*source())).output
    copied = copy.deepcopy(encoder)
    assert torch.equal(copied(vectors(), copied.encode_source(*source())).output, expected)
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert not list(encoder.buffers())
    copied.to("meta")
    state: State = copied.decoding_state(STREAMS, torch.device("meta")) | copied.encode_source(
        *(tensor.to("meta") for tensor in source())
    )
    assert all(tensor.is_meta for tensor in state.values())
    assert copied(vectors().to("meta"), state).output.is_meta


def test_compiles_without_graph_breaks() -> None:
    encoder = build(layers=1).eval()
    state = encoder.encode_source(*source())
    compiled_source = torch.compile(encoder.encode_source, fullgraph=True, backend="eager")
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    assert_near(compiled_source(*source())["source.0"], state["source.0"])
    assert_near(compiled(vectors(), state).output, encoder(vectors(), state).output)


# -- parameters ------------------------------------------------------------------------------------------------------


def test_initial_weights_are_xavier_uniform() -> None:
    """Queries, keys and values are initialised as separate matrices, biases as zeros and norms as ones."""
    torch.manual_seed(0)
    encoder = EncoderDecoder(64, 64, layers=2, heads=4, ffn_dim=256)
    target = encoder.target_blocks[1]
    assert isinstance(encoder.source_blocks[1], SourceBlock)
    assert isinstance(target, TargetBlock)
    bound = math.sqrt(6 / (64 + 64))
    separate = [*target.attention_in.weight.chunk(3), target.cross_in.weight, *encoder.source_in.weight.chunk(4)]
    for weight in separate:
        assert 0.97 * bound < float(weight.detach().abs().max()) * math.sqrt(2) <= bound
    for layer in (target.attention_out, target.cross_out):
        assert 0.97 * bound < float(layer.weight.detach().abs().max()) <= bound
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


def expected_parameters(dim: int, layers: int, ffn_dim: int, norm: str) -> int:
    attention = 4 * (dim**2 + dim)  # queries, keys, values, output
    network = 2 * dim * ffn_dim + ffn_dim + dim
    norm_parameters = 2 * dim
    source_block = attention + network + 2 * norm_parameters
    target_block = 2 * attention + network + 3 * norm_parameters
    return layers * (source_block + target_block) + (2 * norm_parameters if norm == "pre" else 0)


@pytest.mark.parametrize(
    ("dim", "heads", "ffn_dim", "norm", "count"),
    [
        # Base: 6 x (3,152,384 + 4,204,032); a norm has 1,024.
        (512, 8, 2048, "post", 44_138_496),
        (512, 8, 2048, "pre", 44_140_544),
        # Big: 6 x (12,596,224 + 16,796,672); a norm has 2,048.
        (1024, 16, 4096, "post", 176_357_376),
        (1024, 16, 4096, "pre", 176_361_472),
    ],
)
def test_parameter_counts_of_base_and_big_models(dim: int, heads: int, ffn_dim: int, norm: Any, count: int) -> None:
    with torch.device("meta"):
        encoder = EncoderDecoder(dim, dim, heads=heads, ffn_dim=ffn_dim, norm=norm)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    actual = sum(parameter.numel() for parameter in encoder.parameters())
    assert actual == expected_parameters(dim, 6, ffn_dim, norm) == count


@pytest.mark.parametrize("bias", [True, False])
def test_tied_base_translator_has_stacks_and_one_table(bias: bool) -> None:
    words = 37_000
    with torch.device("meta"):
        table = WordTable(words, 512)
        ends = Lookup(table, scale=512**0.5), Lookup(table, scale=512**0.5)
        model = Translator(*ends, EncoderDecoder(512, 512), Softmax(Plain(table, bias=bias)))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == words * 512 + 44_140_544 + words * bias
    assert count == (63_121_544 if bias else 63_084_544)


@NORMS
def test_every_parameter_has_a_gradient(norm: str) -> None:
    encoder = build(norm=norm)
    encoder(vectors(), encoder.encode_source(*source())).output.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
    assert [type(block) for block in encoder.blocks] == [SourceBlock] * LAYERS + [TargetBlock] * LAYERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "EncoderDecoder: layers = 0: must be at least 1"),
        ({"ffn_dim": 0}, "EncoderDecoder: ffn_dim = 0: must be at least 1"),
        ({"heads": 0}, "EncoderDecoder: heads = 0: must be at least 1"),
        ({"heads": 3}, "EncoderDecoder: heads = 3 does not divide the dimension of the input vectors, 8; use a number"),
        (
            {"source_dim": 6},
            "EncoderDecoder: source vectors have 6 dimensions and target vectors 8, but both",
        ),
        ({"source_dim": 0}, "EncoderDecoder: source_dim = 0: must be at least 1"),
        ({"norm": "both"}, "EncoderDecoder: norm = 'both': must be 'pre' or 'post'"),
        ({"dropout": 1.0}, "EncoderDecoder: dropout = 1.0: must be at least 0 and less than 1"),
        ({"dropout_attention": -0.1}, "EncoderDecoder: dropout_attention = -0.1: must be at least 0"),
        ({"dropout_relu": float("nan")}, "EncoderDecoder: dropout_relu = nan: must be at least 0"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EncoderDecoder(**{"source_dim": DIM, "input_dim": DIM, **SMALL, **arguments})
