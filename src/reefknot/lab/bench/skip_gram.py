"""Skip-gram beside gensim's Word2Vec, on the same text with the same settings in one run: `reefknot bench skip-gram`.

Both read words that are in memory and known; counting them is not timed. What is timed are passes over the text, and a
word is one of the text that is in the vocabulary, kept or not. The vectors of both are then held against people's
judgements, where these are found. gensim is measured here and used nowhere else.

gensim is given what ours has: skip-gram (sg = 1) with negative sampling alone (hs = 0), width, window (shrunk at
random), negatives and their power, `sample`, the rate at the beginning and the lowest (its line ends there, ours stays
there), epochs, and the words of our vocabulary with their counts, most frequent first, none cut off (min_count = 1: the
vocabulary's own is applied already). It reads the same lines without unknown words; of one longer than it takes at once
it would drop the rest and say nothing, so that such a line comes in pieces. With several seeds everyone is trained anew
with each, in turn, on the same text.

Shapes: V words, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import compress
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.kernels.skip_gram import Impl, numba_available, train_stretch
from reefknot.kernels.skip_gram_draws import learned
from reefknot.lab.bench.measure import Absent, reason, version
from reefknot.lab.evaluation.similarity import Benchmark, judge
from reefknot.lab.runs.result import Judgement
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.training.skip_gram import SkipGramTraining
from reefknot.nn.models.skip_gram import SkipGram, SkipGramSettings
from reefknot.vectors.word_vectors import WordVectors

CORPUS, LEAST = "enwiki-sample", 5
"""What is read where nothing is named, and how often a word must occur."""
GENSIM = "gensim"
WARM_UP = 1_000
"""Words, before the clock starts: compiling is not timed."""
LONGEST = 10_000
"""Words of a line that gensim takes."""


@dataclass(frozen=True)
class Trial:
    """One training."""

    seed: int
    seconds: float
    rhos: dict[str, float]
    """Spearman's, by benchmark."""


@dataclass(frozen=True)
class Row:
    """One competitor with so many workers, or why it was not measured."""

    competitor: str
    workers: int
    words: int
    """Of all epochs."""
    trials: tuple[Trial, ...] = ()
    """One for each seed."""
    over_gensim: float | None = None
    """Words a second over gensim's with as many workers."""
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """The median of the seeds' trainings."""
        return median(each.seconds for each in self.trials) if self.trials else None

    @property
    def words_per_second(self) -> float | None:
        return None if self.seconds is None else self.words / self.seconds

    @property
    def spread(self) -> tuple[float, float] | None:
        """Words a second of the slowest and of the fastest training."""
        speeds = [self.words / each.seconds for each in self.trials]
        return (min(speeds), max(speeds)) if speeds else None

    @property
    def similarity(self) -> dict[str, float]:
        """The mean of Spearman's rho over the seeds, by benchmark."""
        names = self.trials[0].rhos if self.trials else ()
        shared = [name for name in names if all(name in each.rhos for each in self.trials)]
        return {name: fmean(each.rhos[name] for each in self.trials) for name in shared}

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        low, high = self.spread or (None, None)
        figures = {"seconds": self.seconds, "words_per_second": self.words_per_second, "slowest": low, "fastest": high}
        return asdict(self) | figures | {"similarity": self.similarity or None}


@dataclass(frozen=True)
class Job:
    """A text, and what is done with it."""

    dataset: Dataset
    settings: SkipGramSettings
    training: SkipGramTraining
    benchmarks: Mapping[str, Benchmark]
    seeds: int = 1
    """How many, from that of the training on."""

    @property
    def ids(self) -> NDArray[np.int32]:
        return self.dataset.splits["train"].ids

    @property
    def words(self) -> int:
        """Of one epoch, without line ends and unknown words."""
        return sum(compress(self.dataset.vocabulary.counts, self.learned))

    @cached_property
    def learned(self) -> NDArray[np.bool_]:
        """Which words of the vocabulary are trained."""
        words = self.dataset.vocabulary
        return learned(words.counts, eos=words.eos, unknown=words.unk)

    def judge(self, vectors_VD: NDArray[np.float32]) -> dict[str, Judgement]:
        """By benchmark."""
        words = tuple(compress(self.dataset.vocabulary.words, self.learned))
        vectors = WordVectors(words, vectors_VD[self.learned])
        return {name: judge(vectors, each, resamples=1) for name, each in self.benchmarks.items()}

    def coverage(self) -> dict[str, tuple[int, int]]:
        """The pairs of each benchmark whose words are all trained, and all its pairs."""
        judged = self.judge(np.zeros((len(self.learned), 1), np.float32))
        return {name: (each.pairs, each.of) for name, each in judged.items()}


def facts() -> dict[str, Any]:
    """What figures depend on beside the machine."""
    packages = ("triton", "numba", "gensim")
    return {"torch": str(torch.__version__), **{each: version(each) for each in packages}}


def measure_all(job: Job, workers: Sequence[int], device: str, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """For each number of workers ours and gensim's: in turn, once with every seed."""
    for number in workers:
        ways: list[Impl] = ["auto"] if device == "cuda" else ["torch"]
        if number != workers[0]:
            ways = []  # neither knows workers
        if device == "cpu" and numba_available():
            ways = ["numba", *ways]
        runs = {_name(each, device): _ours(each, device) for each in ways} | {GENSIM: _gensim}
        rows = [Row(name, number, job.words * job.training.epochs) for name in runs]
        for seed in range(job.training.seed, job.training.seed + job.seeds):
            trained = replace(job, training=job.training.model_copy(update={"seed": seed}))
            rows = [_measured(trained, row, runs[row.competitor], say) for row in rows]
        least = rows[-1].words_per_second
        yield [replace(row, over_gensim=_over(row.words_per_second, least)) for row in rows]


def _name(impl: Impl, device: str) -> str:
    return f"reefknot, {'GPU' if device == 'cuda' else impl}"


def _over(speed: float | None, other: float | None) -> float | None:
    return None if speed is None or other is None else speed / other


Run = Callable[[Job, int], tuple[float, NDArray[np.float32]]]
"""Seconds of training and the input vectors, by id."""


def _measured(job: Job, row: Row, run: Run, say: Callable[[str], None]) -> Row:
    """The row with one more trial; with none at all where one of them fails."""
    if row.note:
        return row
    seed = job.training.seed
    say(f"  {row.competitor}, workers: {row.workers}" + (f", seed {seed}" if job.seeds > 1 else ""))
    try:
        seconds, vectors_VD = run(job, row.workers)
        judged = job.judge(vectors_VD)
    except Exception as error:  # the run goes on
        return replace(row, trials=(), note=reason(error))
    rhos = {name: each.rho for name, each in judged.items() if each.rho is not None}
    return replace(row, trials=(*row.trials, Trial(seed, seconds, rhos)))


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
        hs=0,
        vector_size=settings.dim,
        window=settings.window,
        shrink_windows=True,
        negative=settings.negatives,
        ns_exponent=settings.power,
        sample=settings.sample,
        alpha=training.learning_rate,
        min_alpha=training.lowest_rate,
        workers=workers,
        seed=training.seed + 1,  # it takes none of 0
        min_count=1,
        sorted_vocab=1,
    )
    model.build_vocab_from_freq(dict(compress(zip(words.words, words.counts, strict=True), job.learned)))
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
    return [line[start : start + LONGEST] for line in lines for start in range(0, len(line), LONGEST)]
