"""`reefknot bench`: our ends, encoders, steps, translators and skip-gram beside everyone else's, measured here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from reefknot.lab.cli.bench_skip_gram import bench_skip_gram
from reefknot.lab.cli.options import Data, Device, Overrides

if TYPE_CHECKING:
    from reefknot.lab.bench import encoders, heads, steps, translation
    from reefknot.lab.recipes.recipe import Recipe, Row
    from reefknot.lab.tasks.language_model import LanguageModelExperiment
    from reefknot.lab.text.vocabulary import Vocabulary

EXAMPLES = """\b
Examples:
  reefknot bench heads --end plain --shape 2048,256,50000 --competitor reefknot --competitor eager
  reefknot bench heads --vocabulary --json sweep.json     cost against the vocabulary, 10 K to 1 M words
  reefknot bench encoders --shape 20,35,200-200-200       masked recurrences against nn.LSTM
  reefknot bench steps press2017/table6 --data DIR        whole training steps of a recipe's rows
  reefknot bench translation --data DIR                   against nn.Transformer, and a search without caches
  reefknot bench skip-gram --workers 1,2 --data DIR       words a second and similarity, against gensim
"""
TAKES = {
    "heads": {"end", "shape", "competitor", "vocabulary", "weights", "memory", "graph"},
    "encoders": {"shape", "weights", "graph"},
    "steps": {"row", "data"},
    "translation": {"row", "data"},
    "skip-gram": {"data", "workers", "epochs", "seeds"},
}
"""Options that not everything takes."""
WIDE = 120
"""Columns of a table that goes into a file."""


def bench(
    what: Annotated[str, typer.Argument(help="What to measure: heads, encoders, steps, translation or skip-gram.")],
    recipe: Annotated[str | None, typer.Argument(help="steps, translation: a recipe; skip-gram: a corpus.")] = None,
    overrides: Overrides = None,
    row: Annotated[list[str] | None, typer.Option(help="steps, translation: a row, or several by *.")] = None,
    end: Annotated[
        list[str] | None, typer.Option(help="plain, adaptive, augmented, augmented-detached, mixture or drill.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="heads: N,D,V (rows, dim, classes); encoders: B,T,D-H-H.")
    ] = None,
    competitor: Annotated[list[str] | None, typer.Option(help="reefknot, eager, compile, torch, liger or cce.")] = None,
    vocabulary: Annotated[bool, typer.Option("--vocabulary", help="Sweep the vocabulary instead.")] = False,
    weights: Annotated[str | None, typer.Option(help="float32, bfloat16 or, of encoders, tf32.")] = None,
    memory: Annotated[list[float] | None, typer.Option(help="MiB of working memory for a row of ours.")] = None,
    workers: Annotated[str | None, typer.Option(help="skip-gram: numbers of threads, such as 1,2.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="skip-gram: passes over the text.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=100, help="skip-gram: seeds, for intervals.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing per competitor.")] = 2.0,
    graph: Annotated[bool, typer.Option("--graph", help="Also time a captured CUDA graph.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", show_default=False)] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure parts, steps, translators or skip-gram; options can be repeated."""
    from reefknot.errors import SettingsError
    from reefknot.lab.training.distributed import choose_device

    _check_names("bench", [what], list(TAKES))
    given: dict[str, object] = {"end": end, "shape": shape, "competitor": competitor, "vocabulary": vocabulary}
    given |= {"weights": weights, "memory": memory, "graph": graph, "row": row, "data": data}
    for name, value in (given | {"workers": workers, "epochs": epochs, "seeds": seeds}).items():
        if value and name not in TAKES[what]:
            raise SettingsError(f"bench {what} takes no --{name}; leave it out")
    if (recipe is None and what == "steps") or (recipe is not None and what in ("heads", "encoders")):
        advice = "name a recipe, such as press2017/table6" if recipe is None else f"takes no recipe; leave out {recipe}"
        raise SettingsError(f"bench {what}: {advice}")
    _check_names("--weights", [weights] if weights else [], ("float32", "bfloat16", *["tf32"] * (what == "encoders")))
    if json is not None and (json.is_dir() or not json.resolve().parent.is_dir()):
        fault = "is a folder; name a file" if json.is_dir() else f"there is no folder {json.resolve().parent}"
        raise SettingsError(f"--json {json}: {fault}")
    place = choose_device(device)
    if place == "cpu" and (weights not in (None, "float32") or graph):
        raise SettingsError(f"--{'graph' if graph else f'weights {weights}'} needs a GPU; torch sees none here")
    report = Report(what, place, json)
    if what == "heads":
        _bench_heads(
            report, end or [], shape or [], competitor or [], vocabulary, weights, memory or [], seconds, graph
        )
    elif what == "encoders":
        _bench_encoders(report, shape or [], weights, seconds, graph)
    elif what == "skip-gram":
        bench_skip_gram(report, recipe, overrides or [], workers or "1", epochs or 1, seeds or 1, data)
    elif what == "translation":
        _bench_translation(report, recipe, overrides or [], row or [], data, seconds)
    elif recipe is not None:
        _bench_steps(report, recipe, overrides or [], row or [], data, seconds)


