"""`reefknot compare` on runs of translation: is one translator better than another, or was it the sentences?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from reefknot.lab.cli.options import emit
from reefknot.lab.cli.systems import System

if TYPE_CHECKING:
    from reefknot.lab.evaluation.bleu import BleuSettings
    from reefknot.lab.evaluation.bleu_comparison import BleuComparison
    from reefknot.lab.runs.folder import RunFolder


class _Task(NamedTuple):
    """What a run was asked to translate, and how its translations are counted."""

    languages: str
    sources: list[str]
    references: list[str]
    bleu: BleuSettings


def compare_translators(systems: Sequence[System], split: str, data: Path | None, as_json: bool) -> None:
    """Compare systems with the first by BLEU: paired over sentences, with the spread over seeds."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.bleu import open_metrics
    from reefknot.lab.evaluation.bleu_comparison import compare_bleu

    if split not in ("valid", "test"):
        raise SettingsError(f"--split {split}: a run keeps translations of valid and test")
    task = _shared_task(systems, split, data)
    _note_other_searches(systems, split)
    bleu = open_metrics(task.bleu).bleu
    (lines_a, *lines_b) = [[run.read_translations(split) for run in system.runs] for system in systems]
    first, *others = systems
    told: list[dict[str, Any]] = []
    shown = [f"A = {first}", f"{split} text: {len(task.references):,} sentences, {task.languages}"]
    for system, lines in zip(others, lines_b, strict=True):
        found = compare_bleu(bleu, lines_a, lines, task.references)
        sizes = _parameters(first), _parameters(system)
        shown += [f"B = {system}", *(f"  {line}" for line in _lines(found, *sizes))]
        told.append({"a": str(first.path), "b": str(system.path), "split": split, **_figures(found, *sizes)})
    # It tells how many references there are, which it knows by now.
    signature = str(bleu.get_signature())
    shown.insert(2, f"BLEU|{signature}")
    emit([{**each, "bleu_signature": signature} for each in told], "\n".join(shown), as_json)


def _shared_task(systems: Sequence[System], split: str, data: Path | None) -> _Task:
    """What all the runs were asked for; refuses those that were asked for something else."""
    from reefknot.errors import SettingsError

    first, *others = [run for system in systems for run in system.runs]
    task = _task(first, split, data)
    for run in others:
        other = _task(run, split, data)
        if other.languages != task.languages:
            reason = f"one translates {task.languages}, the other {other.languages}; compare runs of one direction"
        elif (other.sources, other.references) != (task.sources, task.references):
            reason = f"their {split} texts differ; compare runs of one corpus"
        elif other.bleu != task.bleu:
            reason = "their BLEU is counted differently; train both with one evaluation.bleu"
        else:
            continue
        raise SettingsError(f"{first.path} and {run.path}: no fair comparison: {reason}")
    return task


def _task(run: RunFolder, split: str, data: Path | None) -> _Task:
    from reefknot.lab.tasks import task_of_run
    from reefknot.lab.tasks.translation import open_parallel_texts

    experiment = task_of_run(run, "translation").experiment
    text = open_parallel_texts(run, data).splits[split]
    languages = f"{experiment.pairs.source} to {experiment.pairs.target}"
    return _Task(languages, text.text("source"), text.text("target"), experiment.bleu)


def _note_other_searches(systems: Sequence[System], split: str) -> None:
    """Whether a wider beam helps is a fair question, but not one to ask unawares."""
    first, *others = [run for system in systems for run in system.runs]
    for run in others:
        here, there = (_search(each, split) for each in (run, first))
        if changed := [
            f"{name} {here.get(name)}, not {there[name]}" for name in there if here.get(name) != there[name]
        ]:
            typer.echo(f"note: {run.path} searched otherwise than {first.path}: {'; '.join(changed)}", err=True)
            return


def _search(run: RunFolder, split: str) -> dict[str, Any]:
    """How a finished run searched for its translations."""
    result = run.result
    translated = result.translated(split) if result else None
    return translated.search if translated else {}


def _parameters(system: System) -> int:
    result = system.runs[0].result
    assert result is not None  # systems are finished runs
    return result.parameters.total


def _lines(found: BleuComparison, size_a: int, size_b: int) -> list[str]:
    a, b = (
        f"{mean:.2f}" if spread is None else f"{mean:.2f} +- {spread:.2f}"
        for mean, spread in zip(found.means, found.spreads, strict=True)
    )
    over = "" if found.spreads == (None, None) else " (standard deviation over seeds)"
    return [f"BLEU A {a}, B {b}{over}", _sizes(size_a, size_b), found.verdict]


def _sizes(a: int, b: int) -> str:
    saved = "as many" if a == b else f"{abs(b - a):,} {'fewer' if b < a else 'more'}, {abs(b - a) / a:.1%} of A's"
    return f"parameters A {a:,}, B {b:,}: {saved}"


def _figures(found: BleuComparison, size_a: int, size_b: int) -> dict[str, Any]:
    bleu_a, bleu_b = found.means
    widened = found.interval_with_seeds
    return {
        "bleu_a": bleu_a,
        "bleu_b": bleu_b,
        "difference": found.difference,
        "interval": list(found.interval),
        "interval_with_seeds": None if widened is None else list(widened),
        "seen": found.seen,
        "sentences": found.sentences,
        "resamples": found.resamples,
        "seeds": [len(found.bleu_a), len(found.bleu_b)],
        "bleu_of_seeds": [list(found.bleu_a), list(found.bleu_b)],
        "spreads": list(found.spreads),
        "parameters_a": size_a,
        "parameters_b": size_b,
        "parameters_difference": size_b - size_a,
        "verdict": found.verdict,
    }
