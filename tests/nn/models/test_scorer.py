"""An exported scorer gives the scores of its model, at shapes that the export did not see, and stores weights once."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reefknot as rk
from reefknot.nn.encoders.contract import State
from reefknot.nn.models.language_model import LanguageModel

VOCABULARY, DIM, K = 30, 8, 3
OTHER_SHAPES = [(1, 1), (2, 9), (6, 2)]
"""Streams and steps that differ from the example inputs."""

ENCODERS: dict[str, Any] = {
    "lstm": lambda: rk.LSTM(DIM, DIM),
    "gru": lambda: rk.GRU(DIM, DIM),
    "rnn": lambda: rk.RNN(DIM, DIM),
    "variational_lstm": lambda: rk.VariationalLSTM(DIM, DIM),
    "bayesian_lstm": lambda: rk.BayesianLSTM(DIM, DIM),
    "awd_lstm": lambda: rk.AWDLSTM(DIM, DIM),
    "highway": lambda: rk.RecurrentHighway(DIM, DIM, depth=2),
    "transformer": lambda: rk.Transformer(DIM, layers=2, heads=2, ffn_dim=12, dropout=0.5),
}
OUTPUTS: dict[str, Any] = {
    "plain": lambda words: rk.Softmax(rk.Plain(words)),
    "drill": lambda words: rk.Softmax(rk.Drill(words, depth=2)),
    "dual": lambda words: rk.Softmax(rk.Dual(words, DIM, joint_dim=6)),
    "mixture": lambda words: rk.MixtureOfSoftmaxes(rk.Plain(words), DIM, experts=3),
    "augmented": lambda words: rk.Augmented(rk.Plain(words), words, gamma=0.5),
    "sampled": lambda words: rk.SampledSoftmax(rk.Bilinear(words, DIM), samples=5),
}


def build(encoder: str = "transformer", output: str = "plain") -> LanguageModel:
    torch.manual_seed(0)
    words = rk.WordTable(VOCABULARY, DIM)
    return rk.LanguageModel(rk.Lookup(words), ENCODERS[encoder](), OUTPUTS[output](words)).eval()


def build_adaptive() -> LanguageModel:
    torch.manual_seed(0)
    table = rk.BandedTable(VOCABULARY, DIM, sizes=[6, 10], factor=2)
    projections = rk.BandProjections(table, DIM)
    output = rk.AdaptiveSoftmax(table, projections)
    return rk.LanguageModel(rk.AdaptiveLookup(table, projections), ENCODERS["transformer"](), output).eval()


def build_char_cnn() -> LanguageModel:
    torch.manual_seed(0)
    spellings = rk.spell([f"word{index}" for index in range(VOCABULARY)])
    input_end = rk.CharCNN(spellings, DIM, [[1, 5], [2, 6]], byte_dim=4)
    return rk.LanguageModel(
        input_end, ENCODERS["transformer"](), OUTPUTS["drill"](rk.WordTable(VOCABULARY, DIM))
    ).eval()


def export(scorer: rk.Scorer) -> nn.Module:
    program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
    return program.module()


def random_tokens(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, shape)


def model_log_probs(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    return model.output.log_probs(model(tokens_BT).output.flatten(0, 1)).unflatten(0, tokens_BT.shape)


@torch.no_grad()
def check_targets(model: LanguageModel) -> None:
    exported = export(rk.Scorer(model, "targets"))
    for shape in OTHER_SHAPES:
        tokens_BT, targets_BT = random_tokens((2, *shape))
        targets_BT[0, 0] = -100
        expected, _ = model.target_log_probs(tokens_BT, targets_BT)
        torch.testing.assert_close(exported(tokens_BT, targets_BT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output", list(OUTPUTS))
def test_exported_targets_at_other_shapes(output: str) -> None:
    check_targets(build(output=output))


@pytest.mark.parametrize("build_model", [build_adaptive, build_char_cnn])
def test_exported_targets_of_adaptive_and_spelled_words(build_model: Any) -> None:
    check_targets(build_model())


@pytest.mark.parametrize("build_model", [build, build_adaptive])
@torch.no_grad()
def test_exported_log_probs_and_topk_at_other_shapes(build_model: Any) -> None:
    model = build_model()
    log_probs, topk = export(rk.Scorer(model)), export(rk.Scorer(model, "topk", k=K))
    for shape in OTHER_SHAPES:
        tokens_BT = random_tokens(shape)
        expected_BTV = model_log_probs(model, tokens_BT)
        torch.testing.assert_close(log_probs(tokens_BT), expected_BTV, rtol=1e-5, atol=1e-5)
        best_BTK, ids_BTK = topk(tokens_BT)
        expected_best, expected_ids = expected_BTV.topk(K)
        torch.testing.assert_close(best_BTK, expected_best, rtol=1e-5, atol=1e-5)
        assert torch.equal(ids_BTK, expected_ids)


@pytest.mark.parametrize("encoder", list(ENCODERS))
@torch.no_grad()
def test_exported_steps_equal_a_window(encoder: str) -> None:
    """Steps from the empty state, with other numbers of streams, give the log-probabilities of a window."""
    model = build(encoder)
    scorer = rk.Scorer(model, "step")
    exported = export(scorer)
    for streams in (1, 4):
        tokens_BT = random_tokens((streams, 4))
        state: State = scorer.initial_state(streams)
        steps = []
        for tokens_B in tokens_BT.unbind(1):
            log_probs_BV, state = exported(tokens_B, state)
            steps.append(log_probs_BV)
        torch.testing.assert_close(torch.stack(steps, 1), model_log_probs(model, tokens_BT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoder", ["lstm", "highway"])
@torch.no_grad()
def test_window_of_a_recurrent_model_has_any_number_of_streams(encoder: str) -> None:
    model = build(encoder)
    scorer = rk.Scorer(model)
    program = torch.export.export(scorer, scorer.example_inputs(steps=4), dynamic_shapes=scorer.dynamic_shapes())
    for streams in (1, 5):
        tokens_BT = random_tokens((streams, 4))
        expected = model_log_probs(model, tokens_BT)
        torch.testing.assert_close(program.module()(tokens_BT), expected, rtol=1e-5, atol=1e-5)


def test_exported_program_needs_only_torch_operators() -> None:
    for kind in ("targets", "topk"):
        scorer = rk.Scorer(build_adaptive(), kind)
        program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
        assert "reefknot" not in program.graph_module.code


@pytest.mark.parametrize("output", ["plain", "drill", "dual"])
@pytest.mark.parametrize("encoder", ["lstm", "transformer"])
def test_every_number_is_stored_once(encoder: str, output: str) -> None:
    model = build(encoder, output)
    table = VOCABULARY * DIM
    encoder_numbers = sum(parameter.numel() for parameter in model.encoder.parameters())
    class_numbers = {
        "plain": VOCABULARY,  # the biases; the table is tied
        "drill": VOCABULARY * DIM + VOCABULARY,
        "dual": VOCABULARY * 6 + VOCABULARY + 6 * DIM + 6,  # class vectors, biases and the map of the hidden state
    }
    stored = sum(tensor.numel() for tensor in dict.fromkeys(rk.Scorer(model).state_dict(keep_vars=True).values()))
    assert stored == table + encoder_numbers + class_numbers[output]


def test_weights_are_shared_and_the_model_is_unchanged() -> None:
    model = build("lstm", "drill").train()
    expected = copy.deepcopy(model.state_dict())
    scorer = rk.Scorer(model).train()
    assert model.training
    assert not any(module.training for module in scorer.modules())
    assert model.state_dict().keys() == expected.keys()
    parameter_ids = {id(parameter) for parameter in scorer.parameters()}
    assert {id(parameter) for parameter in model.encoder.parameters()} <= parameter_ids
    assert id(model.input.tables()[0].weight) in parameter_ids


@torch.no_grad()
def test_scorer_works_without_export() -> None:
    for model in (build("lstm", "drill"), build("transformer", "dual"), build_adaptive(), build_char_cnn()):
        tokens_BT = random_tokens((2, 4))
        expected_BTV = model_log_probs(model, tokens_BT)
        torch.testing.assert_close(rk.Scorer(model)(tokens_BT), expected_BTV)
        best_BTK, ids_BTK = rk.Scorer(model, "topk", k=K)(tokens_BT)
        torch.testing.assert_close(best_BTK, expected_BTV.gather(-1, ids_BTK))
        target_log_probs_BT = rk.Scorer(model, "targets")(tokens_BT, tokens_BT)
        torch.testing.assert_close(target_log_probs_BT, expected_BTV.gather(-1, tokens_BT[..., None])[..., 0])


def test_mistakes_are_explained() -> None:
    with pytest.raises(rk.SettingsError, match="kind = 'best': must be one of log_probs, targets, topk, step"):
        rk.Scorer(build(), "best")  # type: ignore[arg-type]
    with pytest.raises(rk.SettingsError, match="k = 31"):
        rk.Scorer(build(), "topk", k=31)


def test_saved_program_runs_without_reefknot(tmp_path: Path) -> None:
    scorer = rk.Scorer(build_adaptive(), "targets")
    program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
    torch.export.save(program, tmp_path / "scorer.pt2")
    script = (
        "import sys, torch\n"
        "sys.modules['reefknot'] = None\n"  # importing it would fail
        "program = torch.export.load(sys.argv[1]).module()\n"
        "print(program(torch.tensor([[1, 2]]), torch.tensor([[2, 29]])).tolist())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "scorer.pt2")]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    expected = scorer(torch.tensor([[1, 2]]), torch.tensor([[2, 29]]))
    torch.testing.assert_close(torch.tensor(json.loads(completed.stdout)), expected.detach(), rtol=1e-5, atol=1e-5)
