"""The Transformer equals torch's layers, its positions a formula, and reading with a KV cache reading at once.

Shapes: B streams, T steps, D dimensions.
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

STREAMS, STEPS, DIM, HEADS, UNITS = 3, 7, 8, 2, 20
SMALL: dict[str, Any] = {"layers": 3, "heads": HEADS, "ffn_dim": UNITS}


def build(**options: Any) -> Transformer:
    """Build a float64 encoder with noise added to every parameter, so that no bias is 0 and no norm is 1."""
    torch.manual_seed(0)
    encoder = Transformer(DIM, **SMALL | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def vectors(steps: int = STEPS) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STREAMS, steps, DIM, dtype=torch.float64)


def torch_layer(block: Block) -> nn.TransformerEncoderLayer:
    """Return torch's layer with the parameters of a block."""
    layer = nn.TransformerEncoderLayer(
        DIM, HEADS, UNITS, dropout=0.0, activation="relu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_": "attention_in.",
        "self_attn.out_proj.": "attention_out.",
        "linear1.": "ffn_in.",
        "linear2.": "ffn_out.",
        "norm1.": "attention_norm.",
        "norm2.": "ffn_norm.",
    }
    parameters = dict(block.named_parameters())
    assert len(parameters) == 2 * len(names)
    for torch_name, name in names.items():
        for kind in ("weight", "bias"):
            module, _, attribute = f"{torch_name}{kind}".rpartition(".")
            setattr(layer.get_submodule(module), attribute, parameters[f"{name}{kind}"])
    return layer


