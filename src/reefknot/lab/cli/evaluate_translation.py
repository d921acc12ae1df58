"""`reefknot evaluate` on a run of translation: BLEU and chrF with their signatures, perplexity with its definition."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from reefknot.lab.cli.options import emit, open_translator
from reefknot.lab.cli.progress import live_progress
from reefknot.lab.cli.translate import search_settings

if TYPE_CHECKING:
    from reefknot.lab.evaluation.beam import SearchSettings
    from reefknot.lab.evaluation.grid import Progress
    from reefknot.lab.evaluation.perplexity import Score
    from reefknot.lab.evaluation.translation import Evaluated
    from reefknot.lab.runs.result import LengthBand
    from reefknot.lab.tasks.translation import TrainedTranslator
    from reefknot.lab.text.pair_dataset import PairDataset


def evaluate_translator(
    run: Path,
    split: str | None,
    limit: int | None,
    beam: int | None,
    length_penalty: float | None,
    save: bool,
    data: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Translate a text with a run's best weights, and say what that is worth."""
    from reefknot.errors import SettingsError

    if save:
        _check_save(split, limit, changed=beam is not None or length_penalty is not None)
    trained = open_translator(run, device)
    if save and trained.run.result is None:
        raise SettingsError("--save keeps figures beside those of a run's training; train this one to its end first")
    search = search_settings(trained, beam, length_penalty)
    dataset = trained.dataset(data)
    if split is not None and split not in dataset.splits:
        raise SettingsError(f"--split {split}: must be one of {', '.join(dataset.splits)}")
    names = [split] if split else ["valid", "test"] if save else ["test"]
    with live_progress() as progress:
        found = {name: _evaluated(trained, dataset, name, search, limit, progress) for name in names}
    if save:
        from reefknot.lab.evaluation.saved import save as keep

        scores = {name: score for name, (_, score) in found.items()}
        translated = {name: evaluated.figures for name, (evaluated, _) in found.items()}
        typer.echo(keep(trained.run, _kind(search), search.model_dump(), None, scores, translated), err=True)
    told = [_figures(str(run), name, *each) for name, each in found.items()]
    lines = [line for name, each in found.items() for line in _lines(name, *each, whole=dataset.splits[name].pairs)]
    emit(told[0] if len(told) == 1 else told, "\n".join(lines), as_json)


def _evaluated(
    trained: TrainedTranslator,
    dataset: PairDataset,
    split: str,
    search: SearchSettings,
    limit: int | None,
    progress: Progress,
) -> tuple[Evaluated, Score]:
    from reefknot.lab.evaluation.pairs import score_pairs
    from reefknot.lab.evaluation.translation import beginning, evaluate_translations

    model, bleu, precision = trained.model, trained.experiment.bleu, trained.experiment.training.precision
    dataset = beginning(dataset, split, limit)
    evaluated = evaluate_translations(
        model, dataset, split, search, bleu, precision=precision, say=partial(typer.echo, err=True), progress=progress
    )
    return evaluated, score_pairs(model, dataset.splits[split], dataset.vocabulary, precision=precision)


def _check_save(split: str | None, limit: int | None, *, changed: bool) -> None:
    from reefknot.errors import SettingsError

    if not changed:
        raise SettingsError("--save goes with --beam or --length-penalty: training has saved the run's own figures")
    if split == "train" or limit is not None:
        option = "--limit" if limit is not None else "--split train"
        raise SettingsError(f"--save keeps figures of the whole valid and test texts; leave {option} out")


def _kind(search: SearchSettings) -> str:
    """The name that the figures of a search are saved under."""
    return f"beam-{search.beam}-length-penalty-{search.length_penalty:g}"


def _figures(run: str, split: str, evaluated: Evaluated, score: Score) -> dict[str, Any]:
    return {"run": run, "split": split, **evaluated.figures.record(), **score.summary().record()}


def _lines(split: str, evaluated: Evaluated, score: Score, whole: int) -> list[str]:
    """The figures and what each of them means."""
    from reefknot.lab.runs.definition import shown

    figures, summary = evaluated.figures, score.summary()
    search, number = figures.search, figures.pairs
    lines = [
        f"{split} BLEU {figures.bleu:.2f}  chrF {figures.chrf:.2f}  perplexity {shown(summary.perplexity)}  "
        f"word perplexity {shown(summary.per_word)}",
        f"BLEU|{figures.bleu_signature}",
        f"chrF2|{figures.chrf_signature}",
        f"brevity penalty {figures.brevity_penalty:.3f}, length ratio {figures.length_ratio:.3f}; "
        f"beam {search['beam']}, length penalty {search['length_penalty']:g}; "
        f"{figures.unfinished:,} of {number:,} translations reached the longest length",
        summary.definition,
    ]
    bands = ", ".join(f"{_band(each)}: {each.bleu:.1f} ({each.pairs:,})" for each in figures.by_length)
    lines.insert(4, f"BLEU by source tokens (pairs): {bands}")
    if number < whole:
        lines.append(f"limit: the first {number:,} of {whole:,} pairs only")
    return lines


def _band(band: LengthBand) -> str:
    return f"over {band.low - 1}" if band.high is None else f"{band.low}-{band.high}"