def _check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    from reefknot.errors import SettingsError

    for name in given:
        if name not in known:
            raise SettingsError(f"{option} {name}: must be {' or '.join(known)}")


@dataclass
class Report:
    """Tables for people as they are measured, and a record of everything for programs."""

    what: str
    place: str
    path: Path | None
    head: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, facts: dict[str, Any], told: Sequence[str] = (), **more: Any) -> None:
        """Say what figures depend on."""
        from reefknot.lab.runs.environment import capture

        environment = capture()
        device = environment["cpu"] if self.place == "cpu" else environment["gpus"][0]
        self.head = {"bench": self.what, "machine": {"device": device, **facts}, "environment": environment, **more}
        triton = f"triton {facts['triton']}" if facts["triton"] else "no triton"
        self.line(", ".join([device, f"torch {facts['torch']}", triton, *told]))

    def line(self, text: str) -> None:
        typer.echo(text)

    def progress(self, text: str) -> None:
        typer.echo(text, err=True)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """After every case, so that a run which is stopped leaves what it measured."""
        from reefknot.storage.files import write_json

        self.rows += records
        if self.path is not None:
            write_json(self.path, self.head | {"rows": self.rows})


def print_figures(titles: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[tuple[str, str]]) -> None:
    """Names on the left, figures on the right; below, who did not take part and why: (name, note)."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    if lines:
        console.print(table)
    for note in dict.fromkeys(note for _, note in notes if note):
        names = ", ".join(name for name, told in notes if told == note)
        console.print(f"{names}: {note}", highlight=False, markup=False)


def _bench_heads(
    report: Report,
    ends: Sequence[str],
    shapes: Sequence[str],
    families: Sequence[str],
    vocabulary: bool,
    weights: str | None,
    memory: Sequence[float],
    seconds: float,
    graph: bool,
) -> None:
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.heads import FAMILIES, LEAN, SWEPT, Bench, cases, facts, measure_all
    from reefknot.lab.bench.measure import SUSTAINED
    from reefknot.lab.bench.problems import ENDS, Shape
    from reefknot.lab.training.throughput import matrix_rate

    _check_names("--end", ends, ENDS)
    _check_names("--competitor", families, FAMILIES)
    for budget in memory:
        if not budget > 0:
            raise SettingsError(f"--memory {budget:g}: must be a number of MiB above 0")
    if vocabulary and shapes:
        raise SettingsError("--vocabulary chooses its own shapes; leave out --shape")
    if vocabulary:
        _check_names("--vocabulary --end", ends, SWEPT)
    place = report.place
    setup = Bench(place, families or FAMILIES, weights, memory or (LEAN[place],), seconds, graph)
    chosen = cases(place, ends, [Shape.read(text) for text in shapes], vocabulary)
    rate = matrix_rate(place, setup.dtype, 2 * SUSTAINED)
    found = facts(setup, rate)
    told = [found["dtype"], f"{found['matrix_tflops']:,.3g} TFLOP/s in large products"]
    report.begin(found, told, vocabulary=vocabulary)
    for rows in measure_all(setup, rate, chosen, report.progress):
        report.line(f"\n{rows[0].end}, {rows[0].shape}: floor {_figure(rows[0].floor_ms)} ms")
        titles = ["competitor", "ms", "x floor", "over MiB", "worst error", "same bits"]
        titles += ["graph ms"] if graph else []
        print_figures(titles, [_head_line(row, graph) for row in rows if row.ms is not None], _notes(rows))
        report.add(row.record() for row in rows)


def _head_line(row: heads.Row, graph: bool) -> list[str]:
    cells = [row.competitor, _figure(row.ms), _figure(row.over_floor), _figure(row.over_mib)]
    return [*cells, _error(row.worst_error), _yes(row.deterministic), *([_figure(row.graph_ms)] if graph else [])]


def _bench_encoders(report: Report, shapes: Sequence[str], weights: str | None, seconds: float, graph: bool) -> None:
    from reefknot.lab.bench.encoders import DTYPES, SHAPES, Bench, Shape, facts, measure_all

    setup = Bench(report.place, (weights,) if weights else DTYPES[report.place], seconds, graph)
    chosen = [Shape.read(text) for text in shapes] or SHAPES[report.place]
    left = {f"{shape}, {dtype}": "not reached" for shape in chosen for dtype in setup.dtypes}
    report.begin(facts(), not_measured=left)
    for rows in measure_all(setup, chosen, report.progress):
        del left[f"{rows[0].shape}, {rows[0].dtype}"]
        report.line(f"\n{rows[0].shape}, {rows[0].dtype}")
        titles = ["competitor", "ms", *(["graph ms"] if graph else []), "x nn.LSTM", "worst error", "same bits"]
        print_figures(titles, [_encoder_line(row, graph) for row in rows if row.ms is not None], _notes(rows))
        report.add(row.record() for row in rows)


def _encoder_line(row: encoders.Row, graph: bool) -> list[str]:
    timed = [_figure(row.ms), *([_figure(row.graph_ms)] if graph else []), _figure(row.over_lstm)]
    return [row.competitor, *timed, _error(row.worst_error), _yes(row.deterministic)]


def _bench_steps(
    report: Report, name: str, overrides: Sequence[str], rows: Sequence[str], data: Path | None, seconds: float
) -> None:
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.bench.encoders import facts
    from reefknot.lab.bench.steps import measure_all
    from reefknot.lab.recipes.recipe import load_recipe

    loaded = load_recipe(name, overrides, rows or None, alone=True)
    chosen = [row for row in loaded.rows if row.trained]
    jobs: list[steps.Job] = []
    absent: dict[str, CorpusNotFound] = {}
    for row in chosen:
        try:
            jobs.append(_job(loaded, row, data))
        except CorpusNotFound as error:
            absent[row.name] = error
    if not jobs:
        raise next(iter(absent.values()))
    rates = _matrix_rates(report.place, [job.settings.precision for job in jobs])
    told = [f"{rate / 1e12:,.3g} TFLOP/s in large {precision} products" for precision, rate in rates.items()]
    missing = {name: str(reason) for name, reason in absent.items()}
    machine = facts() | {"matrix_flops": rates}
    # As of encoders, the record of a run which is stopped tells what it did not come to.
    left = missing | {row.name: "not reached" for row in chosen if row.name not in missing}
    changed = {row.name: [change.record() for change in loaded.changed[row.name]] for row in chosen}
    report.begin(machine, told, recipe=loaded.name, overrides=list(overrides), changed=changed, not_measured=left)
    for line in dict.fromkeys(job.text.description for job in jobs):
        report.line(line)
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, other in missing.items() if other == reason)
        report.line(f"not measured: {names}, whose words the corpus alone can tell: {reason}")
    for found in measure_all(jobs, report.place, rates, seconds, report.progress):
        report.line(f"\n{found[0].row}: {_update(found[0])}")
        _print_measured([_step_cells(row) for row in found if row.ms is not None], found)
        del left[found[0].row]
        report.add(row.record() for row in found)


def _bench_translation(
    report: Report, name: str | None, overrides: Sequence[str], rows: Sequence[str], data: Path | None, seconds: float
) -> None:
    from reefknot.lab.bench.encoders import facts
    from reefknot.lab.bench.translation import RECIPE, ROW, job_of, measure_all
    from reefknot.lab.recipes.recipe import load_recipe

    rows = rows or ([] if name else [ROW])
    loaded = load_recipe(name or RECIPE, overrides, rows or None, alone=True)
    jobs = [job_of(loaded, row, data) for row in loaded.rows if row.trained]
    report.begin(facts(), recipe=loaded.name, overrides=list(overrides))
    for line in dict.fromkeys(job.description for job in jobs):
        report.line(line)
    for found in measure_all(jobs, report.place, seconds, report.progress):
        report.line(f"\n{found[0].row}, {found[0].what}")
        _print_measured([_translation_cells(row) for row in found if row.ms is not None], found)
        report.add(row.record() for row in found)


def _translation_cells(row: translation.Row) -> dict[str, str]:
    return {
        "way": row.mode,
        "ms": _figure(row.ms),
        "tokens/s": "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "GiB": _gib(row.memory_bytes),
        "x baseline": _figure(row.over_baseline),
        "same": _percent(row.same),
    }


def _print_measured(cells: Sequence[dict[str, str]], found: Sequence[steps.Row] | Sequence[translation.Row]) -> None:
    """Without the columns that nothing was measured for."""
    shown = [title for title in cells[0] if any(line[title] for line in cells)] if cells else []
    lines = [[line[title] for title in shown] for line in cells]
    print_figures(shown, lines, [(row.mode, row.note) for row in found])


def _matrix_rates(place: str, precisions: Iterable[str]) -> dict[str, float]:
    """Operations a second in large products, on a GPU: a CPU is shared with everything else that runs there."""
    from reefknot.lab.bench.measure import SUSTAINED
    from reefknot.lab.training.throughput import matrix_rate
    from reefknot.lab.training.update import AUTOCAST_DTYPES

    if place == "cpu":
        return {}
    return {each: matrix_rate(place, AUTOCAST_DTYPES[each], 2 * SUSTAINED) for each in dict.fromkeys(precisions)}


def _job(loaded: Recipe, row: Row, data: Path | None) -> steps.Job:
    from functools import partial

    from reefknot.lab.bench.steps import Job
    from reefknot.lab.tasks import build_model
    from reefknot.lab.tasks.language_model import LanguageModelExperiment

    advice = "use reefknot bench translation for translators and bench skip-gram for skip-gram"
    experiment = cast(LanguageModelExperiment, loaded.experiment(row, "language_model", advice))
    text, words = _text(experiment, data)
    return Job(row.name, experiment.training, partial(build_model, experiment, words), text, experiment.carries)


def _text(experiment: LanguageModelExperiment, data: Path | None) -> tuple[steps.Text, Vocabulary | int]:
    """The corpus and its words, or, where a published one is not here, random words, as many as it has.

    What the model makes of the letters of a word (pieces, spellings) the corpus alone can tell.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.bench.steps import Text
    from reefknot.lab.cli.sizes import Texts
    from reefknot.lab.config.parts import INPUTS
    from reefknot.lab.text.corpora import known_corpus
    from reefknot.lab.text.dataset import open_dataset

    try:
        dataset = open_dataset(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if INPUTS.asks_for(experiment.input, "spellings"):
            raise
        words = Texts(data).vocabulary_size(experiment)
        known = known_corpus(experiment.corpus.name)
        if known is None or "train" not in known.tokens:
            raise
        return Text.random(words, known.tokens["train"], known.name), words
    train = dataset.splits["train"]
    text = Text(train.ids, train.tokens, dataset.summary, dataset.name, train.inputs, dataset.vocabulary.eos)
    return text, dataset.vocabulary


def _update(row: steps.Row) -> str:
    """What goes into an update, for people."""
    parts = f", in {row.accumulate} parts" if row.accumulate > 1 else ""
    if row.batching == "sentences":
        return f"sentences, {row.batch} x {row.steps} tokens at most{parts}"
    return f"{row.batch} {row.batching} of {row.steps} steps{parts}"


def _step_cells(row: steps.Row) -> dict[str, str]:
    """Titles and what stands below them: nothing where nothing was measured."""
    return {
        "steps": row.mode,
        "ms": _figure(row.ms),
        "tokens/s": "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "s/epoch": _figure(row.epoch_seconds),
        "GiB": _gib(row.memory_bytes),
        "TFLOP/s": _figure(None if row.flops is None else row.flops / 1e12),
        "of rate": _percent(row.matrix_share),
        "encoder": _percent(row.encoder_share),
        "ends": _percent(row.ends_share),
        "x baseline": _figure(row.over_baseline),
        "x first": _figure(row.over_first),
    }


def _notes(rows: Sequence[heads.Row] | Sequence[encoders.Row]) -> list[tuple[str, str]]:
    return [(row.competitor, row.note) for row in rows]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(number: int | None) -> str:
    return "" if number is None else f"{number / 2**30:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[value]
