"""Advice on ends: the paper's proportions and counts, bands from a text, rows that say why, sentences from figures."""

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
    advice,
    choose_bands,
    count,
    experiment,
    measure,
    vocabulary_of,
)
from reefknot.lab.bench.steps import Workload
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularySettings

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
"""Of the paper's Table 3, with 267,744 words or 33,337 pieces."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    for split in ("train", "valid", "test"):
        words = [f"w{number // (1 + number % 7)}" for number in range(200)]
        (folder / f"{split}.txt").write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, 200, 10)) + "\n")
    return open_dataset(CorpusSettings(name=str(folder)), VocabularySettings(), cache=folder / "cache")


@pytest.mark.parametrize("end", ENDS)
def test_the_paper_s_counts(end: str) -> None:
    tokens = 33_337 if end.startswith("BPE") else 267_744
    found = experiment(end, "ptb", PAPER, vocabulary_of(end, 267_744), advise.PAPER_BANDS, "cuda")
    row = count(Row(end), found, tokens)
    assert row.parameters == COUNTS[end]
    assert row.ends_parameters == COUNTS[end] - 16 * (4 * 1024**2 + 2 * 1024 * 4096 + 13 * 1024)
    assert found.training.precision == "bfloat16"
    assert found.training.batch * found.training.steps == 4096


def _vocabulary(*counts: int) -> Vocabulary:
    return Vocabulary(tuple(map(str, range(len(counts)))), counts)


def test_bands() -> None:
    assert choose_bands(_vocabulary(*[1] * 100_000)) == (
        (20_000, 40_000),
        "bands of 20,000 / 40,000 / 40,000 words (the paper's)",
    )
    sizes, told = choose_bands(_vocabulary(*[100] * 9, *[10] * 8, *[1] * 20))
    assert sizes == (9, 8)
    assert told == "bands of 9 / 8 / 20 words (cumulatively 90.0%, 98.0% and 100% of the text)"
    assert choose_bands(_vocabulary(1, 1, 1)) == ((), "bands of 3 words (too few words for several)")
    assert sum(choose_bands(_vocabulary(*range(1000, 0, -1)))[0]) < 1000


def test_pieces_are_fewer_than_words() -> None:
    assert vocabulary_of("ADP", 500).bpe is None
    few, many = vocabulary_of("BPE-T", 500).bpe, vocabulary_of("BPE", 267_744).bpe
    assert few is not None
    assert many is not None
    assert (few.merges, many.merges) == (250, 32_000)


@pytest.mark.parametrize("end", ["SM", "CNN", "ADP-T"])
def test_an_end_is_measured(end: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP", 1)
    sizes, _ = choose_bands(dataset.vocabulary)
    found = experiment(end, "text", TINY, VocabularySettings(), sizes, "cpu")
    row = measure(count(Row(end), found, len(dataset.vocabulary)), found, dataset, "cpu", 0.0)
    assert row.note == ""
    record = json.loads(json.dumps(row.record(), allow_nan=False))
    assert all(record[name] > 0 for name in record if name not in ("end", "note"))
    assert row.words_per_second == pytest.approx(row.tokens_per_second)  # every token is a word or a line end


def test_words_are_those_of_word_perplexity(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces there are more: as if each of them were the half of a word or of a line end."""
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP", 1)
    whole = dataset.splits["train"]
    halves = replace(whole, ids=np.repeat(whole.ids, 2))
    found = experiment("SM", "text", TINY, VocabularySettings(), (9,), "cpu")
    row = measure(Row("SM"), found, replace(dataset, splits={"train": halves}), "cpu", 0.0)
    assert row.words_per_second == pytest.approx((row.tokens_per_second or 0.0) / 2)


def test_all_updates_are_as_large_as_told(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.measure.WARM_UP", 1)
    counts: list[int] = []

    class Told(Workload):
        def run(self) -> None:
            counts.extend(count for *_, count in self.windows)
            super().run()

    monkeypatch.setattr(advise, "Workload", Told)
    body = replace(TINY, tokens=150)  # of 220, so that 70 are left over
    found = experiment("SM", "text", body, VocabularySettings(), (9,), "cpu")
    assert measure(Row("SM"), found, dataset, "cpu", 0.0).note == ""
    assert set(counts) == {150}


@pytest.mark.parametrize(
    ("asked", "text", "told"),
    [
        (5_000_000, 2_703, "5 x 512"),
        (700, 10**6, "1 x 512"),
        (4_096, 10**6, "8 x 512"),
        (4_096, 100, "1 x 100"),
        (24, 10**6, "1 x 24"),
    ],
)
def test_updates_are_whole_blocks_that_the_text_has(asked: int, text: int, told: str) -> None:
    body = replace(TINY, tokens=asked).within(text)
    blocks, steps = map(int, told.split(" x "))
    assert (body.tokens, body.steps) == (blocks * steps, steps)
    assert str(body).endswith(f"updates of {told} tokens")
    assert body.within(text) == body


def test_an_end_that_does_not_fit_says_so(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 58 GiB")

    monkeypatch.setattr(advise, "Workload", refuse)
    found = experiment("SM", "text", TINY, VocabularySettings(), (9,), "cpu")
    row = measure(Row("SM", parameters=7), found, dataset, "cpu", 0.0)
    assert (row.note, row.parameters, row.memory_bytes) == ("out of memory", 7, None)


def test_a_body_that_cannot_be() -> None:
    odd = Body(20, 1, 3, 16, 24)
    with pytest.raises(SettingsError, match="heads = 3 does not divide"):
        count(Row("SM"), experiment("SM", "ptb", odd, VocabularySettings(), (9,), "cpu"), 50)
    assert str(BODIES["cuda"]).endswith("updates of 8 x 512 tokens")


def test_sentences_follow_from_figures() -> None:
    def row(end: str, parameters: int, memory: int, speed: float | None) -> Row:
        return Row(end, 1, parameters, memory, speed, speed, "")

    slow, quick = row("SM", 50, 90, 10.0), row("BPE-T", 30, 20, 100.0)
    assert advice([slow, quick, row("ADP-T", 20, 30, 95.0)]) == (
        "BPE-T reads the most words per second, BPE-T needs the least memory, ADP-T has the fewest parameters. "
        "Use ADP-T: it did best in the paper, and reaches 95% of the highest speed here."
    )
    assert advice([slow, quick, row("ADP-T", 20, 30, 50.0)]).endswith(
        "ADP-T did best in the paper and reaches 50% of the highest speed here: "
        "use BPE-T if speed decides, ADP-T if perplexity does."
    )
    assert advice([slow, quick, Row("ADP-T", note="out of memory")]).endswith("the paper's best, was not measured.")
    alone = "Only SM was measured: there is nothing to compare it with."
    assert advice([slow]) == advice([slow, Row("ADP-T", note="out of memory")]) == alone
    assert advice([Row("SM", note="out of memory")]).startswith("No end could be measured")
