"""The transformer against torch's own layer, its positions against the formula, its memory against one window.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.encoders import transformer
from reefknot.nn.encoders.contract import State
from reefknot.nn.encoders.transformer import Block, Transformer, sinusoids

STREAMS, STEPS, WIDTH, HEADS, UNITS = 3, 7, 8, 2, 20
SMALL: dict[str, Any] = {"layers": 3, "heads": HEADS, "ffn_dim": UNITS}


def build(**options: Any) -> Transformer:
    """In float64, with every parameter away from where it starts."""
    torch.manual_seed(0)
    encoder = Transformer(WIDTH, **SMALL | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def vectors(steps: int = STEPS) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STREAMS, steps, WIDTH, dtype=torch.float64)


def authority(block: Block) -> nn.TransformerEncoderLayer:
    """torch's layer with the block's own parameters."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, UNITS, dropout=0.0, activation="relu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_": "attention_in.",
        "self_attn.out_proj.": "attention_out.",
        "linear1.": "ffn_in.",
        "linear2.": "ffn_out.",
        "norm1.": "attention_norm.",
        "norm2.": "ffn_norm.",
    }
    ours = dict(block.named_parameters())
    assert len(ours) == 2 * len(names)
    for theirs, name in names.items():
        for kind in ("weight", "bias"):
            holder, _, last = f"{theirs}{kind}".rpartition(".")
            setattr(layer.get_submodule(holder), last, ours[f"{name}{kind}"])
    return layer


