"""The encoder-decoder Transformer against torch's own layers, its memory against one window, padding against none.

Shapes: B streams, S source steps, T target steps, D width.
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

from .stacks import (
    HEADS,
    LAYERS,
    LENGTHS,
    SMALL,
    SOURCE,
    STEPS,
    STREAMS,
    UNITS,
    WIDTH,
    build,
    by_torch,
    close,
    gradients,
    source,
    vectors,
)

NORMS = pytest.mark.parametrize("norm", ["pre", "post"])


@NORMS
def test_the_stacks_are_torchs(norm: str) -> None:
    encoder = build(norm=norm)
    source_BSD, there_BS = source()
    source_BSD.requires_grad_()
    x_BTD = vectors().requires_grad_()
    state = encoder.read(source_BSD, there_BS)
    found = encoder(x_BTD, state)
    expected, looked = by_torch(encoder, source_BSD, there_BS, x_BTD)
    inputs = [source_BSD, x_BTD, *encoder.parameters()]
    close(found.output, expected)
    close(gradients(found.output, inputs), gradients(expected, inputs))
    close(encoder.attention(x_BTD, state), looked)
    assert found.raw is found.output


def test_the_slots_of_a_cache_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build()
    state = encoder.read(*source()) | encoder.decoding_state(STREAMS, steps=vectors().shape[1])
    expected = encoder.attention(vectors(), encoder.read(*source()))
    monkeypatch.setattr(CacheSlots, "after", asked := Mock(wraps=CacheSlots.after))
    close(encoder.attention(vectors(), state), expected)
    assert asked.call_count == 1


def test_they_have_torchs_number_of_parameters() -> None:
    theirs = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, UNITS, batch_first=True)
    assert sum(each.numel() for each in build().parameters()) == sum(each.numel() for each in theirs.parameters())


# -- the source ------------------------------------------------------------------------------------------------------


@NORMS
def test_padding_and_batching_change_nothing(norm: str) -> None:
    """Each pair alone, without its padding, is what it is beside the others, whatever the padding holds."""
    encoder = build(norm=norm)
    source_BSD, there_BS = source()
    state = encoder.read(source_BSD, there_BS)
    filled = source_BSD.masked_fill(~there_BS[..., None], 1e3)
    longer = torch.cat([filled, vectors(3, seed=9)], dim=1)
    padded = encoder.read(longer, torch.cat([there_BS, torch.zeros(STREAMS, 3, dtype=torch.bool)], dim=1))
    together = encoder(vectors(), state).output
    close(encoder(vectors(), padded).output, together)
    close(encoder.attention(vectors(), padded)[..., :SOURCE], encoder.attention(vectors(), state))
    for row, length in enumerate(LENGTHS):
        only = slice(row, row + 1)
        alone = encoder.read(source_BSD[only, :length], there_BS[only, :length])
        close(encoder(vectors()[only], alone).output, together[only])
        close(encoder(vectors()[only, :4], alone).output, together[only, :4])
        close(encoder.attention(vectors()[only], alone), encoder.attention(vectors(), state)[only, :, :length])


@NORMS
def test_padding_has_no_gradient(norm: str) -> None:
    encoder = build(norm=norm)
    source_BSD, there_BS = source()
    source_BSD.requires_grad_()
    output = encoder(vectors(), encoder.read(source_BSD, there_BS)).output
    (found,) = gradients(output, [source_BSD])
    assert not found[~there_BS].any()
    assert (found[there_BS].abs().amax(-1) > 1e-6).all()


def test_what_is_read_is_all_that_steps_need() -> None:
    """Its entries have streams in dimension 1; keys and values of the source are computed once."""
    encoder = build()
    state = encoder.read(*source())
    assert list(state) == ["there", "source.0", "source.1"]
    assert torch.equal(state["there"], source()[1][None])
    assert {state[f"source.{number}"].shape for number in range(LAYERS)} == {
        (2, STREAMS, HEADS, SOURCE, WIDTH // HEADS)
    }
    made: list[int] = []
    encoder.source_in.register_forward_hook(lambda *_: made.append(1))
    for _ in range(2):
        after = encoder(vectors(), state).state
        assert all(after[name] is tensor for name, tensor in state.items())
        assert len(after) == len(state)
    encoder.attention(vectors(), state)
    assert not made
    encoder.read(*source())
    assert made == [1]


# -- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 3, STEPS - 1])
def test_a_later_token_changes_nothing_before(when: int) -> None:
    encoder = build()
    state = encoder.read(*source())
    changed = vectors()
    changed[:, when, 0] += 1.0
    before, after = encoder(vectors(), state).output, encoder(changed, state).output
    assert torch.equal(before[:, :when], after[:, :when])
    assert ((before[:, when:] - after[:, when:]).abs().amax(-1) > 1e-6).all()


@NORMS
@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 4], [4, 1, 2], [0, 2, 5]])
def test_a_memory_joins_pieces_however_they_are_cut(norm: str, cuts: list[int]) -> None:
    encoder = build(norm=norm)
    whole = encoder(vectors(), encoder.read(*source())).output
    looked = encoder.attention(vectors(), encoder.read(*source()))
    state, read = encoder.decoding_state(STREAMS) | encoder.read(*source()), 0
    for piece in torch.split(vectors(), cuts, dim=1):
        steps = slice(read, read + piece.shape[1])
        close(encoder.attention(piece, state), looked[:, steps])
        found = encoder(piece, state)
        assert found.state.keys() == state.keys()
        state, read = found.state, steps.stop
        close(found.output, whole[:, steps])
        for number in range(LAYERS):
            assert state[f"block.{number}"].shape == (2, STREAMS, HEADS, read, WIDTH // HEADS)


def test_a_search_may_reorder_and_repeat_its_streams() -> None:
    """Whatever a beam keeps, each of its streams is the window of its own source and its own steps."""
    encoder = build()
    source_BSD, there_BS = source()
    x_BTD = vectors()
    state = encoder.decoding_state(STREAMS) | encoder.read(source_BSD, there_BS)
    rows, steps = torch.arange(STREAMS), x_BTD[:, :0]
    for step, kept in enumerate(([2, 0, 0, 1], [3, 3, 1], [0, 2, 1, 1, 0], [4, 1])):
        new = x_BTD[rows, step, None]
        output = encoder(new, state)
        steps = torch.cat([steps, new], dim=1)
        expected = encoder(steps, encoder.read(source_BSD[rows], there_BS[rows])).output[:, -1:]
        close(output.output, expected)
        order = torch.tensor(kept)
        state = {name: tensor.index_select(1, order) for name, tensor in output.state.items()}
        rows, steps = rows[order], steps[order]


def test_a_memory_has_gradients() -> None:
    encoder = build()
    source_BSD, there_BS = source()
    x_BTD, source_BSD = vectors().requires_grad_(), source_BSD.requires_grad_()
    inputs = [x_BTD, source_BSD, *encoder.parameters()]
    first = encoder(x_BTD[:, :4], encoder.decoding_state(STREAMS) | encoder.read(source_BSD, there_BS))
    second = encoder(x_BTD[:, 4:], first.state)
    found = torch.cat([first.output, second.output], dim=1)
    whole = encoder(x_BTD, encoder.read(source_BSD, there_BS)).output
    close(gradients(found, inputs), gradients(whole, inputs))


@NORMS
def test_attention_sums_to_one_and_is_zero_on_padding(norm: str) -> None:
    encoder = build(norm=norm)
    found = encoder.attention(vectors(), encoder.read(*source()))
    assert found.shape == (STREAMS, STEPS, SOURCE)
    close(found.sum(-1), torch.ones(STREAMS, STEPS, dtype=torch.float64))
    there_BTS = source()[1][:, None].expand_as(found)
    assert not found[~there_BTS].any()
    assert (found[there_BTS] > 0).all()


# -- dropout and recomputing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["dropout", "dropout_attention", "dropout_relu"])
def test_each_rate_acts_in_both_stacks_in_training_alone(rate: str) -> None:
    encoder, plain = build(**{rate: 0.5}), build()
    read, still = encoder.read(*source()), plain.read(*source())
    for name, tensor in still.items():
        assert torch.equal(read[name], tensor) == (name == "there"), name
    close(plain(vectors(), still).output, encoder.eval()(vectors(), encoder.read(*source())).output)
    dropped, expected = encoder.train()(vectors(), still).output, plain(vectors(), still).output
    assert ((dropped - expected).abs().amax((-1, -2)) > 1e-6).all()
    torch.manual_seed(4)
    one = encoder(vectors(), encoder.read(*source())).output
    torch.manual_seed(4)
    assert torch.equal(encoder(vectors(), encoder.read(*source())).output, one)


@pytest.mark.parametrize(("rate", "norm", "places"), [("dropout", "pre", 12), ("dropout_relu", "post", 4)])
def test_dropout_is_called_where_it_belongs(rate: str, norm: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both inputs, on 2 parts of a source block and 3 of a target block; on the units of each."""
    encoder = build(**{rate: 0.25}, norm=norm)
    drop, dropped = nn.functional.dropout, []

    def counted(x: Tensor, p: float, training: bool) -> Tensor:
        if p:
            dropped.append((p, training, x.shape[-1]))
        return drop(x, p, training)

    monkeypatch.setattr(nn.functional, "dropout", counted)
    encoder(vectors(), encoder.read(*source()))
    assert dropped == [(0.25, True, UNITS if rate == "dropout_relu" else WIDTH)] * places


