"""`reefknot compare`: is one run better than another, or was it the text?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.compare_translations import compare_translators
from reefknot.lab.cli.options import AsJson, Data, emit, given
from reefknot.lab.cli.systems import System, open_system

if TYPE_CHECKING:
    from reefknot.lab.evaluation.comparison import Comparison
    from reefknot.lab.evaluation.frequency import Pair, TokenComparison
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.text.dataset import Dataset

EXAMPLES = """\b
Examples:
  reefknot compare runs/demo/untied/seed0 runs/demo/tied/seed0
  reefknot compare runs/demo/untied runs/demo/tied --json          all their seeds
  reefknot compare A B --by documents --bands --data DIR
  reefknot compare BASELINE THREE-WAY --split valid                  translators, by BLEU
  reefknot compare runs/demo/tied runs/demo/drill --bands --figure bands.svg
"""

FOR_TRANSLATORS = ("runs", "split", "data", "as_json")
"""Arguments that have a meaning for translators too."""


def compare(
    invocation: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders with a run per seed. The first is A.")],
    split: Annotated[str, typer.Option(help="valid or test.")] = "test",
    by: Annotated[
        str, typer.Option(help="Unit of resampling: blocks, or documents (by headings, else by empty lines).")
    ] = "blocks",
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 500,
    bands: Annotated[
        bool, typer.Option("--bands", help="Also by how often the target, or the word before, was seen in training.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(help="With --bands: draw the differences by band into this SVG file.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first: paired over blocks or documents of the text, and over seeds; translators by BLEU,
    paired over sentences."""
    from reefknot.errors import SettingsError

    systems = [open_system(path) for path in runs]
    if len(systems) < 2:
        raise SettingsError("compare needs at least two runs; each folder that is named is read as one system")
    if _shared_task(systems) == "translation":
        for name, option in given(invocation):
            if name not in FOR_TRANSLATORS:
                raise SettingsError(f"{option} is for language models, and these runs translate; leave it out")
        compare_translators(systems, split, data, as_json)
        return
    if by not in ("blocks", "documents"):
        raise SettingsError(f"--by {by}: must be blocks or documents")
    if by == "documents" and "block" in dict(given(invocation)):
        raise SettingsError("--block is the length of blocks, and --by documents has none; leave one out")
    if figure is not None and not bands:
        raise SettingsError("--figure draws what --bands finds: give both")
    if figure is not None and figure.suffix.lower() != ".svg":
        raise SettingsError(f"--figure {figure}: the picture is an SVG file; let its name end in .svg")
    _compare_losses(systems, split, by, block, bands, figure, data, as_json)


