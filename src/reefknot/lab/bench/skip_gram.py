"""Compare skip-gram with gensim's Word2Vec on the same text with the same settings: `reefknot bench skip-gram`.

Both read known words from memory. The measured time is the time of the passes over the text; counting the words is not
timed. Words per second count all words of the text that are in the vocabulary, whether subsampling keeps them or not.
The vectors of both are then compared with human similarity judgements, if the benchmarks are available.

gensim gets our settings: skip-gram (sg = 1) with negative sampling only (hs = 0), dimensions, window (shrunk at
random), number and power of the negatives, `sample`, first and lowest learning rate, epochs, and the words of our
vocabulary with their counts, most frequent first. Its learning rate reaches the lowest rate at the end; ours reaches it
earlier and stays there. Its min_count is 1, because our vocabulary has already left out rare words. It reads the same
lines, without unknown words. It silently drops the end of a line that is too long for it, so such a line is split. With
several seeds, both are trained again with each seed, taking turns, on the same text.

Shapes: V words, D dimensions.
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

from reefknot.kernels.skip_gram import Impl, numba_available, train_range
from reefknot.kernels.skip_gram_draws import mask_learned_words
from reefknot.lab.bench.measure import Absent, ratio, reason, version
from reefknot.lab.evaluation.similarity import Benchmark, score_benchmark
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.skip_gram import SkipGramSettings
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.training.skip_gram import SkipGramTraining
from reefknot.vectors.word_vectors import WordVectors

CORPUS, LEAST = "enwiki-sample", 5
"""The default corpus, and the smallest count of a word in the vocabulary."""
GENSIM = "gensim"
WARM_UP = 1_000
"""Words that are trained before the clock starts, so that compiling is not timed."""
LONGEST = 10_000
"""gensim reads at most this many words of a line."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    seed: int
    seconds: float
    rhos: dict[str, float]
    """Spearman's rho, by benchmark."""


@dataclass(frozen=True)
class Row:
    """The measurements of a competitor with a number of workers, or the reason why there are none."""

    competitor: str
    workers: int
    words: int
    """The number of words of all epochs."""
    trials: tuple[Trial, ...] = ()
    """One trial for each seed."""
    over_gensim: float | None = None
    """Words per second, divided by the words per second of gensim with the same number of workers."""
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Median training time over the seeds."""
        return median(trial.seconds for trial in self.trials) if self.trials else None

    @property
    def words_per_second(self) -> float | None:
        return ratio(self.words, self.seconds)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Words per second of the slowest and of the fastest trial."""
        speeds = [self.words / trial.seconds for trial in self.trials]
        return (min(speeds), max(speeds)) if speeds else None

    @property
    def similarity(self) -> dict[str, float]:
        """The mean of Spearman's rho over the seeds, by benchmark."""
        names = self.trials[0].rhos if self.trials else ()
        shared = [name for name in names if all(name in trial.rhos for trial in self.trials)]
        return {name: fmean(trial.rhos[name] for trial in self.trials) for name in shared}

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        low, high = self.spread or (None, None)
        figures = {"seconds": self.seconds, "words_per_second": self.words_per_second, "slowest": low, "fastest": high}
        return asdict(self) | figures | {"similarity": self.similarity or None}