@NORMS
@pytest.mark.parametrize("training", [True, False])
def test_recomputing_changes_nothing(norm: str, training: bool) -> None:
    rates = {"dropout": 0.3, "dropout_attention": 0.2, "dropout_relu": 0.4}
    outcomes, computed = [], []
    for recompute in (False, True):
        encoder = build(**rates, norm=norm, recompute=recompute).train(training)
        assert encoder.waits is recompute
        calls: list[int] = []
        for block in encoder.blocks:
            block.get_submodule("ffn_in").register_forward_hook(lambda *_, calls=calls: calls.append(1))
        source_BSD, there_BS = source()
        inputs = [source_BSD.requires_grad_(), vectors().requires_grad_(), *encoder.parameters()]
        torch.manual_seed(3)
        output = encoder(inputs[1], encoder.read(source_BSD, there_BS)).output
        after = torch.rand(1)  # the generator goes on as if nothing had happened
        outcomes.append((output, after, *gradients(output, inputs)))
        computed.append(len(calls))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    assert computed == [2 * LAYERS, 4 * LAYERS]


# -- types, copies, devices ------------------------------------------------------------------------------------------


@NORMS
def test_narrow_numbers_are_in_the_products_alone(norm: str) -> None:
    """Under autocast the sums, the norms and what comes out are float32; the state holds what was computed."""
    encoder = build(norm=norm).float()
    sums: list[torch.dtype] = []
    for block in encoder.blocks:
        block.register_forward_hook(
            lambda _module, _given, made: sums.append((made[0] if isinstance(made, tuple) else made).dtype)
        )
    x_BTD, (source_BSD, there_BS) = vectors().bfloat16(), source()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = encoder.read(source_BSD.bfloat16(), there_BS)
        fresh = encoder(x_BTD, state)
        first = encoder(x_BTD[:, :4], encoder.decoding_state(STREAMS) | state)
        second = encoder(x_BTD[:, 4:], first.state)
        looked = encoder.attention(x_BTD, state)
    assert fresh.output.dtype == looked.dtype == torch.float32
    assert set(sums) == {torch.float32}
    assert {name: tensor.dtype for name, tensor in second.state.items()} == {
        name: torch.bool if name == "there" else torch.bfloat16 for name in second.state
    }
    torch.testing.assert_close(looked.sum(-1), torch.ones(STREAMS, STEPS))
    torch.testing.assert_close(torch.cat([first.output, second.output], 1), fresh.output, rtol=0.03, atol=0.03)
    wide = copy.deepcopy(encoder).double()
    exact = wide(x_BTD.double(), wide.read(source_BSD.bfloat16().double(), there_BS)).output
    assert 0.0 < float(((fresh.output - exact).norm() / exact.norm()).detach()) < 0.02
    assert encoder(x_BTD.float(), state).output.dtype == torch.float32, "what was read narrow is used in float32"