def _compare_losses(
    systems: list[System],
    split: str,
    by: str,
    block: int,
    bands: bool,
    figure: Path | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Compare language models by the losses of every token, or word."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation import comparison
    from reefknot.lab.evaluation.frequency import Pair
    from reefknot.lab.tasks.language_model import open_texts

    of, (scores_a, *scores_b) = _pair(systems, split, data)
    if of == "word" and (bands or by == "documents"):
        advice = "leave out --bands" if bands else "use --by blocks"
        raise SettingsError(f"these runs do not have the same tokens: {advice}")
    first, *others = systems
    texts = open_texts(first.runs[0], data) if bands else None
    tokens = len(scores_a[0])
    if by == "blocks":
        boundaries = comparison.blocks(tokens, block)
    else:
        boundaries = _documents(first.runs[0], split, tokens, data)
    told: list[dict[str, Any]] = []
    cut = by == "blocks" and block > boundaries[1] and len(boundaries) > 2
    shorter = f" of {boundaries[1]:,}, as longer ones would be fewer than {comparison.FEWEST_UNITS}" if cut else ""
    lines = [f"A = {first}", f"{split} text: {tokens:,} {of}s in {len(boundaries) - 1:,} {by}{shorter}"]
    for system, scores_of_b in zip(others, scores_b, strict=True):
        found = comparison.compare(scores_a, scores_of_b, boundaries, of=of)
        lines += [
            f"B = {system}",
            f"  perplexity A {found.perplexity_a:.2f}, B {found.perplexity_b:.2f}",
            f"  {found.verdict}",
        ]
        told.append({"a": str(first.path), "b": str(system.path), "by": by, **_figures(found)})
        if texts is not None:
            by_band, shown = _bands(Pair(scores_a, scores_of_b, boundaries), texts, split)
            told[-1]["bands"] = by_band
            lines += shown
    if figure is not None:
        _draw(figure, told)
        lines.append(f"figure: {figure.resolve()}")
    emit(told, "\n".join(lines), as_json)


def _shared_task(systems: list[System]) -> str:
    """The task of all systems: a translator and a language model cannot be compared."""
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import load_task, task_of_run

    tasks = {system.runs[0].task: system.path for system in systems}
    for system in systems:
        if not load_task(system.runs[0].task).scores_text:
            task_of_run(system.runs[0], "language_model")
    if len(tasks) > 1:
        kinds = " and ".join(f"{path} is {load_task(task).noun}" for task, path in tasks.items())
        raise SettingsError(f"{kinds}: no fair comparison; compare runs of one kind")
    return next(iter(tasks))


def _pair(systems: list[System], split: str, data: Path | None) -> tuple[str, list[list[Any]]]:
    """Whether tokens or words are compared, and their losses: for each system one array per run.

    Runs with other tokens are compared by words, where the same words were scored as themselves.
    """
    from reefknot.lab.evaluation.perplexity import word_losses
    from reefknot.lab.tasks.language_model import open_texts

    losses = [_losses(system, split) for system in systems]
    runs = [run for system in systems for run in system.runs]
    if _refuse_unpaired(runs, split, data):
        return "token", losses

    def by_word(nll: Any, run: RunFolder) -> Any:
        texts = open_texts(run, data)
        return word_losses(nll, texts.splits[split], texts.vocabulary)

    return "word", [
        [by_word(nll, run) for nll, run in zip(of_runs, system.runs, strict=True)]
        for of_runs, system in zip(losses, systems, strict=True)
    ]


def _refuse_unpaired(runs: list[RunFolder], split: str, data: Path | None) -> bool:
    """Refuse runs whose losses cannot be paired with those of the first one. Returns whether all have its tokens.

    Whether other windows help is a fair question, so they are only noted, and once.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pairing import pair
    from reefknot.lab.runs.comparability import in_comparison
    from reefknot.lab.tasks.language_model import open_texts

    first, *others = runs
    pairings = {run.path: pair(first, run, split, lambda run: open_texts(run, data)) for run in others}
    notes = []
    for path, pairing in pairings.items():
        if found := pairing.difference:
            told, reason = f"{first.path} and {path}", in_comparison(found, split)
            if found.prevents:
                raise SettingsError(f"{told}: no fair comparison: {reason}")
            notes.append(f"note: {told}: {reason}")
    if notes:
        typer.echo(notes[0], err=True)
    return all(pairing.same_tokens for pairing in pairings.values())


def _losses(system: System, split: str) -> list[Any]:
    """The losses of every token, one array per run."""
    from reefknot.errors import SettingsError

    losses = []
    for run in system.runs:
        scores = run.read_scores()
        if split not in scores:
            raise SettingsError(f"--split {split}: a run keeps scores of {' and '.join(sorted(scores))}")
        losses.append(scores[split].numpy())
    return losses


def _figures(found: Comparison) -> dict[str, Any]:
    return {
        "perplexity_a": found.perplexity_a,
        "perplexity_b": found.perplexity_b,
        "difference": found.difference,
        "interval": list(found.interval),
        "ratio": found.ratio,
        "ratio_interval": list(found.ratio_interval),
        "seen": found.seen,
        "units": found.units,
        "of": found.of,
        "seeds": [found.seeds_a, found.seeds_b],
        "verdict": found.verdict,
    }


def _bands(pair: Pair, texts: Dataset, split: str) -> tuple[dict[str, Any], list[str]]:
    """Two systems by bands of training counts: for programs, and as lines."""
    from dataclasses import asdict

    from reefknot.lab.evaluation.frequency import compare_by_previous, compare_by_target, compare_on_symbols
    from reefknot.lab.runs.units import seen

    text, words = texts.splits[split], texts.vocabulary
    targets, previous = compare_by_target(pair, text, words), compare_by_previous(pair, text, words)
    symbols = compare_on_symbols(pair, text, words)
    head = f"  {'seen':>12} {'tokens':>9} {'A':>7} {'B':>7} {'B - A':>8}  {'95 % interval':<17}"
    lines = [
        "  loss per token by how often the target was seen in training",
        "  by type: 100 (B - A) / B of each type's loss, the mean over the types of the band",
        f"{head} {'types':>6} {'by type':>9}",
        *(
            f"{_line(seen(each.low, each.high), each)} {each.types:>6,} {_percent(each.relative)}".rstrip()
            for each in targets
        ),
        *([f"  {'of these:':>12}"] if symbols else []),
        *(_line(name, each).rstrip() for name, each in symbols.items()),
        "  loss per token by how often the token before was seen",
        head.rstrip(),
        *(_line(seen(each.low, each.high), each).rstrip() for each in previous),
    ]
    kinds: dict[str, Any] = {
        "target": [asdict(each) for each in targets],
        "symbols": {name: asdict(each) for name, each in symbols.items()},
        "previous": [asdict(each) for each in previous],
    }
    return kinds, lines


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:>+8.2f}%"


def _draw(path: Path, told: list[dict[str, Any]]) -> None:
    """After Figure 3 of Pappas & Henderson (2019): a bar for each band of training counts and each B."""
    from reefknot.lab.evaluation.frequency import TypeComparison
    from reefknot.lab.papers.figures.relative_loss import CAPTION, band_json, draw_bands
    from reefknot.storage.files import write_text

    compared = {each["b"]: [band_json(TypeComparison(**band)) for band in each["bands"]["target"]] for each in told}
    caption = f"Loss against {told[0]['a']}, A; lower is better. {CAPTION}"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = "B less A, % of A's loss", "B less A, % of B's loss"
    write_text(path, draw_bands("bands", compared, caption, measured, against=f", against {told[0]['a']}").file)


def _line(name: str, found: TokenComparison) -> str:
    interval = "{:+.4f} {:+.4f}".format(*found.interval) if found.interval else "too few to tell"
    losses = f"{found.nll_a:>7.4f} {found.nll_b:>7.4f} {found.difference:>+8.4f}"
    return f"  {name:>12} {found.tokens:>9,} {losses}  {interval:<17}"


def _documents(run: RunFolder, split: str, tokens: int, data: Path | None) -> Any:
    from reefknot.errors import DataError
    from reefknot.lab.evaluation.comparison import FEWEST_UNITS
    from reefknot.lab.evaluation.documents import document_boundaries
    from reefknot.lab.tasks.language_model import open_texts

    dataset = open_texts(run, data)
    if tokens != dataset.splits[split].tokens:
        raise DataError("the first token was not scored, so documents do not line up; use --by blocks")
    boundaries = document_boundaries(dataset.splits[split], dataset.vocabulary)
    if len(boundaries) - 1 < FEWEST_UNITS:
        raise DataError(
            f"the {split} text has too few documents to resample, {len(boundaries) - 1}: they begin at first-level "
            "headings, `= Title =`, or, where there is none, after empty lines; use --by blocks"
        )
    return boundaries