@dataclass(frozen=True)
class Job:
    """A text, the settings of the training, and the benchmarks for the vectors."""

    dataset: Dataset
    settings: SkipGramSettings
    training: SkipGramTraining
    benchmarks: Mapping[str, Benchmark]
    seeds: int = 1
    """The number of seeds to train with. The first is the seed of `training`."""

    @property
    def ids(self) -> NDArray[np.int32]:
        return self.dataset.splits["train"].ids

    @property
    def words(self) -> int:
        """The number of words of one epoch, without line ends and unknown words."""
        return sum(compress(self.dataset.vocabulary.counts, self.learned))

    @cached_property
    def learned(self) -> NDArray[np.bool_]:
        """Which words of the vocabulary get a vector."""
        words = self.dataset.vocabulary
        return mask_learned_words(words.counts, eos=words.eos, unknown=words.unk)

    def judge(self, vectors_VD: NDArray[np.float32]) -> dict[str, Judgement]:
        """Return the score of the vectors on each benchmark."""
        words = tuple(compress(self.dataset.vocabulary.words, self.learned))
        vectors = WordVectors(words, vectors_VD[self.learned])
        return {name: score_benchmark(vectors, benchmark, resamples=1) for name, benchmark in self.benchmarks.items()}

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Return for each benchmark the number of pairs whose words are both trained, and the number of all pairs."""
        judgements = self.judge(np.zeros((len(self.learned), 1), np.float32))
        return {name: (judgement.pairs, judgement.of) for name, judgement in judgements.items()}


def facts() -> dict[str, Any]:
    """Return the versions that the measurements depend on."""
    packages = ("triton", "numba", "gensim")
    return {"torch": str(torch.__version__), **{package: version(package) for package in packages}}


def measure_all(job: Job, workers: Sequence[int], device: str, notify: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows for each number of workers: ours, then gensim's. They take turns, once per seed."""
    for number in workers:
        impls: list[Impl] = ["auto"] if device == "cuda" else ["torch"]
        if number != workers[0]:
            impls = []  # neither of them uses workers, so one measurement is enough
        if device == "cpu" and numba_available():
            impls = ["numba", *impls]
        runs = {_name(impl, device): _ours(impl, device) for impl in impls} | {GENSIM: _gensim}
        rows = [Row(name, number, job.words * job.training.epochs) for name in runs]
        for seed in range(job.training.seed, job.training.seed + job.seeds):
            seeded = replace(job, training=job.training.model_copy(update={"seed": seed}))
            rows = [_measured(seeded, row, runs[row.competitor], notify) for row in rows]
        gensim = rows[-1].words_per_second
        yield [replace(row, over_gensim=ratio(row.words_per_second, gensim)) for row in rows]


def _name(impl: Impl, device: str) -> str:
    return f"reefknot, {'GPU' if device == 'cuda' else impl}"


Run = Callable[[Job, int], tuple[float, NDArray[np.float32]]]
"""A function that trains and returns the seconds of training and the input vectors by id."""


def _measured(job: Job, row: Row, run: Run, notify: Callable[[str], None]) -> Row:
    """Return the row with one more trial, or with no trials if one of them fails."""
    if row.note:
        return row
    seed = job.training.seed
    notify(f"  {row.competitor}, workers: {row.workers}" + (f", seed {seed}" if job.seeds > 1 else ""))
    try:
        seconds, vectors_VD = run(job, row.workers)
        judgements = job.judge(vectors_VD)
    except Exception as error:  # the other rows are still measured
        return replace(row, trials=(), note=reason(error))
    rhos = {name: judgement.rho for name, judgement in judgements.items() if judgement.rho is not None}
    return replace(row, trials=(*row.trials, Trial(seed, seconds, rhos)))


def _ours(impl: Impl, device: str) -> Run:
    def run(job: Job, workers: int) -> tuple[float, NDArray[np.float32]]:
        words, settings, training, ids = job.dataset.vocabulary, job.settings, job.training, job.ids
        draws = settings.draws(words.counts, eos=words.eos, unknown=words.unk, seed=training.seed)
        draws = draws.to(torch.device(device))
        torch.manual_seed(training.seed)
        model = settings.build(len(words)).to(device)
        tables = model.input.weight.detach(), model.output.weight.detach()
        copies = tables[0].clone(), tables[1].clone()
        rates = [training.rates(len(ids), epoch) for epoch in range(1, training.epochs + 1)]
        train_range(*copies, ids, 0, min(WARM_UP, len(ids)), draws, 0, rates[0], impl=impl)
        _synchronize(device)
        started = time.perf_counter()
        for epoch, rate in enumerate(rates, start=1):
            train_range(*tables, ids, 0, len(ids), draws, epoch, rate, workers=workers, impl=impl)
        _synchronize(device)
        return time.perf_counter() - started, tables[0].cpu().numpy()

    return run


def _synchronize(device: str) -> None:
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
        seed=training.seed + 1,  # gensim does not take 0
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
    """Return the text as gensim reads it: lines of known words, without line ends."""
    words = job.dataset.vocabulary
    lines: list[list[str]] = [[]]
    for word in job.ids.tolist():
        if word == words.eos:
            lines.append([])
        elif word != words.unk:
            lines[-1].append(words.words[word])
    return [line[start : start + LONGEST] for line in lines for start in range(0, len(line), LONGEST)]