def test_copies_types_and_devices() -> None:
    encoder = build()
    expected = encoder(vectors(), encoder.read(*source())).output
    again = copy.deepcopy(encoder)
    assert torch.equal(again(vectors(), again.read(*source())).output, expected)
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert not list(encoder.buffers())
    again.to("meta")
    state: State = again.decoding_state(STREAMS, torch.device("meta")) | again.read(
        *(each.to("meta") for each in source())
    )
    assert all(tensor.is_meta for tensor in state.values())
    assert again(vectors().to("meta"), state).output.is_meta


def test_it_compiles_whole() -> None:
    encoder = build(layers=1).eval()
    state = encoder.read(*source())
    read = torch.compile(encoder.read, fullgraph=True, backend="eager")
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    close(read(*source())["source.0"], state["source.0"])
    close(compiled(vectors(), state).output, encoder(vectors(), state).output)


# -- parameters ------------------------------------------------------------------------------------------------------


def test_how_it_starts() -> None:
    """Queries, keys and values as matrices of their own; biases at zero, norms at one."""
    torch.manual_seed(0)
    encoder = EncoderDecoder(64, 64, layers=2, heads=4, ffn_dim=256)
    target = encoder.target_blocks[1]
    assert isinstance(encoder.source_blocks[1], SourceBlock)
    assert isinstance(target, TargetBlock)
    bound = math.sqrt(6 / (64 + 64))
    narrow = [*target.attention_in.weight.chunk(3), target.cross_in.weight, *encoder.source_in.weight.chunk(4)]
    for weight in narrow:
        assert 0.97 * bound < float(weight.detach().abs().max()) * math.sqrt(2) <= bound
    for layer in (target.attention_out, target.cross_out):
        assert 0.97 * bound < float(layer.weight.detach().abs().max()) <= bound
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


