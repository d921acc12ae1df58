"""Skip-gram beside gensim's Word2Vec, on the same text with the same settings in one run: `reefknot bench skip-gram`.

Both read words that are in memory and known; counting them is not timed. What is timed are passes over the text, and a
word is one of the text that is in the vocabulary, kept or not. The vectors of both are then held against people's
judgements, where these are found. gensim is measured here and used nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.benchmarks.measure import Absent, reason, version
from reefknot.evaluation.similarity import Benchmark, judge
from reefknot.kernels.skip_gram import Impl, numba_available, train_stretch
from reefknot.models.skip_gram import SkipGram, SkipGramSettings
from reefknot.text.dataset import Dataset
from reefknot.training.skip_gram import SkipGramTraining
from reefknot.vectors.word_vectors import WordVectors

CORPUS, LEAST = "enwiki-sample", 5
"""What is read where nothing is named, and how often a word must occur."""
GENSIM = "gensim"
WARM_UP = 1_000
"""Words, before the clock starts: compiling is not timed."""


@dataclass(frozen=True)
class Row:
    """One competitor with so many workers, or why it was not measured."""

    competitor: str
    workers: int
    words: int
    """Of all epochs."""
    seconds: float | None = None
    words_per_second: float | None = None
    over_gensim: float | None = None
    """Words a second over gensim's with as many workers."""
    similarity: dict[str, float] | None = None
    """Spearman's rho by benchmark."""
    note: str = ""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A text, and what is done with it."""

    dataset: Dataset
    settings: SkipGramSettings
    training: SkipGramTraining
    benchmarks: Mapping[str, Benchmark]

    @property
    def ids(self) -> NDArray[np.int32]:
        return self.dataset.splits["train"].ids

    @property
    def words(self) -> int:
        """Of one epoch, without line ends and unknown words."""
        words = self.dataset.vocabulary
        return len(self.ids) - sum(words.counts[each] for each in (words.eos, words.unk) if each is not None)


def facts() -> dict[str, Any]:
    """What figures depend on beside the machine."""
    packages = ("triton", "numba", "gensim")
    return {"torch": str(torch.__version__), **{each: version(each) for each in packages}}


def measure_all(job: Job, workers: Sequence[int], device: str, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """For each number of workers ours and gensim's, one after the other."""
    for number in workers:
        ways: list[Impl] = ["auto"] if device == "cuda" else ["torch"]
        if number != workers[0]:
            ways = []  # neither knows workers
        if device == "cpu" and numba_available():
            ways = ["numba", *ways]
        rows = [_measure(job, number, _name(each, device), _ours(each, device), say) for each in ways]
        rows.append(_measure(job, number, GENSIM, _gensim, say))
        least = rows[-1].words_per_second
        yield [replace(row, over_gensim=_over(row.words_per_second, least)) for row in rows]


def _name(impl: Impl, device: str) -> str:
    return f"reefknot, {'GPU' if device == 'cuda' else impl}"


def _over(speed: float | None, other: float | None) -> float | None:
    return None if speed is None or other is None else speed / other


Run = Callable[[Job, int], tuple[float, NDArray[np.float32]]]
"""Seconds of training and the input vectors, by id."""


def _measure(job: Job, workers: int, name: str, run: Run, say: Callable[[str], None]) -> Row:
    say(f"  {name}, workers: {workers}")
    words = job.words * job.training.epochs
    row = Row(name, workers, words)
    try:
        seconds, vectors_VD = run(job, workers)
    except Exception as error:  # the run goes on
        return replace(row, note=reason(error))
    found = WordVectors(job.dataset.vocabulary.words, vectors_VD)
    judged = [judge(found, benchmark, resamples=1) for benchmark in job.benchmarks.values()]
    similarity = {each.name: each.rho for each in judged if each.rho is not None}
    return replace(row, seconds=seconds, words_per_second=words / seconds, similarity=similarity or None)


def _ours(impl: Impl, device: str) -> Run:
    def run(job: Job, workers: int) -> tuple[float, NDArray[np.float32]]:
        words, settings, training, ids = job.dataset.vocabulary, job.settings, job.training, job.ids
        draws = settings.draws(words.counts, eos=words.eos, unknown=words.unk, seed=training.seed)
        draws = draws.to(torch.device(device))
        torch.manual_seed(training.seed)
        model = SkipGram.of(settings, len(words)).to(device)
        tables = model.input.weight.detach(), model.output.weight.detach()
        copies = tables[0].clone(), tables[1].clone()
        rates = [training.rates(len(ids), epoch) for epoch in range(1, training.epochs + 1)]
        train_stretch(*copies, ids, 0, min(WARM_UP, len(ids)), draws, 0, rates[0], impl=impl)
        _wait(device)
        started = time.perf_counter()
        for epoch, rate in enumerate(rates, start=1):
            train_stretch(*tables, ids, 0, len(ids), draws, epoch, rate, workers=workers, impl=impl)
        _wait(device)
        return time.perf_counter() - started, tables[0].cpu().numpy()

    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _gensim(job: Job, workers: int) -> tuple[float, NDArray[np.float32]]:
    try:
        from gensim.models import Word2Vec
    except ImportError:
        raise Absent("not installed: pip install 'reefknot[gensim]'") from None
    words, settings, training = job.dataset.vocabulary, job.settings, job.training
    model = Word2Vec(
        sg=1,
        vector_size=settings.dim,
        window=settings.window,
        negative=settings.negatives,
        ns_exponent=settings.power,
        sample=settings.sample,
        alpha=training.learning_rate,
        min_alpha=training.lowest_rate,
        workers=workers,
        seed=training.seed + 1,  # it takes none of 0
        min_count=1,
    )
    symbols = [each for each in (words.eos, words.unk) if each is not None]
    model.build_vocab_from_freq(
        {
            word: count
            for index, (word, count) in enumerate(zip(words.words, words.counts, strict=True))
            if index not in symbols and count
        }
    )
    lines = _lines(job)
    started = time.perf_counter()
    model.train(lines, total_examples=len(lines), total_words=job.words, epochs=training.epochs)
    seconds = time.perf_counter() - started
    vectors_VD = np.zeros((len(words), settings.dim), np.float32)
    for index, word in enumerate(words.words):
        if word in model.wv:
            vectors_VD[index] = model.wv[word]
    return seconds, vectors_VD


def _lines(job: Job) -> list[list[str]]:
    """The text as gensim wants it, which has no word for a line's end, and knows all its words."""
    words, ids = job.dataset.vocabulary, job.ids
    lines: list[list[str]] = [[]]
    for each in ids.tolist():
        if each == words.eos:
            lines.append([])
        elif each != words.unk:
            lines[-1].append(words.words[each])
    return lines
