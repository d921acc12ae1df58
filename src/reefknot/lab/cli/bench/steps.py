"""`reefknot bench steps`: measure whole training steps of a recipe's rows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFile, Seconds, open_record
from reefknot.lab.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.lab.bench.steps import Job, Row, Text
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe
    from reefknot.lab.recipes.recipe import Row as RecipeRow
    from reefknot.lab.tasks.language_model import LanguageModelExperiment
    from reefknot.lab.text.vocabulary import Vocabulary

EXAMPLES = """\b
Examples:
  reefknot bench steps press2017/table6 --data DIR
  reefknot bench steps inan2017/table1 --row "*medium" --data DIR --json steps.json
  reefknot bench steps demo --row tied training.batch=64
"""


def steps(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Row to measure, or a pattern with * for several rows. Can be repeated. [default: all rows]"),
    ] = None,
    seconds: Seconds = 2.0,
    json: RecordFile = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure training steps of a recipe's rows: time, tokens per second, seconds per epoch, memory.

    If a corpus is not on this machine, random words replace its text where that is possible.
    """
    from reefknot.lab.bench.encoders import facts
    from reefknot.lab.bench.steps import measure_all
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.recipes.recipe import load_recipe

    record = open_record("steps", device, json)
    loaded = load_recipe(recipe, overrides or [], row, alone=True)
    chosen = [row for row in loaded.rows if row.trained]
    check_data(data, [loaded.experiments[row.name].corpus.name for row in chosen], recipe)
    jobs, missing = _jobs(loaded, chosen, data)
    rates = _matrix_rates(record.device, [job.settings.precision for job in jobs])
    notes = [f"{rate / 1e12:,.3g} TFLOP/s in large {precision} products" for precision, rate in rates.items()]
    # If the benchmark is stopped, its record says which rows were not reached.
    unmeasured = missing | {row.name: "not reached" for row in chosen if row.name not in missing}
    record.begin(
        facts() | {"matrix_flops": rates},
        notes,
        recipe=loaded.name,
        overrides=list(overrides or []),
        changed={row.name: [change.record() for change in loaded.changed[row.name]] for row in chosen},
        not_measured=unmeasured,
    )
    for description in dict.fromkeys(job.text.description for job in jobs):
        record.print(description)
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, other in missing.items() if other == reason)
        record.print(f"not measured: {names}, because their vocabulary is made from the corpus: {reason}")
    for rows in measure_all(jobs, record.device, rates, seconds, record.progress):
        record.print(f"\n{rows[0].row}: {_update(rows[0])}")
        cells = [_cells(row) for row in rows if row.ms is not None]
        printing.print_cells(cells, [(row.mode, row.note) for row in rows])
        del unmeasured[rows[0].row]
        record.add(row.record() for row in rows)


def _jobs(loaded: LoadedRecipe, rows: Iterable[RecipeRow], data: Path | None) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs of the rows that can be measured on this machine, and the reasons why other rows cannot be.

    It is an error if no row can be measured.
    """
    from reefknot.errors import CorpusNotFound

    jobs: list[Job] = []
    missing: dict[str, CorpusNotFound] = {}
    for row in rows:
        try:
            jobs.append(_job(loaded, row, data))
        except CorpusNotFound as error:
            missing[row.name] = error
    if not jobs:
        raise next(iter(missing.values()))
    return jobs, {name: str(error) for name, error in missing.items()}


def _job(loaded: LoadedRecipe, row: RecipeRow, data: Path | None) -> Job:
    from reefknot.lab.bench.steps import Job
    from reefknot.lab.tasks import build_model
    from reefknot.lab.tasks.language_model import LanguageModelExperiment

    advice = "use reefknot bench translation for translators and bench skip-gram for skip-gram"
    experiment = cast(LanguageModelExperiment, loaded.experiment(row, "language_model", advice))
    text, words = _text(experiment, data)
    return Job(row.name, experiment.training, partial(build_model, experiment, words), text, experiment.carries_state)


def _text(experiment: LanguageModelExperiment, data: Path | None) -> tuple[Text, Vocabulary | int]:
    """Return the text with its vocabulary, or a random text with the size of the vocabulary if there is no corpus.

    A random text has no letters, so a model that reads sub-words or spellings needs the corpus itself.
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
        if INPUTS.takes(experiment.input, "spellings"):
            raise
        words = Texts(data).vocabulary_size(experiment)
        known = known_corpus(experiment.corpus.name)
        if known is None or "train" not in known.tokens:
            raise
        return Text.random(words, known.tokens["train"], known.name), words
    train = dataset.splits["train"]
    text = Text(train.ids, train.tokens, dataset.summary, dataset.name, train.inputs, dataset.vocabulary.eos)
    return text, dataset.vocabulary


def _matrix_rates(device: str, precisions: Iterable[str]) -> dict[str, float]:
    """Return the operations per second in large matrix products on a GPU, by precision.

    The rate is not measured on a CPU, because other programs use the CPU at the same time.
    """
    from reefknot.lab.bench.measure import SUSTAINED
    from reefknot.lab.training.throughput import measure_matrix_rate
    from reefknot.lab.training.update import AUTOCAST_DTYPES

    if device == "cpu":
        return {}
    distinct = dict.fromkeys(precisions)
    return {precision: measure_matrix_rate(device, AUTOCAST_DTYPES[precision], 2 * SUSTAINED) for precision in distinct}


def _update(row: Row) -> str:
    """Return a description of the tokens of one update."""
    parts = f", in {row.accumulate} parts" if row.accumulate > 1 else ""
    if row.batching == "sentences":
        return f"sentences, {row.batch} x {row.steps} tokens at most{parts}"
    return f"{row.batch} {row.batching} of {row.steps} steps{parts}"


def _cells(row: Row) -> dict[str, str]:
    """Return the row by column title; a cell is empty if its value was not measured."""
    return {
        "mode": row.mode,
        "ms": printing.number(row.ms),
        "tokens/s": printing.whole(row.tokens_per_second),
        "s/epoch": printing.number(row.epoch_seconds),
        "GiB": printing.gib(row.memory_bytes),
        "TFLOP/s": printing.number(None if row.flops is None else row.flops / 1e12),
        "of rate": printing.percent(row.matrix_share),
        "encoder": printing.percent(row.encoder_share),
        "ends": printing.percent(row.ends_share),
        "x baseline": printing.number(row.over_baseline),
        "x first": printing.number(row.over_first),
    }
