"""Compare two translators by corpus BLEU on the same sentences, with a confidence interval of the difference.

Start with `compare_bleu`, which returns a `BleuComparison` with a verdict in words. `comparison.py` does the same for
the losses of language models.

The interval is a paired bootstrap (Koehn 2004): sentences of the text are drawn with replacement, the same sentences
for every run of both systems. A system is a translator; a run is one training of it with one seed. sacrebleu computes
BLEU of a resampled text from the sums of the statistics of its sentences. If a system was trained several times, its
BLEU is the mean over its runs, and the spread over the runs is reported. If both systems were trained several times, a
second interval also reflects how BLEU varies between training runs.

Shapes: S runs (of one or both systems), N sentences, R resamples, C = S x K, K statistics of a sentence: its length,
the length of its reference, the number of matching n-grams of each order, and the number of all n-grams of each order.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import FEWEST_UNITS, note_trained_once, resample_counts, widen_by_training

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


@dataclass(frozen=True)
class BleuComparison:
    """Comparison of two systems on the same sentences. The difference is B - A; above zero, B is better."""

    bleu_a: tuple[float, ...]
    """BLEU of each run of A, as computed by sacrebleu."""
    bleu_b: tuple[float, ...]
    """BLEU of each run of B."""
    interval: tuple[float, float]
    """Interval of the difference that reflects the choice of the sentences."""
    interval_with_seeds: tuple[float, float] | None
    """Interval of the difference that also reflects how BLEU varies between training runs. None if a system was trained
    only once."""
    level: float
    """Confidence level of the intervals, such as 0.95."""
    sentences: int
    """Number of sentences of the text."""
    resamples: int
    """Number of resampled texts."""

    @property
    def means(self) -> tuple[float, float]:
        """Mean BLEU over the runs of each system."""
        return statistics.fmean(self.bleu_a), statistics.fmean(self.bleu_b)

    @property
    def spreads(self) -> tuple[float | None, float | None]:
        """Standard deviation over the runs of each system; None for a single run."""
        return _standard_deviation(self.bleu_a), _standard_deviation(self.bleu_b)

    @property
    def difference(self) -> float:
        """Mean BLEU of B minus mean BLEU of A."""
        mean_a, mean_b = self.means
        return mean_b - mean_a

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant: the interval (with seeds, if available) does not contain zero."""
        return not _contains_zero(self._widest_interval)

    @property
    def _widest_interval(self) -> tuple[float, float]:
        """The interval over sentences and training runs if there is one, and otherwise the interval over sentences."""
        return self.interval_with_seeds or self.interval

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence, followed by a note for each of its limitations."""
        return ". ".join([self._conclusion(), *self._notes()])

    def _conclusion(self) -> str:
        lower, upper = self._widest_interval
        covered = "sentences and seeds" if self.interval_with_seeds else "sentences"
        details = (
            f"B - A {self.difference:+.2f}, {100 * self.level:g} % interval over {covered} {lower:+.2f} to {upper:+.2f}"
        )
        if self.is_significant:
            better = "B" if self.difference > 0 else "A"
            return f"{better} is better: {abs(self.difference):.2f} BLEU more ({details})"
        half_width = (upper - lower) / 2
        return f"no difference seen ({details}): a difference below about {half_width:.2f} BLEU cannot be seen here"

    def _notes(self) -> Iterator[str]:
        note = note_trained_once(len(self.bleu_a), len(self.bleu_b), "sentences")
        if note:
            yield note
        elif self.interval_with_seeds:
            lower, upper = self.interval
            yield f"Over the sentences alone the interval is {lower:+.2f} to {upper:+.2f}"
        if self.sentences < FEWEST_UNITS:
            yield f"Only {self.sentences} sentences: the interval is approximate"


def compare_bleu(
    bleu: BLEU,
    a: Sequence[Sequence[str]],
    b: Sequence[Sequence[str]],
    references: Sequence[str],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> BleuComparison:
    """Compare two systems by their translations of the same sentences.

    Args:
        bleu: The metric, which defines how text is tokenised.
        a: Translations by system A, one list for each of its runs.
        b: Translations by system B, one list for each of its runs.
        references: The reference of each sentence.
        level: Confidence level of the intervals.
        resamples: Number of resampled texts.
        seed: Seed of the resampling. The same seed gives the same interval.
    """
    if len(references) < 2:
        raise DataError("the text has fewer than two sentences, so it cannot be resampled; compare on a longer text")

    # The runs of A come first, then the runs of B.
    runs_a = slice(0, len(a))
    runs_b = slice(len(a), None)
    statistics_a = _run_statistics("A", bleu, a, references)
    statistics_b = _run_statistics("B", bleu, b, references)
    statistics_SNK = np.stack([*statistics_a, *statistics_b])

    # BLEU of each run on the whole text.
    bleu_S = np.array([bleu_of_sums(bleu, sums_K) for sums_K in statistics_SNK.sum(axis=1)])
    bleu_a = bleu_S[runs_a]
    bleu_b = bleu_S[runs_b]

    # The interval of the difference over resampled texts.
    bleu_RS = _resampled_bleu(bleu, statistics_SNK, resamples, seed)
    differences_R = bleu_RS[:, runs_b].mean(axis=1) - bleu_RS[:, runs_a].mean(axis=1)
    tail = (1 - level) / 2
    lower, upper = np.quantile(differences_R, [tail, 1 - tail])
    interval = (float(lower), float(upper))
    interval_with_seeds = None
    if min(len(a), len(b)) > 1:
        interval_with_seeds = widen_by_training(interval, bleu_a, bleu_b, level)

    return BleuComparison(
        bleu_a=tuple(bleu_a.tolist()),
        bleu_b=tuple(bleu_b.tolist()),
        interval=interval,
        interval_with_seeds=interval_with_seeds,
        level=level,
        sentences=len(references),
        resamples=resamples,
    )


def _resampled_bleu(bleu: BLEU, statistics_SNK: NDArray[np.int64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Return the BLEU of every run on every resampled text, bleu_RS.

    The statistics of a resampled text are sums over its sentences, counts_RN @ statistics_NC. counts_RN is how often
    each sentence occurs in each text, and the C = S x K columns are the statistics of all runs side by side.
    """
    num_runs, num_sentences, num_statistics = statistics_SNK.shape
    resampled_texts = resample_counts(num_sentences, resamples, np.random.default_rng(seed))
    # Matrix products are faster in float64 than in integers, and exact for integers below 2 ** 53.
    statistics_NC = statistics_SNK.transpose(1, 0, 2).reshape(num_sentences, -1).astype(np.float64)
    sums_RC = np.concatenate([counts_RN @ statistics_NC for counts_RN in resampled_texts])
    sums_RSK = sums_RC.reshape(resamples, num_runs, num_statistics)

    bleu_RS = np.empty((resamples, num_runs))
    for text in range(resamples):
        for run in range(num_runs):
            bleu_RS[text, run] = bleu_of_sums(bleu, sums_RSK[text, run])
    return bleu_RS


