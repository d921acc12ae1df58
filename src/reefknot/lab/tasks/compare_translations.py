"""Compares translators by BLEU on the same sentences, with confidence intervals from paired resampling.

`compare_translators` is the entry point. A system is one model trained with several seeds; the first system is the
baseline A, and every other system B is compared with it. Sentences are resampled, each with the translations of both
systems. It reads the translations that training has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.bleu import BleuSettings, open_metrics
from reefknot.lab.evaluation.bleu_comparison import BleuComparison, compare_bleu
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import create_task_for_run
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.tasks.translation import open_parallel_texts
from reefknot.storage.progress import Notify


class _EvaluationSet(NamedTuple):
    """The texts that a run translated, and the settings of their BLEU. They must be equal for all compared runs."""

    languages: str
    """The direction, such as "en to de"."""
    sources: list[str]
    references: list[str]
    bleu: BleuSettings


@dataclass(frozen=True)
class TranslationComparison:
    """A comparison of one system with the first one."""

    a: System
    """The first system, which is the baseline."""
    b: System
    result: BleuComparison

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        result = self.result
        bleu_a, bleu_b = result.means
        interval_with_seeds = result.interval_with_seeds
        parameters_a, parameters_b = _count_parameters(self.a), _count_parameters(self.b)
        return {
            "bleu_a": bleu_a,
            "bleu_b": bleu_b,
            "difference": result.difference,
            "interval": list(result.interval),
            "interval_with_seeds": None if interval_with_seeds is None else list(interval_with_seeds),
            "seen": result.is_significant,
            "sentences": result.sentences,
            "resamples": result.resamples,
            "seeds": [len(result.bleu_a), len(result.bleu_b)],
            "bleu_of_seeds": [list(result.bleu_a), list(result.bleu_b)],
            "spreads": list(result.spreads),
            "parameters_a": parameters_a,
            "parameters_b": parameters_b,
            "parameters_difference": parameters_b - parameters_a,
            "verdict": result.verdict,
        }

    def lines(self) -> list[str]:
        """Return the comparison as readable lines."""
        means = [
            f"{mean:.2f}" if spread is None else f"{mean:.2f} +- {spread:.2f}"
            for mean, spread in zip(self.result.means, self.result.spreads, strict=True)
        ]
        spread_note = "" if self.result.spreads == (None, None) else " (standard deviation over seeds)"
        return [
            f"B = {self.b}",
            f"  BLEU A {means[0]}, B {means[1]}{spread_note}",
            f"  {_format_sizes(_count_parameters(self.a), _count_parameters(self.b))}",
            f"  {self.result.verdict}",
        ]


@dataclass(frozen=True)
class TranslationComparisons:
    """Comparisons of several systems with the first one."""

    split: str
    languages: str
    sentences: int
    signature: str
    """Signature of BLEU, which says how it is computed."""
    comparisons: list[TranslationComparison]

    def record(self) -> list[dict[str, Any]]:
        """Return one record per comparison."""
        return [
            {
                "a": str(comparison.a.path),
                "b": str(comparison.b.path),
                "split": self.split,
                **comparison.record(),
                "bleu_signature": self.signature,
            }
            for comparison in self.comparisons
        ]

    def text(self) -> str:
        """Return the systems, the text, and the result of every comparison."""
        heading = [
            f"A = {self.comparisons[0].a}",
            f"{self.split} text: {self.sentences:,} sentences, {self.languages}",
            f"BLEU|{self.signature}",
        ]
        return "\n".join([*heading, *(line for comparison in self.comparisons for line in comparison.lines())])


def compare_translators(
    systems: Sequence[System], request: ComparisonRequest, *, notify: Notify
) -> TranslationComparisons:
    """Compare translators with the first one, by the translations that their runs have saved."""
    split = request.split
    if split not in ("valid", "test"):
        raise SettingsError(f"--split {split}: a run stores translations of valid and test only")
    evaluation_set = _shared_evaluation_set(systems, split, request.data)
    _note_different_searches(systems, split, notify)
    bleu = open_metrics(evaluation_set.bleu).bleu
    baseline, *other_systems = systems
    baseline_lines, *other_lines = [[run.read_translations(split) for run in system.runs] for system in systems]
    references = evaluation_set.references
    comparisons = [
        TranslationComparison(baseline, system, compare_bleu(bleu, baseline_lines, lines, references))
        for system, lines in zip(other_systems, other_lines, strict=True)
    ]
    # The signature names the number of references, which sacrebleu knows only after it has scored something.
    signature = str(bleu.get_signature())
    return TranslationComparisons(split, evaluation_set.languages, len(references), signature, comparisons)


def _shared_evaluation_set(systems: Sequence[System], split: str, data: Path | None) -> _EvaluationSet:
    """Return the texts that all runs translated; raise an error if they differ between runs."""
    baseline_run, *other_runs = [run for system in systems for run in system.runs]
    expected = _open_evaluation_set(baseline_run, split, data)
    for run in other_runs:
        actual = _open_evaluation_set(run, split, data)
        if actual.languages != expected.languages:
            reason = f"one translates {expected.languages}, the other {actual.languages}; compare runs of one direction"
        elif (actual.sources, actual.references) != (expected.sources, expected.references):
            reason = f"their {split} texts differ; compare runs of one corpus"
        elif actual.bleu != expected.bleu:
            reason = "their settings of BLEU differ; train both runs with the same evaluation.bleu"
        else:
            continue
        raise SettingsError(f"{baseline_run.path} and {run.path}: no fair comparison: {reason}")
    return expected


def _open_evaluation_set(run: RunFolder, split: str, data: Path | None) -> _EvaluationSet:
    experiment = create_task_for_run(run, "translation").experiment
    pairs = open_parallel_texts(run, data).splits[split]
    languages = f"{experiment.pairs.source} to {experiment.pairs.target}"
    return _EvaluationSet(languages, pairs.text("source"), pairs.text("target"), experiment.bleu)


def _note_different_searches(systems: Sequence[System], split: str, notify: Notify) -> None:
    """Print which settings of the search differ. They may differ, because a comparison may be about the beam."""
    baseline_run, *other_runs = [run for system in systems for run in system.runs]
    expected = _read_search_settings(baseline_run, split)
    for run in other_runs:
        search = _read_search_settings(run, split)
        changed = [
            f"{name} {search.get(name)}, not {value}" for name, value in expected.items() if search.get(name) != value
        ]
        if changed:
            notify(f"note: {run.path} and {baseline_run.path} searched with different settings: {'; '.join(changed)}")
            return


def _read_search_settings(run: RunFolder, split: str) -> dict[str, Any]:
    """Return the settings of the search that made the translations of a finished run."""
    translated = run.result.translated(split) if run.result else None
    return translated.search if translated else {}


def _count_parameters(system: System) -> int:
    result = system.runs[0].result
    assert result is not None  # the runs of a system are finished
    return result.parameters.total


def _format_sizes(a: int, b: int) -> str:
    """Return the numbers of parameters of A and B and their difference, such as "200 fewer, 10.0% of A's"."""
    if a == b:
        change = "as many"
    else:
        difference = abs(b - a)
        change = f"{difference:,} {'fewer' if b < a else 'more'}, {difference / a:.1%} of A's"
    return f"parameters A {a:,}, B {b:,}: {change}"