def parameters_of(width: int, layers: int, ffn_dim: int, norm: str) -> int:
    attention = 4 * (width**2 + width)  # queries, keys, values, what comes out
    network = 2 * width * ffn_dim + ffn_dim + width
    a_norm = 2 * width
    source_block = attention + network + 2 * a_norm
    target_block = 2 * attention + network + 3 * a_norm
    return layers * (source_block + target_block) + (2 * a_norm if norm == "pre" else 0)


@pytest.mark.parametrize(
    ("width", "heads", "ffn_dim", "norm", "exact"),
    [
        # Base: 6 x (3,152,384 + 4,204,032); a norm has 1,024.
        (512, 8, 2048, "post", 44_138_496),
        (512, 8, 2048, "pre", 44_140_544),
        # Big: 6 x (12,596,224 + 16,796,672); a norm has 2,048.
        (1024, 16, 4096, "post", 176_357_376),
        (1024, 16, 4096, "pre", 176_361_472),
    ],
)
def test_parameters_are_counted_exactly(width: int, heads: int, ffn_dim: int, norm: Any, exact: int) -> None:
    with torch.device("meta"):
        encoder = EncoderDecoder(width, width, heads=heads, ffn_dim=ffn_dim, norm=norm)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    found = sum(parameter.numel() for parameter in encoder.parameters())
    assert found == parameters_of(width, 6, ffn_dim, norm) == exact


@pytest.mark.parametrize("bias", [True, False])
def test_a_base_translator_with_one_table_is_its_stacks_and_the_table(bias: bool) -> None:
    words = 37_000
    with torch.device("meta"):
        table = WordTable(words, 512)
        ends = Lookup(table, scale=512**0.5), Lookup(table, scale=512**0.5)
        model = Translator(*ends, EncoderDecoder(512, 512), Softmax(Plain(table, bias=bias)))
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == words * 512 + 44_140_544 + words * bias
    assert found == (63_121_544 if bias else 63_084_544)


@NORMS
def test_every_parameter_has_a_gradient(norm: str) -> None:
    encoder = build(norm=norm)
    encoder(vectors(), encoder.read(*source())).output.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
    assert [type(block) for block in encoder.blocks] == [SourceBlock] * LAYERS + [TargetBlock] * LAYERS


@pytest.mark.parametrize(
    ("wrong", "sentence"),
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
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        EncoderDecoder(**{"source_dim": WIDTH, "input_dim": WIDTH, **SMALL, **wrong})
