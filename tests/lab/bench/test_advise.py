"""Advice on ends: the paper's proportions and counts, bands from a text, notes on failures, and the advice itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from reefknot.errors import SettingsError
from reefknot.lab.bench import advise
from reefknot.lab.bench.advise import (
    BODIES,
    ENDS,
    Body,
    Row,
    build_experiment,
    choose_bands,
    choose_vocabulary,
    combine_rounds,
    count_parameters,
    give_advice,
    measure_training,
)
from reefknot.lab.bench.steps import Workload
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings

PAPER = Body(1024, 16, 16, 4096, 4096)
TINY = Body(16, 1, 2, 16, 24)
COUNTS = {
    "SM": 476_758_016,
    "SM-T": 339_673_088,
    "BPE": 269_813_760,
    "BPE-T": 235_676_672,
    "ASM": 263_086_080,
    "CNN": 266_343_808,
    "ADP": 291_276_800,
    "ADP-T": 246_933_504,
}
"""Parameter counts of the paper's Table 3, with 267,744 words or 33,337 sub-words."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    for split in ("train", "valid", "test"):
        words = [f"w{index // (1 + index % 7)}" for index in range(200)]
        (folder / f"{split}.txt").write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, 200, 10)) + "\n")
    return open_dataset(CorpusSettings(name=str(folder)), VocabularySettings(), cache=folder / "cache")


@pytest.mark.parametrize("end", ENDS)
def test_parameter_counts_equal_the_papers(end: str) -> None:
    tokens = 33_337 if end.startswith("BPE") else 267_744
    settings = build_experiment(end, "ptb", PAPER, choose_vocabulary(end, 267_744), advise.PAPER_BANDS, "cuda")
    row = count_parameters(Row(end), settings, tokens)
    assert row.parameters == COUNTS[end]
    assert row.ends_parameters == COUNTS[end] - 16 * (4 * 1024**2 + 2 * 1024 * 4096 + 13 * 1024)
    assert settings.training.precision == "bfloat16"
    assert settings.training.batch * settings.training.steps == 4096


def _vocabulary(*counts: int) -> Vocabulary:
    return Vocabulary(tuple(map(str, range(len(counts)))), counts)


def test_bands_are_the_papers_or_chosen_by_coverage() -> None:
    assert choose_bands(_vocabulary(*[1] * 100_000)) == (
        (20_000, 40_000),
        "bands of 20,000 / 40,000 / 40,000 words (the paper's)",
    )
    sizes, description = choose_bands(_vocabulary(*[100] * 9, *[10] * 8, *[1] * 20))
    assert sizes == (9, 8)
    assert description == "bands of 9 / 8 / 20 words (cumulatively 90.0%, 98.0% and 100% of the text)"
    assert choose_bands(_vocabulary(1, 1, 1)) == ((), "bands of 3 words (too few words for several)")
    assert sum(choose_bands(_vocabulary(*range(1000, 0, -1)))[0]) < 1000


def test_small_vocabulary_gets_fewer_merges() -> None:
    assert choose_vocabulary("ADP", 500).bpe is None
    few, many = choose_vocabulary("BPE-T", 500).bpe, choose_vocabulary("BPE", 267_744).bpe
    assert few is not None
    assert many is not None
    assert (few.merges, many.merges) == (250, 32_000)


