"""Compares translators by BLEU on the same sentences, with confidence intervals from paired resampling.

Start with `compare_translators`, which `reefknot compare` calls. A system is one model, trained with one or more seeds.
The first system is the baseline A, and every other system B is compared with it. The translations were saved by
training. Resampling draws sentences with replacement, each with the translations of both systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics
from reefknot.lab.evaluation.bleu_comparison import BleuComparison, compare_bleu
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import create_task_for_run
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.tasks.translation import open_parallel_texts
from reefknot.storage.progress import Notify


def compare_translators(
    systems: Sequence[System], request: ComparisonRequest, *, notify: Notify
) -> TranslationComparisons:
    """Compare translators with the first one, by the translations that their runs have saved."""
    split = request.split
    if split not in ("valid", "test"):
        raise SettingsError(f"--split {split}: a run stores translations of valid and test only")
    evaluation_set = _open_shared_evaluation_set(systems, split, request.data)
    _note_different_searches(systems, split, notify)

    bleu = create_metrics(evaluation_set.bleu).bleu
    references = evaluation_set.references
    translations_by_system = [[run.read_translations(split) for run in system.runs] for system in systems]
    baseline, *other_systems = systems
    baseline_translations, *other_translations = translations_by_system
    comparisons = []
    for system, translations in zip(other_systems, other_translations, strict=True):
        result = compare_bleu(bleu, baseline_translations, translations, references)
        comparisons.append(TranslationComparison(baseline, system, result))

    # The signature names the number of references, which sacrebleu knows only after it has scored something.
    signature = str(bleu.get_signature())
    return TranslationComparisons(split, evaluation_set.languages, len(references), signature, comparisons)


class _EvaluationSet(NamedTuple):
    """The texts that a run translated, and the settings of their BLEU. They must be equal for all compared runs."""

    languages: str
    """The direction, such as "en to de"."""
    sources: list[str]
    references: list[str]
    bleu: BleuSettings


def _open_shared_evaluation_set(systems: Sequence[System], split: str, data_folder: Path | None) -> _EvaluationSet:
    """Return the texts that all runs translated; raise an error if they differ between runs."""
    baseline_run, *other_runs = [run for system in systems for run in system.runs]
    expected = _open_evaluation_set(baseline_run, split, data_folder)
    for run in other_runs:
        actual = _open_evaluation_set(run, split, data_folder)
        if actual.languages != expected.languages:
            reason = f"one translates {expected.languages}, the other {actual.languages}; compare runs of one direction"
        elif actual.sources != expected.sources or actual.references != expected.references:
            reason = f"their {split} texts differ; compare runs of one corpus"
        elif actual.bleu != expected.bleu:
            reason = "their settings of BLEU differ; train both runs with the same evaluation.bleu"
        else:
            continue
        raise SettingsError(f"{baseline_run.path} and {run.path}: no fair comparison: {reason}")
    return expected


def _open_evaluation_set(run: RunFolder, split: str, data_folder: Path | None) -> _EvaluationSet:
    experiment = create_task_for_run(run, "translation").experiment
    pairs = open_parallel_texts(run, data_folder).splits[split]
    return _EvaluationSet(
        languages=f"{experiment.pairs.source} to {experiment.pairs.target}",
        sources=pairs.read_text("source"),
        references=pairs.read_text("target"),
        bleu=experiment.bleu,
    )


def _note_different_searches(systems: Sequence[System], split: str, notify: Notify) -> None:
    """Print the settings of the beam search in which the first differing run differs from the baseline.

    The settings may differ, because a comparison may be about the beam.
    """
    baseline_run, *other_runs = [run for system in systems for run in system.runs]
    baseline_search = _read_search_settings(baseline_run, split)
    for run in other_runs:
        search = _read_search_settings(run, split)
        changes = []
        for name, baseline_value in baseline_search.items():
            value = search.get(name)
            if value != baseline_value:
                changes.append(f"{name} {value}, not {baseline_value}")
        if changes:
            notify(f"note: {run.path} and {baseline_run.path} searched with different settings: {'; '.join(changes)}")
            return


def _read_search_settings(run: RunFolder, split: str) -> dict[str, Any]:
    """Return the settings of the beam search that made the translations of a finished run."""
    scores = run.result.translated(split) if run.result else None
    return scores.search if scores else {}


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TranslationComparisons:
    """Comparisons of several systems with the first one."""

    split: str
    languages: str
    """The direction, such as "en to de"."""
    sentences: int
    """Number of sentences of the text."""
    signature: str
    """Signature of BLEU, which describes how it is computed."""
    comparisons: list[TranslationComparison]

    @property
    def description(self) -> str:
        """Description of the text."""
        return f"{self.split} text: {self.sentences:,} sentences, {self.languages}"

    def record(self) -> list[dict[str, Any]]:
        """Return one record per comparison."""
        return [
            {
                "a": str(comparison.baseline.path),
                "b": str(comparison.system.path),
                "split": self.split,
                **comparison.record(),
                "bleu_signature": self.signature,
            }
            for comparison in self.comparisons
        ]

    def text(self) -> str:
        """Return the systems, the text, and the result of every comparison."""
        lines = [
            f"A = {self.comparisons[0].baseline}",
            self.description,
            f"BLEU|{self.signature}",
        ]
        for comparison in self.comparisons:
            lines += comparison.lines()
        return "\n".join(lines)


@dataclass(frozen=True)
class TranslationComparison:
    """A comparison of one system with the baseline."""

    baseline: System
    """The first system. It is called A in the output."""
    system: System
    """The other system. It is called B in the output."""
    result: BleuComparison

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        result = self.result
        bleu_a, bleu_b = result.means
        parameters_a = _count_parameters(self.baseline)
        parameters_b = _count_parameters(self.system)
        interval_with_seeds = result.interval_with_seeds
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
        mean_a, mean_b = self.result.means
        spread_a, spread_b = self.result.spreads
        spread_note = ""
        if spread_a is not None or spread_b is not None:
            spread_note = " (standard deviation over seeds)"
        parameters_a = _count_parameters(self.baseline)
        parameters_b = _count_parameters(self.system)
        return [
            f"B = {self.system}",
            f"  BLEU A {_format_bleu(mean_a, spread_a)}, B {_format_bleu(mean_b, spread_b)}{spread_note}",
            f"  {_format_parameters(parameters_a, parameters_b)}",
            f"  {self.result.verdict}",
        ]


def _count_parameters(system: System) -> int:
    result = system.runs[0].result
    assert result is not None  # the runs of a system are finished
    return result.parameters.total


def _format_bleu(mean: float, spread: float | None) -> str:
    """Return the mean BLEU over the seeds and its standard deviation; only the mean if there is one seed."""
    if spread is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} +- {spread:.2f}"


def _format_parameters(parameters_a: int, parameters_b: int) -> str:
    """Return the numbers of parameters of A and B and their difference, such as "200 fewer, 10.0% of A's"."""
    difference = abs(parameters_b - parameters_a)
    if parameters_b == parameters_a:
        change = "as many"
    elif parameters_b < parameters_a:
        change = f"{difference:,} fewer, {difference / parameters_a:.1%} of A's"
    else:
        change = f"{difference:,} more, {difference / parameters_a:.1%} of A's"
    return f"parameters A {parameters_a:,}, B {parameters_b:,}: {change}"
