"""Compare two translators by a paired bootstrap of corpus BLEU over sentences (Koehn 2004).

Sentences of the text are drawn with replacement, the same sentences for every run of both systems. BLEU of a resampled
text is computed by sacrebleu, from the sums of the statistics of its sentences. If a system was trained several times,
its BLEU is the mean over its runs. The interval covers the choice of the sentences. The spread over the runs of a
system is reported too. If both systems were trained several times, there is also an interval that covers training them
again (`comparison.py`).

Shapes: S runs (seeds) of a system, N sentences, R resamples, C = S x K, K statistics of a sentence: its length, the
length of its reference, the number of matching n-grams of each order, and the number of all n-grams of each order.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import FEWEST_UNITS, resample_counts, widen

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


@dataclass(frozen=True)
class BleuComparison:
    """Comparison of two systems on the same sentences. The difference is B - A, so B is better if it is above zero."""

    bleu_a: tuple[float, ...]
    """BLEU of each run of A, as computed by sacrebleu."""
    bleu_b: tuple[float, ...]
    """BLEU of each run of B."""
    interval: tuple[float, float]
    """Interval of the difference that covers the choice of the sentences."""
    interval_with_seeds: tuple[float, float] | None
    """Interval of the difference that also covers training again; None if a system was trained only once."""
    level: float
    sentences: int
    resamples: int

    @property
    def means(self) -> tuple[float, float]:
        """Mean BLEU over the runs of each system."""
        return statistics.fmean(self.bleu_a), statistics.fmean(self.bleu_b)

    @property
    def spreads(self) -> tuple[float | None, float | None]:
        """Standard deviation over the runs of each system; None for a single run."""
        a, b = (statistics.stdev(bleu) if len(bleu) > 1 else None for bleu in (self.bleu_a, self.bleu_b))
        return a, b

    @property
    def difference(self) -> float:
        """Mean BLEU of B minus mean BLEU of A."""
        a, b = self.means
        return b - a

    @property
    def seen(self) -> bool:
        """Whether a difference is seen: the interval (with seeds, if available) does not contain zero."""
        return not _holds_zero(self._decisive)

    @property
    def _decisive(self) -> tuple[float, float]:
        return self.interval_with_seeds or self.interval

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence, followed by a note for each of its limitations."""
        return ". ".join([self._finding(), *self._notes()])

    def _finding(self) -> str:
        low, high = self._decisive
        over = "sentences and seeds" if self.interval_with_seeds else "sentences"
        range_ = f"B - A {self.difference:+.2f}, {100 * self.level:g} % interval over {over} {low:+.2f} to {high:+.2f}"
        if self.seen:
            return f"{'B' if self.difference > 0 else 'A'} is better: {abs(self.difference):.2f} BLEU more ({range_})"
        smallest = (high - low) / 2
        return f"no difference seen ({range_}): a difference below about {smallest:.2f} BLEU cannot be seen here"

    def _notes(self) -> Iterator[str]:
        once = [side for side, bleu in (("A", self.bleu_a), ("B", self.bleu_b)) if len(bleu) == 1]
        if len(once) == 2:
            yield "Both were trained once: the interval covers the choice of sentences, not training again"
        elif once:
            yield f"{once[0]} was trained once: the interval does not cover training it again"
        elif self.interval_with_seeds:
            low, high = self.interval
            yield f"Over the sentences alone the interval is {low:+.2f} to {high:+.2f}"
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
    runs_SNK = np.stack([*_statistics("A", bleu, a, references), *_statistics("B", bleu, b, references)])
    bleu_S = np.array([bleu_of_sums(bleu, sums_K) for sums_K in runs_SNK.sum(axis=1)])
    texts = resample_counts(len(references), resamples, np.random.default_rng(seed))
    # Matrix products are faster in float64 than in integers, and exact for integers below 2 ** 53.
    wide_NC = runs_SNK.transpose(1, 0, 2).reshape(len(references), -1).astype(np.float64)
    sums_RSK = np.concatenate([times_RN @ wide_NC for times_RN in texts]).reshape(resamples, *runs_SNK.shape[::2])
    bleu_RS = np.array([[bleu_of_sums(bleu, sums_K) for sums_K in sums_SK] for sums_SK in sums_RSK])
    differences_R = bleu_RS[:, len(a) :].mean(axis=1) - bleu_RS[:, : len(a)].mean(axis=1)
    tail = (1 - level) / 2
    low, high = (float(end) for end in np.quantile(differences_R, [tail, 1 - tail]))
    bleu_a, bleu_b = bleu_S[: len(a)], bleu_S[len(a) :]
    several = min(len(a), len(b)) > 1
    return BleuComparison(
        bleu_a=tuple(bleu_a.tolist()),
        bleu_b=tuple(bleu_b.tolist()),
        interval=(low, high),
        interval_with_seeds=widen((low, high), bleu_a, bleu_b, level) if several else None,
        level=level,
        sentences=len(references),
        resamples=resamples,
    )


def sentence_statistics(bleu: BLEU, lines: Sequence[str], references: Sequence[str]) -> NDArray[np.int64]:
    """Return the statistics from which BLEU is computed, for each sentence: an array (N, K)."""
    # Score each line as a corpus: sacrebleu's sentence score expects smoothing, and warns without it.
    scores = [bleu.corpus_score([line], [[reference]]) for line, reference in zip(lines, references, strict=True)]
    return np.array([[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores], dtype=np.int64)


def bleu_of_sums(bleu: BLEU, sums_K: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return corpus BLEU from the summed statistics of the sentences of a text."""
    length, reference, *counts = map(int, sums_K)
    orders = bleu.max_ngram_order
    score = bleu.compute_bleu(
        correct=counts[:orders],
        total=counts[orders:],
        sys_len=length,
        ref_len=reference,
        smooth_method=bleu.smooth_method,
        smooth_value=bleu.smooth_value,
        effective_order=bleu.effective_order,
        max_ngram_order=orders,
    )
    return float(score.score)


def _statistics(
    side: str, bleu: BLEU, runs: Sequence[Sequence[str]], references: Sequence[str]
) -> Iterator[NDArray[np.int64]]:
    if not runs:
        raise DataError(f"system {side} has no translations to compare")
    for number, lines in enumerate(runs, start=1):
        if len(lines) != len(references):
            raise DataError(
                f"run {number} of system {side} has {len(lines):,} translations, but there are {len(references):,} "
                "references; translate the text again"
            )
        yield sentence_statistics(bleu, lines, references)


def _holds_zero(interval: tuple[float, float]) -> bool:
    low, high = interval
    return low <= 0.0 <= high
