"""Comparison of translators by BLEU, paired over sentences, with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.bleu import BleuSettings, open_metrics
from reefknot.lab.evaluation.bleu_comparison import BleuComparison, compare_bleu
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import task_of_run
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.tasks.translation import open_parallel_texts
from reefknot.storage.progress import Notify


class _Assignment(NamedTuple):
    """The texts that a run translated, and the settings of their BLEU."""

    languages: str
    sources: list[str]
    references: list[str]
    bleu: BleuSettings


@dataclass(frozen=True)
class TranslationComparison:
    """A comparison of one system with the first one."""

    a: System
    b: System
    result: BleuComparison

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        result = self.result
        bleu_a, bleu_b = result.means
        with_seeds = result.interval_with_seeds
        parameters_a, parameters_b = _parameters(self.a), _parameters(self.b)
        return {
            "bleu_a": bleu_a,
            "bleu_b": bleu_b,
            "difference": result.difference,
            "interval": list(result.interval),
            "interval_with_seeds": None if with_seeds is None else list(with_seeds),
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
        """Return the comparison in lines for people."""
        means = [
            f"{mean:.2f}" if spread is None else f"{mean:.2f} +- {spread:.2f}"
            for mean, spread in zip(self.result.means, self.result.spreads, strict=True)
        ]
        note = "" if self.result.spreads == (None, None) else " (standard deviation over seeds)"
        return [
            f"B = {self.b}",
            f"  BLEU A {means[0]}, B {means[1]}{note}",
            f"  {_compared_sizes(_parameters(self.a), _parameters(self.b))}",
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
    assignment = _shared_assignment(systems, split, request.data)
    _note_different_searches(systems, split, notify)
    bleu = open_metrics(assignment.bleu).bleu
    first, *others = systems
    lines_a, *lines_b = [[run.read_translations(split) for run in system.runs] for system in systems]
    comparisons = [
        TranslationComparison(first, system, compare_bleu(bleu, lines_a, lines, assignment.references))
        for system, lines in zip(others, lines_b, strict=True)
    ]
    # The signature names the number of references, which sacrebleu knows only after it has scored something.
    signature = str(bleu.get_signature())
    return TranslationComparisons(split, assignment.languages, len(assignment.references), signature, comparisons)


def _shared_assignment(systems: Sequence[System], split: str, data: Path | None) -> _Assignment:
    """Return the texts that all runs translated; raise an error if they differ between runs."""
    first, *others = [run for system in systems for run in system.runs]
    expected = _assignment(first, split, data)
    for run in others:
        assignment = _assignment(run, split, data)
        if assignment.languages != expected.languages:
            reason = (
                f"one translates {expected.languages}, the other {assignment.languages}; compare runs of one direction"
            )
        elif (assignment.sources, assignment.references) != (expected.sources, expected.references):
            reason = f"their {split} texts differ; compare runs of one corpus"
        elif assignment.bleu != expected.bleu:
            reason = "their settings of BLEU differ; train both runs with the same evaluation.bleu"
        else:
            continue
        raise SettingsError(f"{first.path} and {run.path}: no fair comparison: {reason}")
    return expected


def _assignment(run: RunFolder, split: str, data: Path | None) -> _Assignment:
    experiment = task_of_run(run, "translation").experiment
    text = open_parallel_texts(run, data).splits[split]
    languages = f"{experiment.pairs.source} to {experiment.pairs.target}"
    return _Assignment(languages, text.text("source"), text.text("target"), experiment.bleu)


def _note_different_searches(systems: Sequence[System], split: str, notify: Notify) -> None:
    """Print which settings of the search differ. They may differ, because a comparison may be about the beam."""
    first, *others = [run for system in systems for run in system.runs]
    expected = _search(first, split)
    for run in others:
        search = _search(run, split)
        changed = [
            f"{name} {search.get(name)}, not {value}" for name, value in expected.items() if search.get(name) != value
        ]
        if changed:
            notify(f"note: {run.path} and {first.path} searched with different settings: {'; '.join(changed)}")
            return


def _search(run: RunFolder, split: str) -> dict[str, Any]:
    """Return the settings of the search that made the translations of a finished run."""
    translated = run.result.translated(split) if run.result else None
    return translated.search if translated else {}


def _parameters(system: System) -> int:
    result = system.runs[0].result
    assert result is not None  # the runs of a system are finished
    return result.parameters.total


def _compared_sizes(a: int, b: int) -> str:
    change = "as many" if a == b else f"{abs(b - a):,} {'fewer' if b < a else 'more'}, {abs(b - a) / a:.1%} of A's"
    return f"parameters A {a:,}, B {b:,}: {change}"
