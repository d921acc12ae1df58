"""Whole training steps: modes, shares, ratios, and notes on rows that were not measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from reefknot.kernels.choice import current_choice
from reefknot.kernels.scores import IGNORE
from reefknot.lab.bench import steps
from reefknot.lab.bench.plain_ends import MaskedLookup, StoredAdaptive
from reefknot.lab.bench.steps import (
    CAPTURED,
    COMPILED,
    EAGER,
    LOOP,
    STORED,
    Job,
    LoopedEncoder,
    ModeMeasurement,
    Text,
    Workload,
    measure_all,
)
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.encoders.variational_lstm import VariationalLSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

TRAINING = {
    "epochs": 1,
    "batch": 4,
    "steps": 6,
    "clip": 1.0,
    "optimiser": {"kind": "sgd", "learning_rate": 1.0},
    "schedule": {"kind": "constant"},
}
TEXT = Text.random(30, 2_000, "ptb")
RATES = {"float32": 1e12}


def _model() -> LanguageModel:
    table = WordTable(30, 8)
    return LanguageModel(Lookup(table), VariationalLSTM(8, 8, dropout=0.5), Softmax(Plain(table)))


def _attention() -> LanguageModel:
    table = BandedTable(30, 8, sizes=[5, 10], factor=2)
    bands = BandProjections(table, 8)
    encoder = Transformer(8, layers=1, heads=2, ffn_dim=8, dropout=0.5)
    return LanguageModel(AdaptiveLookup(table, bands), encoder, AdaptiveSoftmax(table, bands))


def _job(name: str = "tied", build: Callable[[], LanguageModel] = _model, **changes: object) -> Job:
    settings = TrainingSettings.model_validate(TRAINING | changes)
    return Job(name, settings, build, TEXT, carries_state=build is not _attention)


def _run(*jobs: Job) -> list[ModeMeasurement]:
    messages: list[str] = []
    rows_measured = [row for rows in measure_all(jobs, "cpu", RATES, 0.0, messages.append) for row in rows]
    assert sum(line.startswith("  ") for line in messages) == len(rows_measured)
    return rows_measured


def test_every_column_is_measured() -> None:
    rows = _run(_job("one"), _job("two"))
    assert [(row.row, row.mode) for row in rows] == [("one", LOOP), ("one", EAGER), ("two", LOOP), ("two", EAGER)]
    for row in rows:
        record = json.loads(json.dumps(row.record(), allow_nan=False))
        assert [name for name, value in record.items() if value is None] == ["memory_bytes", "over_compiled"], (
            "only a GPU reports memory, and only self-attention on a GPU is compared with compiled torch"
        )
        assert row.note == ""
        assert row.ms is not None
        assert row.tokens_per_second == pytest.approx(4 * 6 / (1e-3 * row.ms))
        assert row.epoch_seconds == pytest.approx(2_000 / (4 * 6 / (1e-3 * row.ms)))
        assert row.flops == pytest.approx(_operations(Workload(_job(), EAGER, "cpu")) / (1e-3 * row.ms))
        assert row.matrix_share == pytest.approx(row.flops / 1e12)
        assert all(record[f"{part}_share"] > 0 for part in ("input", "encoder", "output"))
        assert record["ends_share"] == pytest.approx(record["input_share"] + record["output_share"])
    assert rows[0].over_baseline == rows[0].over_first == rows[1].over_first == 1.0
    assert rows[3].over_first == pytest.approx(rows[3].epoch_seconds / rows[1].epoch_seconds)  # type: ignore[operator]
    assert rows[3].over_baseline == pytest.approx(rows[3].epoch_seconds / rows[2].epoch_seconds)  # type: ignore[operator]


def test_row_is_compared_with_the_first_row_of_its_corpus() -> None:
    other = replace(_job("other"), text=Text.random(30, 4_000, "wikitext-2"))
    rows = _run(_job("one"), other, _job("two"))
    first_ptb, wikitext, second_ptb = rows[1::2]
    assert (first_ptb.over_first, wikitext.over_first) == (1.0, 1.0)
    assert second_ptb.over_first == pytest.approx(second_ptb.epoch_seconds / first_ptb.epoch_seconds)  # type: ignore[operator]


def _operations(workload: Workload) -> float:
    """Return the mean number of operations per step."""
    return sum(workload.model.flops(inputs_BT, targets_BT) for inputs_BT, targets_BT, _ in workload.windows) / len(
        workload.windows
    )


def test_transformer_is_compared_with_stored_logits() -> None:
    job = _job("adaptive", _attention, batching="blocks", accumulate=2)
    assert job.modes("cuda") == [STORED, COMPILED, EAGER, CAPTURED]
    assert _job().modes("cuda") == [LOOP, EAGER, CAPTURED]
    stored, eager = _run(job)
    assert (stored.mode, stored.note, eager.mode, eager.note) == (STORED, "", EAGER, "")
    assert (stored.batching, stored.accumulate) == ("blocks", 2)
    assert eager.over_baseline == pytest.approx(eager.epoch_seconds / stored.epoch_seconds)  # type: ignore[operator]
    workload = Workload(job, STORED, "cpu")
    assert isinstance(workload.model.input, MaskedLookup)
    assert isinstance(workload.model.output, StoredAdaptive)
    assert workload.operations == Workload(job, EAGER, "cpu").operations, "the minimum does not depend on the mode"


def test_stored_logits_give_equal_losses_and_gradients() -> None:
    reports = []
    for mode in (STORED, EAGER):
        workload = Workload(_job("adaptive", _attention, batching="sentences", accumulate=2), mode, "cpu")
        torch.manual_seed(3)
        workload.run()
        reports.append(workload.update.stats.report())
    assert reports[0].sums["nll"] == pytest.approx(reports[1].sums["nll"])
    assert reports[0].gradient_norm == pytest.approx(reports[1].gradient_norm, rel=1e-4)


@pytest.mark.parametrize("batching", ["blocks", "streams"])
def test_compiled_torch_gives_equal_losses_and_gradients(monkeypatch: pytest.MonkeyPatch, batching: str) -> None:
    """Kernels are not compiled here, which takes long, but the graphs are traced."""
    original = torch.compile
    monkeypatch.setattr("torch.compile", lambda function, **options: original(function, backend="aot_eager", **options))
    reports = []
    for mode in (STORED, COMPILED):
        workload = Workload(_job("adaptive", _attention, batching=batching, accumulate=2), mode, "cpu")
        torch.manual_seed(3)
        workload.run()
        reports.append(workload.update.stats.report())
    torch.compiler.reset()
    assert reports[0].sums["nll"] == pytest.approx(reports[1].sums["nll"])
    assert reports[0].gradient_norm == pytest.approx(reports[1].gradient_norm, rel=1e-4)


def test_rows_are_compared_with_compiled_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "modes", lambda self, device: [STORED, COMPILED, EAGER])
    monkeypatch.setattr(steps, "compile_plain_model", lambda model: None)
    stored, compiled, eager = _run(_job("adaptive", _attention, batching="blocks"))
    assert compiled.over_compiled == 1.0
    assert eager.over_compiled == pytest.approx(eager.epoch_seconds / compiled.epoch_seconds)  # type: ignore[operator]
    assert stored.over_baseline == 1.0


def test_only_the_captured_mode_compiles_blocks() -> None:
    job = _job("adaptive", _attention, batching="blocks", compile=True)
    assert [Workload(job, mode, "cpu").settings.compile for mode in (STORED, EAGER)] == [False, False]


def test_uncapturable_step_is_noted() -> None:
    row = steps._measure_mode(_job(), CAPTURED, "cpu", None, 0.0, lambda line: None)
    assert (row.ms, row.note) == (
        None,
        "a part of the model reads a number back from the device, so a step cannot be captured",
    )


def test_failing_row_is_noted_and_others_are_measured() -> None:
    def fail() -> LanguageModel:
        raise RuntimeError("CUDA out of memory. Tried to allocate 58 GiB")

    rows = _run(_job("large", fail), _job("small"))
    assert [row.note for row in rows] == ["out of memory"] * 2 + [""] * 2
    assert rows[0].ms is None
    assert all(row.over_first is None for row in rows), "there is no first row to compare with"
    assert rows[3].over_baseline is not None


def test_time_is_kept_if_the_shares_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workload, "build_part_steps", lambda self: 1 / 0)
    row, *_ = _run(_job())
    assert row.ms is not None
    assert row.encoder_share is None
    assert row.note == "ZeroDivisionError: division by zero"


def test_workload_trains_on_every_window_then_restores_weights() -> None:
    workload = Workload(_job(averaging={"start": "at_once"}), EAGER, "cpu")
    before = [parameter.clone() for parameter in workload.model.parameters()]
    workload.run()
    assert workload.model.training
    assert workload.tokens == len(workload.windows) * 4 * 6
    report = workload.update.stats.report()
    assert report.sums["nll"] > 0
    assert report.gradient_norm > 0
    averages = workload.update.state.averages
    assert averages is not None
    assert int(averages.count) == len(workload.windows)
    assert all(torch.equal(then, now) for then, now in zip(before, workload.model.parameters(), strict=True))


def test_windows_have_random_lengths_if_the_row_has() -> None:
    workload = Workload(_job(steps=20, random_steps={"deviation": 4.0}), EAGER, "cpu")
    lengths = {inputs_BT.shape[1] for inputs_BT, *_ in workload.windows}
    assert len(lengths) > 1
    assert workload.tokens == sum(4 * inputs_BT.shape[1] for inputs_BT, *_ in workload.windows)


def test_parts_are_measured_on_one_micro_batch() -> None:
    workload = Workload(_job(accumulate=2), EAGER, "cpu")
    assert workload.micro_batch.inputs.shape == (2, 6)
    source, encoder, end = workload.build_part_steps()
    assert source.leaves == list(workload.model.input.parameters())
    assert encoder.leaves[0].shape == (2, 6, 8)
    assert end.leaves[0].shape == (12, 8)
    for part in (source, encoder, end):
        part.run()
        assert all(leaf.grad is not None for leaf in part.leaves)
        part.zero_grad()


@pytest.mark.parametrize("batching", ["blocks", "sentences"])
def test_tokens_of_samples_exclude_padding(batching: str) -> None:
    workload = Workload(_job(batching=batching, accumulate=3, steps=90), EAGER, "cpu")
    workload.run()
    targets = [int((targets_BT != IGNORE).sum()) for _, targets_BT, _ in workload.windows]
    assert workload.tokens == workload.update.stats.report().tokens == sum(targets)
    *_, end = workload.build_part_steps()
    reached = (
        workload.micro_batch.targets.numel()
        if workload.micro_batch.positions is None
        else len(workload.micro_batch.positions)
    )
    assert end.leaves[0].shape == (reached, 8)
    assert 0 < workload.micro_batch.plan.count <= reached < targets[0]
    (row,) = _run(_job(batching=batching, steps=90))[1:]
    assert (row.note, row.ends_share is None) == ("", False)


def test_loop_mode_affects_only_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Workload(_job(), LOOP, "cpu").model
    assert isinstance(model.encoder, LoopedEncoder)
    impls: list[str] = []

    def recording(call: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object) -> object:
            impls.append(current_choice().impl)
            return call(*args)

        return record

    monkeypatch.setattr(model.encoder.encoder, "forward", recording(model.encoder.encoder.forward))
    monkeypatch.setattr(model.output, "loss", recording(model.output.loss))
    model.loss(torch.zeros(4, 6, dtype=torch.long))
    assert impls == ["reference", "auto"]


def test_loop_mode_gives_equal_losses_and_gradients() -> None:
    workloads = [Workload(_job(), mode, "cpu") for mode in (LOOP, EAGER)]
    reports = []
    for workload in workloads:
        torch.manual_seed(3)
        workload.run()
        reports.append(workload.update.stats.report())
    assert reports[0].sums["nll"] == pytest.approx(reports[1].sums["nll"])
    assert reports[0].gradient_norm == pytest.approx(reports[1].gradient_norm, rel=1e-4)


def test_random_text_follows_zipf(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TEXT.description == "ptb not found: random text with its 30 words; an epoch has its 2,000 tokens"
    counts = np.bincount(TEXT.ids, minlength=30)
    assert len(TEXT.ids) == TEXT.tokens == 2_000
    assert counts[0] > counts[3] > counts[25] > 0
    assert np.array_equal(TEXT.ids, Text.random(30, 2_000, "ptb").ids)
    monkeypatch.setattr(steps, "MAX_RANDOM_TOKENS", 100)
    long = Text.random(30, 10**9, "wikitext-103")
    assert (len(long.ids), long.tokens) == (100, 10**9)