@pytest.mark.parametrize("end", ["SM", "CNN", "ADP-T"])
def test_measured_row_has_every_value(end: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP_RUNS", 1)
    sizes, _ = choose_bands(dataset.vocabulary)
    settings = build_experiment(end, "text", TINY, VocabularySettings(), sizes, "cpu")
    row = measure_training(count_parameters(Row(end), settings, len(dataset.vocabulary)), settings, dataset, "cpu", 0.0)
    assert row.note == ""
    record = json.loads(json.dumps(row.record(), allow_nan=False))
    assert all(record[name] > 0 for name in record if name not in ("end", "note"))
    assert row.words_per_second == pytest.approx(row.tokens_per_second)  # every token is a word or a line end
    assert record["min_words_per_second"] <= record["words_per_second"] == record["max_words_per_second"]


def test_speed_counts_words_not_sub_words(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is doubled, as if each word had two sub-words."""
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP_RUNS", 1)
    train = dataset.splits["train"]
    doubled = replace(train, ids=np.repeat(train.ids, 2))
    settings = build_experiment("SM", "text", TINY, VocabularySettings(), (9,), "cpu")
    row = measure_training(Row("SM"), settings, replace(dataset, splits={"train": doubled}), "cpu", 0.0)
    assert row.words_per_second == pytest.approx((row.tokens_per_second or 0.0) / 2)


def test_all_measured_updates_have_the_stated_size(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP_RUNS", 1)
    counts: list[int] = []

    class CountingWorkload(Workload):
        def run(self) -> None:
            counts.extend(count for *_, count in self.windows)
            super().run()

    monkeypatch.setattr(advise, "Workload", CountingWorkload)
    body = replace(TINY, tokens=150)  # the text has 220 tokens, so 70 are left over
    settings = build_experiment("SM", "text", body, VocabularySettings(), (9,), "cpu")
    assert measure_training(Row("SM"), settings, dataset, "cpu", 0.0).note == ""
    assert set(counts) == {150}


@pytest.mark.parametrize(
    ("tokens", "text", "shape"),
    [
        (5_000_000, 2_703, "5 x 512"),
        (700, 10**6, "1 x 512"),
        (4_096, 10**6, "8 x 512"),
        (4_096, 100, "1 x 100"),
        (24, 10**6, "1 x 24"),
    ],
)
def test_updates_are_rounded_to_blocks_that_fit_the_text(tokens: int, text: int, shape: str) -> None:
    body = replace(TINY, tokens=tokens).fit_to_text(text)
    blocks, steps = map(int, shape.split(" x "))
    assert (body.tokens, body.block_size) == (blocks * steps, steps)
    assert str(body).endswith(f"updates of {shape} tokens")
    assert body.fit_to_text(text) == body


def test_out_of_memory_is_noted_in_the_row(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 58 GiB")

    monkeypatch.setattr(advise, "Workload", fail)
    settings = build_experiment("SM", "text", TINY, VocabularySettings(), (9,), "cpu")
    row = measure_training(Row("SM", parameters=7), settings, dataset, "cpu", 0.0)
    assert (row.note, row.parameters, row.memory_bytes) == ("out of memory", 7, None)


def test_invalid_encoder_sizes_are_rejected() -> None:
    body = Body(20, 1, 3, 16, 24)
    with pytest.raises(SettingsError, match="heads = 3 does not divide"):
        count_parameters(Row("SM"), build_experiment("SM", "ptb", body, VocabularySettings(), (9,), "cpu"), 50)
    assert str(BODIES["cuda"]).endswith("updates of 8 x 512 tokens")


def _row(end: str, parameters: int, memory: int, speed: float, slowest: float | None = None) -> Row:
    return Row(end, 1, parameters, memory, speed, speed, speed if slowest is None else slowest, speed)


def test_papers_best_end_is_advised_for_a_large_vocabulary() -> None:
    slow, quick = _row("SM", 50, 90, 10.0), _row("BPE-T", 30, 20, 100.0)
    assert give_advice([slow, quick, _row("ADP-T", 20, 30, 95.0)], 267_744) == (
        "BPE-T reads the most words per second and needs the least memory, ADP-T is the smallest. "
        "Use ADP-T: it has the best perplexity in the paper, and reaches 95% of the highest speed here."
    )
    assert give_advice([slow, quick, _row("ADP-T", 20, 30, 50.0)], 267_744).endswith(
        "ADP-T has the best perplexity in the paper and reaches 50% of the highest speed here: "
        "use BPE-T if speed decides, ADP-T if perplexity does."
    )
    assert give_advice([slow, quick, Row("ADP-T", note="out of memory")], 267_744).endswith(
        "Use BPE-T. ADP-T, the best in the paper, was not measured."
    )


def test_measurements_decide_for_a_small_vocabulary() -> None:
    best, paper = _row("SM-T", 20, 20, 100.0), _row("ADP-T", 30, 30, 95.0)
    assert give_advice([_row("SM", 50, 90, 90.0), best, paper], 2_351) == (
        "SM-T reads the most words per second, needs the least memory and is the smallest. Use SM-T. "
        "ADP-T, the best in the paper (95% of the highest speed here), is made for vocabularies of more than 80,000 "
        "words; this text has 2,351. Perplexities are not measured: to compare them, train both."
    )
    # An end that is about as fast, and needs less memory.
    lean = _row("BPE-T", 40, 10, 92.0)
    assert "Use BPE-T, which reaches 92% of the highest speed with less memory." in give_advice([best, lean], 2_351)
    # Memory that differs by less than 2 % is equal, and the smallest end is used.
    noisy = [_row("SM", 50, 434, 100.0), _row("SM-T", 20, 435, 97.0), _row("ASM", 30, 500, 99.0)]
    assert give_advice(noisy, 2_351).startswith(
        "SM reads the most words per second, SM-T needs the least memory (equal within 2%: SM) and is the smallest. "
        "Use SM-T, which reaches 97% of the highest speed with fewer parameters."
    )
    # An end that needs less memory, but is much slower.
    assert "Use SM-T. ADP-T" in give_advice([best, _row("ASM", 10, 10, 50.0), paper], 2_351)


def test_overlapping_ranges_do_not_decide() -> None:
    """ADP-T is twice as fast in one round, but not in the other."""
    lean, fast = _row("SM-T", 20, 10, 50.0), _row("ADP-T", 30, 30, 100.0, slowest=45.0)
    assert give_advice([lean, fast], 2_351).startswith(
        "ADP-T reads the most words per second (uncertain: its range overlaps with SM-T), SM-T needs the least "
        "memory and is the smallest. Use SM-T, which may be as fast as ADP-T with less memory. "
    )
    assert "Use ADP-T." in give_advice([lean, replace(fast, min_words_per_second=51.0)], 2_351)
    paper = _row("ADP-T", 20, 30, 50.0)
    assert give_advice([_row("BPE-T", 30, 20, 100.0, slowest=45.0), paper], 267_744).endswith(
        "Use ADP-T: it has the best perplexity in the paper, and may be as fast as BPE-T here."
    )


def test_rounds_are_combined() -> None:
    slow, fast = _row("SM", 50, 90, 20.0, slowest=10.0), _row("SM", 50, 91, 30.0, slowest=25.0)
    for rounds in ((slow, fast), (fast, slow)):
        combined = combine_rounds(*rounds)
        assert combined == replace(fast, min_words_per_second=10.0)
    assert combine_rounds(fast, replace(Row("SM"), note="killed")) == fast


def test_advice_needs_two_measured_ends() -> None:
    slow = _row("SM", 50, 90, 10.0)
    only_one = "Only SM was measured: there is nothing to compare it with."
    assert give_advice([slow], 9) == give_advice([slow, Row("ADP-T", note="out of memory")], 9) == only_one
    assert give_advice([Row("SM", note="out of memory")], 9).startswith("No end could be measured")