def causal_mask(steps: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(steps, dtype=torch.float64)


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of the outputs."""
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def test_block_equals_torch_encoder_layer() -> None:
    block = build().blocks[0]
    inputs_BTD = vectors().requires_grad_()
    inputs = [inputs_BTD, *block.parameters()]
    actual = block(inputs_BTD)[0]
    expected = torch_layer(block)(inputs_BTD, src_mask=causal_mask(STEPS), is_causal=True)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("final_norm", [False, True])
def test_stack_equals_torch_encoder_layers(final_norm: bool) -> None:
    encoder = build(final_norm=final_norm)
    inputs_BTD = vectors().requires_grad_()
    expected = inputs_BTD + sinusoids(0, STEPS, DIM, inputs_BTD.device)
    for block in encoder.blocks:
        expected = torch_layer(block)(expected, src_mask=causal_mask(STEPS), is_causal=True)
    if encoder.final_norm is not None:
        expected = F.layer_norm(expected, (DIM,), encoder.final_norm.weight, encoder.final_norm.bias, 1e-5)
    encoded = encoder(inputs_BTD, {})
    inputs = [inputs_BTD, *encoder.parameters()]
    torch.testing.assert_close(encoded.output, expected)
    torch.testing.assert_close(gradients(encoded.output, inputs), gradients(expected, inputs))
    assert encoded.raw is encoded.output
    assert encoded.state == {}


def test_positions_are_sines_then_cosines() -> None:
    actual = sinusoids(3, 7, 10, torch.device("cpu"))
    assert actual.shape == (4, 10)
    for row, position in enumerate((5, 6, 7, 8)):  # the first position has number 2
        for column in range(5):
            angle = position * math.exp(-column * math.log(10_000) / 4)
            assert float(actual[row, column]) == pytest.approx(math.sin(angle))
            assert float(actual[row, 5 + column]) == pytest.approx(math.cos(angle))
    assert torch.equal(sinusoids(0, 9, 10, torch.device("cpu"))[3:7], actual)


@pytest.mark.parametrize("dim", [1, 2, 3, 7])
def test_positions_of_small_and_odd_dimensions_are_finite(dim: int) -> None:
    positions = sinusoids(0, 5, dim, torch.device("cpu"))
    assert positions.shape == (5, dim)
    assert positions.isfinite().all()
    assert dim % 2 == 0 or not positions[:, -1].any()
    assert Transformer(dim, layers=1, heads=1, ffn_dim=4)(torch.zeros(1, 5, dim), {}).output.isfinite().all()


def test_positions_are_not_in_the_state_dict() -> None:
    encoder = build()
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert not list(encoder.buffers())
    assert encoder(vectors(50), {}).output.shape == (STREAMS, 50, DIM)


def test_positions_are_computed_once_per_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are computed for a power of two of steps, and again only if a longer window comes."""
    ranges = []
    monkeypatch.setattr(
        transformer, "sinusoids", lambda *arguments: ranges.append(arguments[:2]) or sinusoids(*arguments)
    )
    encoder = build()
    for steps in (5, 7, 8, 6, 9, 16, 8):
        output, shorter = (encoder(vectors(16)[:, :stop], {}).output for stop in (steps, 5))
        torch.testing.assert_close(output[:, :5], shorter)
    state = encoder.decoding_state(STREAMS)
    for step in range(12):
        state = encoder(vectors(16)[:, step, None], state).state
    assert ranges == [(0, 8), (0, 16), (0, 1), (0, 2), (0, 4)]


def test_cached_positions_follow_copies_types_and_devices() -> None:
    """A copied, converted or moved model gives the same outputs as a model that has not cached any positions."""
    encoder = build()
    expected = encoder(vectors(), {}).output
    copied = copy.deepcopy(encoder)
    assert torch.equal(copied(vectors(), {}).output, expected)
    rounded = encoder.float()(vectors().float(), {}).output
    assert torch.equal(rounded, build().float()(vectors().float(), {}).output)
    assert torch.equal(copied(vectors(), {}).output, expected), "converting the original does not change the copy"
    assert copied.to("meta")(vectors().to("meta"), {}).output.is_meta


def test_positions_cached_in_inference_mode_work_in_training() -> None:
    encoder = build()
    with torch.inference_mode():
        expected = encoder(vectors(), {}).output.clone()
    actual = encoder(vectors(), {}).output
    torch.testing.assert_close(actual, expected)
    assert all(gradient.isfinite().all() for gradient in gradients(actual, list(encoder.parameters())))


@pytest.mark.parametrize("step", range(STEPS))
def test_later_token_does_not_change_earlier_outputs(step: int) -> None:
    encoder = build()
    changed = vectors()
    changed[:, step, 0] += 1.0
    before, after = encoder(vectors(), {}).output, encoder(changed, {}).output
    assert torch.equal(before[:, :step], after[:, :step])
    assert ((before[:, step:] - after[:, step:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("lengths", [[7], [1] * 7, [3, 4], [4, 1, 2], [1, 5, 1], [0, 2, 5]])
def test_kv_cache_equals_one_window_for_any_split(lengths: list[int]) -> None:
    encoder = build(final_norm=True)
    whole = encoder(vectors(), {}).output
    state, read = encoder.decoding_state(STREAMS), 0
    outputs = []
    for part in vectors().split(lengths, dim=1):
        encoded = encoder(part, state)
        state, read = encoded.state, read + part.shape[1]
        outputs.append(encoded.output)
        assert list(state) == ["block.0", "block.1", "block.2"]
        assert all(tensor.shape == (2, STREAMS, HEADS, read, DIM // HEADS) for tensor in state.values())
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)


def test_gradients_flow_through_the_kv_cache() -> None:
    encoder = build()
    inputs_BTD = vectors().requires_grad_()
    inputs = [inputs_BTD, *encoder.parameters()]
    first = encoder(inputs_BTD[:, :4], encoder.decoding_state(STREAMS))
    second = encoder(inputs_BTD[:, 4:], first.state)
    parts = torch.cat([first.output, second.output], dim=1)
    torch.testing.assert_close(gradients(parts, inputs), gradients(encoder(inputs_BTD, {}).output, inputs))


def test_state_is_not_carried_between_windows() -> None:
    encoder = build()
    assert not encoder.carries_state
    assert encoder.initial_state(STREAMS) == encoder(vectors(), {}).state == {}


@pytest.mark.parametrize("training", [True, False])
def test_recomputing_gives_bitwise_equal_results(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"dropout": 0.3, "dropout_attention": 0.2, "dropout_relu": 0.4}
    plain, recomputing = (build(**rates, recompute=recompute).train(training) for recompute in (False, True))
    results = []
    call_counts = []
    for encoder in (plain, recomputing):
        attend, calls = Block._self_attention, []
        monkeypatch.setattr(
            Block, "_self_attention", lambda *arguments, a=attend, c=calls: c.append(1) or a(*arguments)
        )
        inputs_BTD = vectors().requires_grad_()
        torch.manual_seed(3)
        output = encoder(inputs_BTD, {}).output
        after = torch.rand(1)  # recomputing must not advance the generator
        results.append((output, after, *gradients(output, [inputs_BTD, *encoder.parameters()])))
        call_counts.append(len(calls))
        monkeypatch.undo()
    assert all(torch.equal(value, recomputed) for value, recomputed in zip(*results, strict=True))
    assert call_counts == [3, 6]
    assert (plain.synchronizes, recomputing.synchronizes) == (False, True)
    with torch.no_grad():
        torch.testing.assert_close(recomputing.eval()(vectors(), {}).output, plain.eval()(vectors(), {}).output)


def transformer_equations(encoder: Transformer, inputs_BTD: Tensor) -> Tensor:
    """Compute the blocks from their equations, with dropout in the same order as in the encoder.

    Dropout acts on the input, then in every block on the attention weights, on the output of attention, on the hidden
    units and on the output of the feed-forward network.
    """
    inputs_BTD = F.dropout(
        inputs_BTD + sinusoids(0, inputs_BTD.shape[1], DIM, inputs_BTD.device), encoder.dropout, encoder.training
    )
    block: Any
    for block in encoder.blocks:
        attention_rate = block.dropout_attention
        normed = F.layer_norm(inputs_BTD, (DIM,), block.attention_norm.weight, block.attention_norm.bias)
        projected = []
        for weight, bias in zip(block.attention_in.weight.chunk(3), block.attention_in.bias.chunk(3), strict=True):
            projected.append((normed @ weight.T + bias).view(*normed.shape[:2], HEADS, -1).transpose(1, 2))
        queries, keys, values = projected
        scores = queries @ keys.mT / math.sqrt(DIM // HEADS) + causal_mask(inputs_BTD.shape[1])
        weights = F.dropout(scores.softmax(-1), attention_rate, encoder.training)
        attended = (weights @ values).transpose(1, 2).flatten(2)
        attended = attended @ block.attention_out.weight.T + block.attention_out.bias
        inputs_BTD = inputs_BTD + F.dropout(attended, encoder.dropout, encoder.training)
        normed = F.layer_norm(inputs_BTD, (DIM,), block.ffn_norm.weight, block.ffn_norm.bias)
        units = F.dropout(block.ffn_in(normed).relu(), block.dropout_relu, encoder.training)
        inputs_BTD = inputs_BTD + F.dropout(block.ffn_out(units), encoder.dropout, encoder.training)
    return inputs_BTD


@pytest.mark.parametrize("rates", [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5), (0.3, 0.2, 0.4)])
def test_every_dropout_rate_acts_as_in_the_equations(rates: tuple[float, float, float]) -> None:
    names = ("dropout", "dropout_attention", "dropout_relu")
    encoder = build(**dict(zip(names, rates, strict=True)))
    torch.manual_seed(5)
    actual = encoder(vectors(), {}).output
    torch.manual_seed(5)
    torch.testing.assert_close(actual, transformer_equations(encoder, vectors()))
    assert not torch.allclose(actual, encoder.eval()(vectors(), {}).output)
    torch.testing.assert_close(encoder(vectors(), {}).output, transformer_equations(encoder, vectors()))


def test_initial_weights_are_xavier_uniform() -> None:
    """Queries, keys and values are initialised as separate matrices, biases as zeros and norms as ones."""
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
    ("dim", "layers", "ffn_dim", "final_norm", "count"),
    [
        (1024, 16, 4096, False, 201_539_584),
        (1024, 16, 4096, True, 201_541_632),
        (1024, 20, 6144, False, 335_851_520),
        (1536, 24, 8192, False, 831_000_576),
    ],
)
def test_parameter_counts_of_published_models(
    dim: int, layers: int, ffn_dim: int, final_norm: bool, count: int
) -> None:
    """The published models without input and output ends; a final norm adds 2,048."""
    with torch.device("meta"):
        encoder = Transformer(dim, layers, 16, ffn_dim, final_norm=final_norm)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count
    block = 4 * (dim**2 + dim) + 2 * dim * ffn_dim + ffn_dim + dim + 4 * dim
    assert count == layers * block + 2 * dim * final_norm


def test_autocast_keeps_outputs_in_float32() -> None:
    """Under autocast the output is float32 and the KV cache is bfloat16."""
    encoder = build().float()
    inputs_BTD = vectors().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = encoder(inputs_BTD, {})
        first = encoder(inputs_BTD[:, :4], encoder.decoding_state(STREAMS))
        second = encoder(inputs_BTD[:, 4:], first.state)
    assert whole.output.dtype == torch.float32
    assert {tensor.dtype for tensor in second.state.values()} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat([first.output, second.output], 1), whole.output, rtol=0.02, atol=0.02)
    exact = copy.deepcopy(encoder).double()(inputs_BTD.double(), {}).output
    assert 0.0 < float(((whole.output - exact).norm() / exact.norm()).detach()) < 0.02


def test_compiles_without_graph_breaks() -> None:
    encoder = build(layers=1).eval()
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(vectors(), {}).output, encoder(vectors(), {}).output)
    state: State = encoder(vectors(), encoder.decoding_state(STREAMS)).state
    torch.testing.assert_close(compiled(vectors(1), state).output, encoder(vectors(1), state).output)


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Transformer(**{"input_dim": DIM, **SMALL, **arguments})
