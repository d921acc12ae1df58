"""Measure reefknot's skip-gram against gensim's Word2Vec on the same text: `reefknot bench skip-gram`.

`measure_all` is the main function: it yields one table per number of workers (threads), with one row per competitor
(implementation). `_train_reefknot` and `_train_gensim` train word vectors and time the training.

- Both read known words from memory. The measured time is the time of the passes over the text. Counting the words is
  not timed.
- Words per second count all words of the text that are in the vocabulary, whether subsampling keeps them or not.
- The vectors of both are compared with human judgements of word similarity, if the benchmarks are on this machine.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import compress
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.kernels.skip_gram import Impl, numba_available, train_range
from reefknot.kernels.skip_gram_draws import mask_learned_words
from reefknot.lab.bench.measure import Unavailable, describe_error, describe_versions, divide
from reefknot.lab.evaluation.similarity import Benchmark, score_benchmark
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.skip_gram import SkipGramSettings
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.training.skip_gram import SkipGramTraining
from reefknot.vectors.word_vectors import WordVectors

DEFAULT_CORPUS = "enwiki-sample"
MIN_COUNT = 5
"""The smallest count of a word in the vocabulary."""
GENSIM = "gensim"
WARM_UP_WORDS = 1_000
"""Words that are trained before the clock starts, so that compiling is not timed."""
MAX_LINE_LENGTH = 10_000
"""gensim reads at most this many words of a line."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    seed: int
    seconds: float
    rhos: dict[str, float]
    """Spearman's rank correlation with human judgements, by benchmark."""


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
    """The reason why there are no trials."""

    @property
    def seconds(self) -> float | None:
        """Median training time over the seeds."""
        if not self.trials:
            return None
        return median(trial.seconds for trial in self.trials)

    @property
    def words_per_second(self) -> float | None:
        """Words per second in the median training time."""
        return divide(self.words, self.seconds)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Words per second of the slowest and of the fastest trial."""
        if not self.trials:
            return None
        speeds = [self.words / trial.seconds for trial in self.trials]
        return min(speeds), max(speeds)

    @property
    def similarity(self) -> dict[str, float]:
        """The mean of Spearman's rho over the seeds, by benchmark. Benchmarks that some trials miss are left out."""
        if not self.trials:
            return {}
        means = {}
        for benchmark in self.trials[0].rhos:
            if all(benchmark in trial.rhos for trial in self.trials):
                means[benchmark] = fmean(trial.rhos[benchmark] for trial in self.trials)
        return means

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        slowest, fastest = self.spread or (None, None)
        return asdict(self) | {
            "seconds": self.seconds,
            "words_per_second": self.words_per_second,
            "slowest": slowest,
            "fastest": fastest,
            "similarity": self.similarity or None,
        }


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
        """The training text."""
        return self.dataset.splits["train"].ids

    @property
    def num_words(self) -> int:
        """The number of words of one epoch, without line ends and unknown words."""
        return sum(compress(self.dataset.vocabulary.counts, self.has_vector))

    @cached_property
    def has_vector(self) -> NDArray[np.bool_]:
        """A mask over the vocabulary: which words get a vector."""
        vocabulary = self.dataset.vocabulary
        return mask_learned_words(vocabulary.counts, eos=vocabulary.eos, unknown=vocabulary.unk)

    def score_vectors(self, vectors_VD: NDArray[np.float32]) -> dict[str, Judgement]:
        """Return the score of the vectors on each benchmark."""
        words = tuple(compress(self.dataset.vocabulary.words, self.has_vector))
        vectors = WordVectors(words, vectors_VD[self.has_vector])
        return {name: score_benchmark(vectors, benchmark, resamples=1) for name, benchmark in self.benchmarks.items()}

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Return for each benchmark the number of pairs whose words are both trained, and the number of all pairs."""
        judgements = self.score_vectors(np.zeros((len(self.has_vector), 1), np.float32))
        return {name: (judgement.pairs, judgement.of) for name, judgement in judgements.items()}


class TrainedVectors(NamedTuple):
    """The result of a training run."""

    seconds: float
    vectors: NDArray[np.float32]
    """The input vectors by word id, vectors_VD."""


TrainFunction = Callable[[Job, int], TrainedVectors]
"""(job, number of workers) -> trained vectors."""


def describe_machine() -> dict[str, Any]:
    """Return the versions that the measurements depend on."""
    return describe_versions(("numba", "gensim"))


def measure_all(
    job: Job, worker_counts: Sequence[int], device: str, notify: Callable[[str], None]
) -> Iterator[list[Row]]:
    """Yield the rows for each number of workers: first the rows of reefknot, then the row of gensim.

    With several seeds, all competitors are trained again with each seed, taking turns, on the same text.
    """
    first_seed = job.training.seed
    for workers in worker_counts:
        # Choose the competitors.
        competitors: dict[str, TrainFunction] = {}
        for impl in _choose_impls(device, is_first=workers == worker_counts[0]):
            label = "reefknot, GPU" if device == "cuda" else f"reefknot, {impl}"
            competitors[label] = partial(_train_reefknot, impl=impl, device=device)
        competitors[GENSIM] = _train_gensim

        # Train all competitors with every seed.
        num_words = job.num_words * job.training.epochs
        rows = [Row(competitor, workers, num_words) for competitor in competitors]
        for seed in range(first_seed, first_seed + job.seeds):
            seeded_job = replace(job, training=job.training.model_copy(update={"seed": seed}))
            rows = [_add_trial(seeded_job, row, competitors[row.competitor], notify) for row in rows]

        gensim_speed = rows[-1].words_per_second
        yield [replace(row, over_gensim=divide(row.words_per_second, gensim_speed)) for row in rows]


def _choose_impls(device: str, is_first: bool) -> list[Impl]:
    """Return the implementations of reefknot to measure. Only numba uses workers; the others are measured once."""
    impls: list[Impl] = []
    if device == "cpu" and numba_available():
        impls.append("numba")
    if is_first:
        impls.append("auto" if device == "cuda" else "torch")
    return impls


def _add_trial(job: Job, row: Row, train: TrainFunction, notify: Callable[[str], None]) -> Row:
    """Return the row with one more trial, or with no trials if one of them fails."""
    if row.note:
        return row
    seed = job.training.seed
    message = f"  {row.competitor}, workers: {row.workers}"
    if job.seeds > 1:
        message += f", seed {seed}"
    notify(message)
    try:
        trained = train(job, row.workers)
        judgements = job.score_vectors(trained.vectors)
    except Exception as error:  # the other rows are still measured
        return replace(row, trials=(), note=describe_error(error))
    rhos = {name: judgement.rho for name, judgement in judgements.items() if judgement.rho is not None}
    trial = Trial(seed, trained.seconds, rhos)
    return replace(row, trials=(*row.trials, trial))


def _train_reefknot(job: Job, workers: int, impl: Impl, device: str) -> TrainedVectors:
    vocabulary = job.dataset.vocabulary
    settings = job.settings
    training = job.training
    ids = job.ids

    # The sampler decides which words are kept, how large windows are, and which words are negatives.
    sampler = settings.build_sampler(vocabulary.counts, eos=vocabulary.eos, unknown=vocabulary.unk, seed=training.seed)
    sampler = sampler.to(torch.device(device))
    torch.manual_seed(training.seed)
    model = settings.build(len(vocabulary)).to(device)
    input_VD = model.input.weight.detach()
    output_VD = model.output.weight.detach()
    epoch_rates = [training.rates(len(ids), epoch) for epoch in range(1, training.epochs + 1)]

    # Warm up on copies of the vectors.
    num_warm_up_words = min(WARM_UP_WORDS, len(ids))
    train_range(input_VD.clone(), output_VD.clone(), ids, 0, num_warm_up_words, sampler, 0, epoch_rates[0], impl=impl)

    _synchronize(device)
    started = time.perf_counter()
    for epoch, rates in enumerate(epoch_rates, start=1):
        train_range(input_VD, output_VD, ids, 0, len(ids), sampler, epoch, rates, workers=workers, impl=impl)
    _synchronize(device)
    seconds = time.perf_counter() - started
    return TrainedVectors(seconds, input_VD.cpu().numpy())


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _train_gensim(job: Job, workers: int) -> TrainedVectors:
    """Train gensim with the settings, the words and the lines of reefknot.

    The learning rate of gensim reaches its lowest value at the end. The learning rate of reefknot reaches it earlier
    and stays there.
    """
    try:
        from gensim.models import Word2Vec
    except ImportError:
        raise Unavailable("not installed: pip install 'reefknot[gensim]'") from None
    vocabulary = job.dataset.vocabulary
    settings = job.settings
    training = job.training
    model = Word2Vec(
        sg=1,  # skip-gram
        hs=0,  # negative sampling only, without a hierarchical softmax
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
        min_count=1,  # reefknot's vocabulary has already left out rare words
        sorted_vocab=1,
    )
    word_counts = zip(vocabulary.words, vocabulary.counts, strict=True)
    model.build_vocab_from_freq(dict(compress(word_counts, job.has_vector)))
    lines = _build_gensim_lines(job)

    started = time.perf_counter()
    model.train(lines, total_examples=len(lines), total_words=job.num_words, epochs=training.epochs)
    seconds = time.perf_counter() - started

    vectors_VD = np.zeros((len(vocabulary), settings.dim), np.float32)
    for word_id, word in enumerate(vocabulary.words):
        if word in model.wv:
            vectors_VD[word_id] = model.wv[word]
    return TrainedVectors(seconds, vectors_VD)


def _build_gensim_lines(job: Job) -> list[list[str]]:
    """Return the text as gensim reads it: lines of known words, without line ends.

    gensim silently drops the end of a line that is too long for it, so such a line is split.
    """
    vocabulary = job.dataset.vocabulary
    lines: list[list[str]] = [[]]
    for word_id in job.ids.tolist():
        if word_id == vocabulary.eos:
            lines.append([])
        elif word_id != vocabulary.unk:
            lines[-1].append(vocabulary.words[word_id])

    short_lines = []
    for words in lines:
        for first in range(0, len(words), MAX_LINE_LENGTH):
            short_lines.append(words[first : first + MAX_LINE_LENGTH])
    return short_lines