def causal(steps: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(steps, dtype=torch.float64)


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def test_a_block_is_torchs_layer() -> None:
    block = build().blocks[0]
    x_BTD = vectors().requires_grad_()
    inputs = [x_BTD, *block.parameters()]
    found = block(x_BTD)[0]
    expected = authority(block)(x_BTD, src_mask=causal(STEPS), is_causal=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("final_norm", [False, True])
def test_the_stack_is_torchs(final_norm: bool) -> None:
    encoder = build(final_norm=final_norm)
    x_BTD = vectors().requires_grad_()
    expected = x_BTD + sinusoids(0, STEPS, WIDTH, x_BTD.device)
    for block in encoder.blocks:
        expected = authority(block)(expected, src_mask=causal(STEPS), is_causal=True)
    if encoder.final_norm is not None:
        expected = F.layer_norm(expected, (WIDTH,), encoder.final_norm.weight, encoder.final_norm.bias, 1e-5)
    found = encoder(x_BTD, {})
    inputs = [x_BTD, *encoder.parameters()]
    torch.testing.assert_close(found.output, expected)
    torch.testing.assert_close(gradients(found.output, inputs), gradients(expected, inputs))
    assert found.raw is found.output
    assert found.state == {}


def test_positions_are_halves_of_sines_and_cosines() -> None:
    found = sinusoids(3, 7, 10, torch.device("cpu"))
    assert found.shape == (4, 10)
    for row, position in enumerate((5, 6, 7, 8)):  # the first one is called 2
        for j in range(5):
            angle = position * math.exp(-j * math.log(10_000) / 4)
            assert float(found[row, j]) == pytest.approx(math.sin(angle))
            assert float(found[row, 5 + j]) == pytest.approx(math.cos(angle))
    assert torch.equal(sinusoids(0, 9, 10, torch.device("cpu"))[3:7], found)


@pytest.mark.parametrize("dim", [1, 2, 3, 7])
def test_positions_of_narrow_and_odd_widths(dim: int) -> None:
    found = sinusoids(0, 5, dim, torch.device("cpu"))
    assert found.shape == (5, dim)
    assert found.isfinite().all()
    assert dim % 2 == 0 or not found[:, -1].any()
    assert Transformer(dim, layers=1, heads=1, ffn_dim=4)(torch.zeros(1, 5, dim), {}).output.isfinite().all()


def test_positions_are_not_stored() -> None:
    encoder = build()
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert not list(encoder.buffers())
    assert encoder(vectors(50), {}).output.shape == (STREAMS, 50, WIDTH)


def test_positions_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the longest window and all shorter ones of their power of two, wherever they begin."""
    made = []
    monkeypatch.setattr(transformer, "sinusoids", lambda *given: made.append(given[:2]) or sinusoids(*given))
    encoder = build()
    for steps in (5, 7, 8, 6, 9, 16, 8):
        found, fewer = (encoder(vectors(16)[:, :stop], {}).output for stop in (steps, 5))
        torch.testing.assert_close(found[:, :5], fewer)
    state = encoder.decoding_state(STREAMS)
    for step in range(12):
        state = encoder(vectors(16)[:, step, None], state).state
    assert made == [(0, 8), (0, 16), (0, 1), (0, 2), (0, 4)]


def test_positions_follow_the_model() -> None:
    """After a copy, in another type and on another device they are those of a model that never computed any."""
    encoder = build()
    wide = encoder(vectors(), {}).output
    again = copy.deepcopy(encoder)
    assert torch.equal(again(vectors(), {}).output, wide)
    narrow = encoder.float()(vectors().float(), {}).output
    assert torch.equal(narrow, build().float()(vectors().float(), {}).output)
    assert torch.equal(again(vectors(), {}).output, wide), "the copy keeps its own"
    assert again.to("meta")(vectors().to("meta"), {}).output.is_meta


def test_positions_that_an_evaluation_computed_serve_training() -> None:
    encoder = build()
    with torch.inference_mode():
        expected = encoder(vectors(), {}).output.clone()
    found = encoder(vectors(), {}).output
    torch.testing.assert_close(found, expected)
    assert all(each.isfinite().all() for each in gradients(found, list(encoder.parameters())))


@pytest.mark.parametrize("when", range(STEPS))
def test_a_later_token_changes_nothing_before(when: int) -> None:
    encoder = build()
    changed = vectors()
    changed[:, when, 0] += 1.0
    before, after = encoder(vectors(), {}).output, encoder(changed, {}).output
    assert torch.equal(before[:, :when], after[:, :when])
    assert ((before[:, when:] - after[:, when:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 4], [4, 1, 2], [1, 5, 1], [0, 2, 5]])
def test_a_memory_joins_pieces_however_they_are_cut(cuts: list[int]) -> None:
    encoder = build(final_norm=True)
    whole = encoder(vectors(), {}).output
    state, read = encoder.decoding_state(STREAMS), 0
    pieces = []
    for piece in vectors().split(cuts, dim=1):
        found = encoder(piece, state)
        state, read = found.state, read + piece.shape[1]
        pieces.append(found.output)
        assert list(state) == ["block.0", "block.1", "block.2"]
        assert all(tensor.shape == (2, STREAMS, HEADS, read, WIDTH // HEADS) for tensor in state.values())
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


def test_a_memory_has_gradients() -> None:
    encoder = build()
    x_BTD = vectors().requires_grad_()
    inputs = [x_BTD, *encoder.parameters()]
    first = encoder(x_BTD[:, :4], encoder.decoding_state(STREAMS))
    second = encoder(x_BTD[:, 4:], first.state)
    found = torch.cat([first.output, second.output], dim=1)
    torch.testing.assert_close(gradients(found, inputs), gradients(encoder(x_BTD, {}).output, inputs))


def test_a_window_is_computed_afresh() -> None:
    encoder = build()
    assert not encoder.carries
    assert encoder.initial_state(STREAMS) == encoder(vectors(), {}).state == {}


@pytest.mark.parametrize("training", [True, False])
def test_recomputing_changes_nothing(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"dropout": 0.3, "dropout_attention": 0.2, "dropout_relu": 0.4}
    plain, again = (build(**rates, recompute=recompute).train(training) for recompute in (False, True))
    outcomes, computed = [], []
    for encoder in (plain, again):
        attend, calls = Block._attend, []
        monkeypatch.setattr(Block, "_attend", lambda *given, a=attend, c=calls: c.append(1) or a(*given))
        x_BTD = vectors().requires_grad_()
        torch.manual_seed(3)
        output = encoder(x_BTD, {}).output
        after = torch.rand(1)  # the generator goes on as if nothing had happened
        outcomes.append((output, after, *gradients(output, [x_BTD, *encoder.parameters()])))
        computed.append(len(calls))
        monkeypatch.undo()
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    assert computed == [3, 6]
    assert (plain.waits, again.waits) == (False, True)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(vectors(), {}).output, plain.eval()(vectors(), {}).output)


def equations(encoder: Transformer, x_BTD: Tensor) -> Tensor:
    """The blocks written out, with dropout called in their order: on the sum that goes in, then in each block on the
    attention weights, on what attention adds, on the units, on what they add."""
    x_BTD = F.dropout(x_BTD + sinusoids(0, x_BTD.shape[1], WIDTH, x_BTD.device), encoder.dropout, encoder.training)
    block: Any
    for block in encoder.blocks:
        attention_rate = block.dropout_attention
        normed = F.layer_norm(x_BTD, (WIDTH,), block.attention_norm.weight, block.attention_norm.bias)
        made = []
        for weight, bias in zip(block.attention_in.weight.chunk(3), block.attention_in.bias.chunk(3), strict=True):
            made.append((normed @ weight.T + bias).view(*normed.shape[:2], HEADS, -1).transpose(1, 2))
        q, k, v = made
        scores = q @ k.mT / math.sqrt(WIDTH // HEADS) + causal(x_BTD.shape[1])
        weights = F.dropout(scores.softmax(-1), attention_rate, encoder.training)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        attended = attended @ block.attention_out.weight.T + block.attention_out.bias
        x_BTD = x_BTD + F.dropout(attended, encoder.dropout, encoder.training)
        normed = F.layer_norm(x_BTD, (WIDTH,), block.ffn_norm.weight, block.ffn_norm.bias)
        units = F.dropout(block.ffn_in(normed).relu(), block.dropout_relu, encoder.training)
        x_BTD = x_BTD + F.dropout(block.ffn_out(units), encoder.dropout, encoder.training)
    return x_BTD


@pytest.mark.parametrize("rates", [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5), (0.3, 0.2, 0.4)])
def test_each_rate_drops_where_it_should(rates: tuple[float, float, float]) -> None:
    names = ("dropout", "dropout_attention", "dropout_relu")
    encoder = build(**dict(zip(names, rates, strict=True)))
    torch.manual_seed(5)
    found = encoder(vectors(), {}).output
    torch.manual_seed(5)
    torch.testing.assert_close(found, equations(encoder, vectors()))
    assert not torch.allclose(found, encoder.eval()(vectors(), {}).output)
    torch.testing.assert_close(encoder(vectors(), {}).output, equations(encoder, vectors()))


def test_how_it_starts() -> None:
    """Queries, keys and values as three matrices of their own; biases at zero, norms at one."""
    torch.manual_seed(0)
    block = Block(64, 4, 256)
    bound = math.sqrt(6 / (64 + 64))
    for weight in block.attention_in.weight.detach().chunk(3):
        assert 0.98 * bound < float(weight.abs().max()) * math.sqrt(2) <= bound
    for layer, fans in ((block.attention_out, 128), (block.ffn_in, 320), (block.ffn_out, 320)):
        assert 0.98 < float(layer.weight.detach().abs().max()) / math.sqrt(6 / fans) <= 1.0
    for name, parameter in block.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
    assert (block.attention_norm.weight == 1).all()
    assert block.attention_norm.eps == block.ffn_norm.eps == 1e-5


@pytest.mark.parametrize(
    ("width", "layers", "ffn_dim", "final_norm", "exact"),
    [
        (1024, 16, 4096, False, 201_539_584),
        (1024, 16, 4096, True, 201_541_632),
        (1024, 20, 6144, False, 335_851_520),
        (1536, 24, 8192, False, 831_000_576),
    ],
)
def test_parameters_are_counted_exactly(width: int, layers: int, ffn_dim: int, final_norm: bool, exact: int) -> None:
    """The published models less their ends; 2,048 more with a final norm."""
    with torch.device("meta"):
        encoder = Transformer(width, layers, 16, ffn_dim, final_norm=final_norm)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    assert sum(parameter.numel() for parameter in encoder.parameters()) == exact
    block = 4 * (width**2 + width) + 2 * width * ffn_dim + ffn_dim + width + 4 * width
    assert exact == layers * block + 2 * width * final_norm


def test_narrow_numbers_are_in_the_products_alone() -> None:
    """Under autocast the sums, the norms and what comes out are float32, and the memory holds what was computed."""
    encoder = build().float()
    x_BTD = vectors().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fresh = encoder(x_BTD, {})
        first = encoder(x_BTD[:, :4], encoder.decoding_state(STREAMS))
        second = encoder(x_BTD[:, 4:], first.state)
    assert fresh.output.dtype == torch.float32
    assert {tensor.dtype for tensor in second.state.values()} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat([first.output, second.output], 1), fresh.output, rtol=0.02, atol=0.02)
    exact = copy.deepcopy(encoder).double()(x_BTD.double(), {}).output
    assert 0.0 < float(((fresh.output - exact).norm() / exact.norm()).detach()) < 0.02


def test_it_compiles_whole() -> None:
    encoder = build(layers=1).eval()
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(vectors(), {}).output, encoder(vectors(), {}).output)
    state: State = encoder(vectors(), encoder.decoding_state(STREAMS)).state
    torch.testing.assert_close(compiled(vectors(1), state).output, encoder(vectors(1), state).output)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"layers": 0}, "Transformer: layers = 0: must be at least 1"),
        ({"ffn_dim": 0}, "Transformer: ffn_dim = 0: must be at least 1"),
        ({"heads": 0}, "Transformer: heads = 0: must be at least 1"),
        ({"heads": 3}, "Transformer: heads = 3 does not divide the dimension of the input vectors, 8; use a number"),
        ({"dropout": 1.0}, "Transformer: dropout = 1.0: must be at least 0 and less than 1"),
        ({"dropout_attention": -0.1}, "Transformer: dropout_attention = -0.1: must be at least 0"),
        ({"dropout_relu": float("nan")}, "Transformer: dropout_relu = nan: must be at least 0"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        Transformer(**{"input_dim": WIDTH, **SMALL, **wrong})
