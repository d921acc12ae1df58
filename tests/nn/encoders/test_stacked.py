"""The stacked layers against torch's own, and what is ours: the single bias and the three places of dropout."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.encoders import stacked
from reefknot.nn.encoders.stacked import GRU, LSTM, RNN, Stacked

from .authority import HIDDEN, IN, STREAMS, same_as_torch, vectors

LAYERS = 2


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_values_and_gradients_are_those_of_torch(encoder: type[Stacked], biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    same_as_torch(encoder(IN, HIDDEN, layers=LAYERS, biases=biases).double())


@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_the_state_is_that_of_a_stack_of_torchs(encoder: type[Stacked]) -> None:
    torch.manual_seed(0)
    ours = encoder(IN, HIDDEN, layers=LAYERS, biases=2).double()
    theirs = encoder.cell(IN, HIDDEN, LAYERS, batch_first=True).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            _, layer, weight = name.split(".")
            getattr(theirs, weight.removesuffix("0") + layer).copy_(parameter)
    _, states = theirs(vectors())
    found = ours(vectors(), ours.initial_state(STREAMS)).state
    assert list(found) == (["h", "c"] if encoder is LSTM else ["h"])
    for tensor, expected in zip(found.values(), states if encoder is LSTM else [states], strict=True):
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_counted_exactly(biases: Literal[1, 2], layers: int) -> None:
    encoder = LSTM(IN, HIDDEN, layers=layers, biases=biases)
    gates = 4 * HIDDEN
    matrices = gates * (IN + HIDDEN) + (layers - 1) * gates * 2 * HIDDEN
    assert sum(p.numel() for p in encoder.parameters()) == matrices + layers * biases * gates


def test_the_zero_bias_is_neither_stored_nor_learned() -> None:
    encoder = LSTM(IN, HIDDEN, layers=LAYERS, biases=1)
    assert not any("bias_hh" in name for name in encoder.state_dict())
    assert not any("bias_hh" in name for name, _ in encoder.named_parameters())
    optimiser = torch.optim.SGD(encoder.parameters(), lr=1.0)
    encoder(vectors().float(), encoder.initial_state(3)).output.square().sum().backward()
    optimiser.step()
    buffers = dict(encoder.named_buffers())
    assert len(buffers) == LAYERS
    assert not any(buffer.any() for buffer in buffers.values())


@pytest.mark.parametrize("biases", [1, 2])
def test_copies_and_conversions_compute_the_same(biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    encoder = LSTM(IN, HIDDEN, layers=LAYERS, biases=biases).double()
    x_BTD = vectors()
    expected = encoder(x_BTD, encoder.initial_state(3)).output
    copied = copy.deepcopy(encoder)
    assert torch.equal(copied(x_BTD, copied.initial_state(3)).output, expected)
    rounded = copy.deepcopy(encoder).float()
    found = rounded(x_BTD.float(), rounded.initial_state(3)).output
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    # The copy learns on its own, so its kernel reads its own weights.
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x_BTD, copied.initial_state(3)).output.any()
    assert torch.equal(encoder(x_BTD, encoder.initial_state(3)).output, expected)


def test_loading_reaches_the_kernel() -> None:
    source, target = LSTM(IN, HIDDEN), LSTM(IN, HIDDEN)
    x_BTD = vectors().float()
    target.load_state_dict(source.state_dict())
    outputs = [encoder(x_BTD, encoder.initial_state(3)).output for encoder in (source, target)]
    assert torch.equal(*outputs)


def test_dropout_at_the_output_is_the_difference_to_raw() -> None:
    torch.manual_seed(0)
    encoder = LSTM(IN, 50, layers=1, dropout=0.4)
    found = encoder(torch.randn(20, 30, IN), encoder.initial_state(20))
    dropped = found.output == 0
    assert dropped.float().mean().item() == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(found.output[~dropped], found.raw[~dropped] / 0.6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_gradients_in_evaluation_mode_on_a_gpu(kind: type[Stacked]) -> None:
    """cuDNN gives them in its training mode only."""
    torch.manual_seed(0)
    encoder = kind(IN, HIDDEN).double().cuda().eval()
    found = []
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled):
            state = encoder.initial_state(3, torch.device("cuda"))
            loss = encoder(vectors().cuda(), state).output.square().sum()
            found.append(torch.autograd.grad(loss, list(encoder.parameters())))
    torch.testing.assert_close(*found)


def silent(width: int, layers: int) -> tuple[LSTM, dict[str, torch.nn.Parameter]]:
    """An LSTM that says nothing until one of its weights is set."""
    torch.manual_seed(0)
    encoder = LSTM(width, width, layers=layers, dropout=0.3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    return encoder, dict(encoder.named_parameters())


def test_dropout_at_the_input() -> None:
    """With one layer that copies its input gate's side, a dropped number leaves the unit at zero."""
    width = 40
    encoder, weights = silent(width, layers=1)
    with torch.no_grad():
        # Gates are in the order input, forget, cell, output: the cell's candidate of a unit is its own input.
        weights["layers.0.weight_ih_l0"][2 * width : 3 * width] = torch.eye(width)
    found = encoder(torch.ones(50, 1, width), encoder.initial_state(50))
    assert (found.raw == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (encoder.eval()(torch.ones(50, 1, width), encoder.initial_state(50)).raw != 0).all()


def test_dropout_between_the_layers() -> None:
    width = 40
    encoder, weights = silent(width, layers=2)
    with torch.no_grad():
        # The first layer says the same whatever goes in; the second copies what reaches it.
        weights["layers.0.bias_ih_l0"][2 * width : 3 * width] = 1.0
        weights["layers.1.weight_ih_l0"][2 * width : 3 * width] = torch.eye(width)
    found = encoder(torch.ones(50, 1, width), encoder.initial_state(50))
    assert (found.raw == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (found.state["h"][0] != 0).all()


def test_dropout_is_never_in_time() -> None:
    """The state is carried whole: a unit dropped at the output goes on as it was."""
    torch.manual_seed(0)
    encoder = LSTM(IN, HIDDEN, layers=1, dropout=0.5)
    found = encoder(vectors().float(), encoder.initial_state(3))
    assert torch.equal(found.state["h"][0], found.raw[:, -1])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"biases": 3}, "biases = 3: must be 1 or 2"),
        ({"dropout": 1.5}, "dropout = 1.5: must be at least 0 and less than 1"),
        ({"dropout": float("nan")}, "dropout = nan"),
        ({"layers": 0}, "layers = 0: must be at least 1"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        LSTM(IN, HIDDEN, **wrong)


@pytest.mark.parametrize("biases", [1, 2])
def test_builds_without_memory(biases: Literal[1, 2]) -> None:
    with torch.device("meta"):
        encoder = LSTM(20_000, 20_000, layers=4, biases=biases)
    assert all(p.is_meta for p in encoder.parameters())
    assert sum(p.numel() for p in encoder.parameters()) > 10**10


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_bfloat16_runs_on_a_cpu_without_onednn_support(kind: type[Stacked], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises an error if oneDNN has no kernel for a layer, so the layer must run without oneDNN."""
    enabled_inside = []
    function = torch.lstm if kind is LSTM else torch.gru if kind is GRU else torch.rnn_tanh

    def run(*arguments: Any, **options: Any) -> Any:
        enabled_inside.append(torch._C._get_mkldnn_enabled())
        return function(*arguments, **options)

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setitem(stacked._FUNCTIONS, kind.cell(1, 1).mode, run)
    enabled = torch._C._get_mkldnn_enabled()
    encoder = kind(4, 6, layers=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = encoder(torch.randn(2, 3, 4), encoder.initial_state(2)).output
    output.float().sum().backward()
    assert output.isfinite().all()
    assert enabled_inside == [False]
    assert torch._C._get_mkldnn_enabled() == enabled, "the switch is restored"
