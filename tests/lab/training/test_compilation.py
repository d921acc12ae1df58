"""Compiled blocks give the losses of blocks that are not compiled, and runs with them resume bit for bit.

All tests train the same small transformer, so torch compiles it once and then reads its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.errors import SettingsError, Stopped
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training import compilation
from reefknot.lab.training.compilation import CompiledBlocks
from reefknot.lab.training.distributed import World
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

TRANSFORMER = 'encoder={kind = "transformer", layers = 2, heads = 2, ffn_dim = 12, dropout = 0.3, dropout_relu = 0.2}'
COMPILED = "training.compile=true"
BATCH, STEPS = 4, 5


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Let `torch.compile` record its graphs and run them as they are, for tests of everything but the kernels."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr("torch.compile", lambda function, **options: original(function, backend=backend, **options))
    return graphs


def settings(**changes: Any) -> TrainingSettings:
    base = {
        "epochs": 1,
        "batching": "blocks",
        "batch": BATCH,
        "steps": STEPS,
        "optimiser": {"kind": "sgd", "learning_rate": 1.0},
        "schedule": {"kind": "constant"},
        "compile": True,
    }
    return TrainingSettings.model_validate(base | changes)


def model(dropout: float = 0.0, layers: int = 2, recompute: bool = False) -> LanguageModel:
    torch.manual_seed(1)
    table = WordTable(11, 8)
    encoder = Transformer(8, layers=layers, heads=2, ffn_dim=12, dropout=dropout, recompute=recompute)
    return LanguageModel(Lookup(table), encoder, Softmax(Plain(table))).train()


def losses_and_gradients(trained: LanguageModel, blocks: CompiledBlocks, batch: int = BATCH) -> list[torch.Tensor]:
    """Return the loss of a micro-batch and the gradients of all parameters."""
    tokens = torch.arange(batch * (STEPS + 1)).view(batch, -1) % 11
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with blocks.use(inputs.shape):
        loss = trained.loss(inputs, targets).mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(trained.parameters()))]


@pytest.mark.slow
def test_compiled_blocks_equal_eager_blocks() -> None:
    trained = model()
    names = list(trained.state_dict())
    compiled = CompiledBlocks(trained, settings(), World())
    assert compiled.message.startswith("compiled the blocks of the encoder in ")
    eager = CompiledBlocks(trained, settings(compile=False), World())
    assert (eager.message, eager.seconds) == ("", None)
    for actual, expected in zip(
        losses_and_gradients(trained, compiled), losses_and_gradients(trained, eager), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert list(trained.state_dict()) == names
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_masks_are_a_function_of_the_generator_state() -> None:
    trained = model(dropout=0.5)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        blocks = CompiledBlocks(trained, settings(), World())  # compiling draws no random numbers
        results.append([losses_and_gradients(trained, blocks)[0] for _ in range(2)])
    assert results[0] == results[1]
    assert results[0][0] != results[0][1], "every window has other masks"


@pytest.mark.slow
def test_compiled_run_resumes_bit_for_bit(
    tmp_path: Path, train: Any, outcome: Any, signal_in_step: Callable[[int], None]
) -> None:
    """The tiny recipe reads streams here. Its last window is shorter and is not compiled."""
    overrides = (TRANSFORMER, "training.divisor=tokens")
    train(tmp_path / "eager", *overrides)
    train(tmp_path / "whole", *overrides, COMPILED)
    whole = outcome(tmp_path / "whole")
    assert whole["metrics"] != outcome(tmp_path / "eager")["metrics"], "compiled dropout has other masks"
    assert "compiled the blocks of the encoder in" in (tmp_path / "whole" / "log.txt").read_text()
    for step in (6, 2):
        signal_in_step(step)
        with pytest.raises(Stopped):
            train(tmp_path / "cut", *overrides, COMPILED)
    signal_in_step(0)
    train(tmp_path / "cut", *overrides, COMPILED)
    assert {**outcome(tmp_path / "cut"), "weights": None} == {**whole, "weights": None}


def test_one_compilation_serves_all_blocks_and_windows(quick_compiler: list[torch.fx.GraphModule]) -> None:
    trained = model(layers=3)
    blocks = CompiledBlocks(trained, settings(batch=2 * BATCH, accumulate=2), World())
    assert len(quick_compiler) == 1
    losses_and_gradients(trained, blocks)
    losses_and_gradients(trained, blocks, batch=BATCH - 1)  # not a complete micro-batch, so not compiled
    with torch.no_grad():
        trained.eval()(torch.zeros(BATCH, STEPS, dtype=torch.int64))
    assert len(quick_compiler) == 1
    assert all("forward" not in vars(block) for block in trained.encoder.blocks)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("build", "changes", "world", "reason"),
    [
        (lambda: model(recompute=True), {}, World(), "encoder.recompute = true"),
        (model, {"batching": "sentences"}, World(), "the training windows have different shapes"),
        (model, {}, World(size=2), "several processes train together"),
        (
            lambda: LanguageModel(Lookup(table := WordTable(11, 8)), LSTM(8, 8), Softmax(Plain(table))),
            {},
            World(),
            "the encoder LSTM does not consist of transformer blocks",
        ),
    ],
)
def test_obstacle_is_reported(build: Callable[[], LanguageModel], changes: Any, world: World, reason: str) -> None:
    blocks = CompiledBlocks(build(), settings(**changes), world)
    assert (blocks.message, blocks.seconds) == (f"the blocks are not compiled: {reason}", None)


def test_setting_without_effect_is_displayed(tmp_path: Path, train: Any, display: Any) -> None:
    train(tmp_path / "run", COMPILED)
    reason = "the blocks are not compiled: the encoder LSTM does not consist of transformer blocks"
    assert f"training.compile has no effect: {reason}" in display.lines


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {"precision": "bfloat16"}, True),
        ("cuda", {"precision": "bfloat16", "determinism": "fast"}, True),
        ("cuda", {"precision": "bfloat16", "determinism": "exact"}, False),
        ("cuda", {"precision": "bfloat16", "compile": False}, False),
        ("cuda", {}, False),
        ("cuda", {"compile": True}, True),
        ("cpu", {"precision": "bfloat16"}, False),
    ],
)
def test_default_depends_on_device_precision_and_determinism(device: str, changes: Any, expected: bool) -> None:
    world = World(device=torch.device(device))
    assert compilation._is_requested(settings(**{"compile": None} | changes), world) is expected


def test_exact_determinism_rejects_compilation(tiny_recipe: Callable[..., Path]) -> None:
    with pytest.raises(SettingsError, match=r'compile = true: .* determinism = "exact" promises equal bits'):
        load_recipe(str(tiny_recipe()), (COMPILED, "training.determinism=exact"))


def test_failing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no C++ compiler\nand a long explanation")

    monkeypatch.setattr(CompiledBlocks, "_run_once", fail)
    with pytest.raises(
        SettingsError, match=r"failed .* \(RuntimeError: no C\+\+ compiler\); use training.compile=false"
    ):
        CompiledBlocks(model(), settings(), World())
    monkeypatch.setattr(compilation, "_is_requested", lambda *arguments: True)
    blocks = CompiledBlocks(model(), settings(compile=None), World())
    assert blocks.message == "the blocks are not compiled: torch.compile failed (RuntimeError: no C++ compiler)"
    assert losses_and_gradients(model(), blocks)