def sentence_statistics(bleu: BLEU, hypotheses: Sequence[str], references: Sequence[str]) -> NDArray[np.int64]:
    """Return the statistics from which BLEU is computed, for each sentence: an array (N, K)."""
    # Score each sentence as a corpus: sacrebleu's sentence score expects smoothing, and warns without it.
    statistics_of_sentences = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        score = bleu.corpus_score([hypothesis], [[reference]])
        statistics_of_sentences.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return np.array(statistics_of_sentences, dtype=np.int64)


def bleu_of_sums(bleu: BLEU, sums_K: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return corpus BLEU from the summed statistics of the sentences of a text."""
    hypothesis_length, reference_length, *ngram_counts = map(int, sums_K)
    max_order = bleu.max_ngram_order
    score = bleu.compute_bleu(
        correct=ngram_counts[:max_order],
        total=ngram_counts[max_order:],
        sys_len=hypothesis_length,
        ref_len=reference_length,
        smooth_method=bleu.smooth_method,
        smooth_value=bleu.smooth_value,
        effective_order=bleu.effective_order,
        max_ngram_order=max_order,
    )
    return float(score.score)


def _run_statistics(
    system: str, bleu: BLEU, runs: Sequence[Sequence[str]], references: Sequence[str]
) -> Iterator[NDArray[np.int64]]:
    """Yield the statistics (N, K) of the sentences of each run. Raise an error if a translation is missing."""
    if not runs:
        raise DataError(f"system {system} has no translations to compare")
    for run_number, hypotheses in enumerate(runs, start=1):
        if len(hypotheses) != len(references):
            raise DataError(
                f"run {run_number} of system {system} has {len(hypotheses):,} translations, but there are "
                f"{len(references):,} references; translate the text again"
            )
        yield sentence_statistics(bleu, hypotheses, references)


def _standard_deviation(bleu_of_runs: Sequence[float]) -> float | None:
    if len(bleu_of_runs) < 2:
        return None
    return statistics.stdev(bleu_of_runs)


def _contains_zero(interval: tuple[float, float]) -> bool:
    lower, upper = interval
    return lower <= 0.0 <= upper
