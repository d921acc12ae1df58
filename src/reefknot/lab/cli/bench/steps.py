"""`reefknot bench steps`: measure complete training steps of language models.

Every model is a row (one experiment) of a recipe. `_build_job` combines a row with its text, and `lab/bench/steps.py`
measures it in several modes, such as eager and captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFileOption, RowPatternsOption, SecondsOption, load_rows, open_record
from reefknot.lab.cli.options import DataOption, DeviceOption, OverridesArgument, RecipeArgument

if TYPE_CHECKING:
    from reefknot.lab.bench.steps import Job, ModeMeasurement, Text
    from reefknot.lab.recipes.recipe import Recipe, Row
    from reefknot.lab.tasks.language_model import LanguageModelExperiment
    from reefknot.lab.text.vocabulary import Vocabulary

EXAMPLES = """\b
Examples:
  reefknot bench steps press2017/table6 --data DIR
  reefknot bench steps inan2017/table1 --row "*medium" --data DIR --json steps.json
  reefknot bench steps demo --row tied training.batch=64
"""


def steps(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    row: RowPatternsOption = None,
    seconds: SecondsOption = 2.0,
    json: RecordFileOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure the training steps of a recipe's language models: time, tokens per second, seconds per epoch and memory.

    If a corpus is not on this machine, the benchmark uses a text of random words where that is possible.
    """
    from reefknot.lab.bench.encoders import describe_machine
    from reefknot.lab.bench.steps import measure_all

    # Open the texts.
    record = open_record("steps", device, json)
    loaded_recipe, recipe_rows = load_rows(recipe, overrides, row, data)
    jobs, missing = _build_jobs(loaded_recipe, recipe_rows, data)

    # Print the header. If the benchmark is stopped, its record says which rows were not reached.
    rates = _measure_matrix_rates(record.device, [job.settings.precision for job in jobs])
    notes = [f"{rate / 1e12:,.3g} TFLOP/s in large {precision} products" for precision, rate in rates.items()]
    unmeasured = dict(missing)
    changes_by_row = {}
    for recipe_row in recipe_rows:
        unmeasured.setdefault(recipe_row.name, "not reached")
        changes_by_row[recipe_row.name] = [change.record() for change in loaded_recipe.changed[recipe_row.name]]
    record.print_header(
        describe_machine() | {"matrix_flops": rates},
        notes,
        recipe=loaded_recipe.name,
        overrides=list(overrides or []),
        changed=changes_by_row,
        not_measured=unmeasured,
    )
    for description in dict.fromkeys(job.text.description for job in jobs):
        record.print(description)
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        record.print(f"not measured: {', '.join(names)}, because their vocabulary is made from the corpus: {reason}")

    # Measure and print one table per row, with one line per mode.
    for measurements in measure_all(jobs, record.device, rates, seconds, record.print_progress):
        row_name = measurements[0].row
        del unmeasured[row_name]
        heading = f"{row_name}: {_format_update(measurements[0])}"
        record.add_table(heading, measurements, _format_cells, hide_empty=True)


def _build_jobs(recipe: Recipe, rows: Iterable[Row], data: Path | None) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs of the rows that can be measured, and for each other row the reason why it cannot be measured.

    It is an error if no row can be measured.
    """
    from reefknot.errors import CorpusNotFound

    jobs: list[Job] = []
    missing: dict[str, CorpusNotFound] = {}
    for row in rows:
        try:
            jobs.append(_build_job(recipe, row, data))
        except CorpusNotFound as error:
            missing[row.name] = error
    if not jobs:
        raise next(iter(missing.values()))
    return jobs, {name: str(error) for name, error in missing.items()}


def _build_job(recipe: Recipe, row: Row, data: Path | None) -> Job:
    """Combine the model and the training settings of a row with its text."""
    from reefknot.lab.bench.steps import Job
    from reefknot.lab.tasks import build_model
    from reefknot.lab.tasks.language_model import LanguageModelExperiment

    advice = "use reefknot bench translation for translators and bench skip-gram for skip-gram"
    experiment = cast(LanguageModelExperiment, recipe.experiment(row, "language_model", advice))
    text, vocabulary = _open_text(experiment, data)
    build = partial(build_model, experiment, vocabulary)
    return Job(row.name, experiment.training, build, text, experiment.carries_state)


def _open_text(experiment: LanguageModelExperiment, data: Path | None) -> tuple[Text, Vocabulary | int]:
    """Return the text of the corpus with its vocabulary, or a random text with the size of its vocabulary.

    The random text is used if the corpus is not on this machine. It has ids but no letters, so a model that reads
    sub-words or spellings needs the corpus itself.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.bench.steps import Text
    from reefknot.lab.cli.sizes import TextCache
    from reefknot.lab.config.parts import INPUTS
    from reefknot.lab.text.corpora import known_corpus
    from reefknot.lab.text.dataset import open_dataset

    try:
        dataset = open_dataset(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if INPUTS.has_argument(experiment.input, "spellings"):
            raise
        vocabulary_size = TextCache(data).vocabulary_size(experiment)
        corpus = known_corpus(experiment.corpus.name)
        if corpus is None or "train" not in corpus.tokens:
            raise
        random_text = Text.random(vocabulary_size, corpus.tokens["train"], corpus.name)
        return random_text, vocabulary_size
    return Text.from_dataset(dataset), dataset.vocabulary


def _measure_matrix_rates(device: str, precisions: Iterable[str]) -> dict[str, float]:
    """Measure how many operations per second a GPU reaches in large matrix products, by precision.

    The result is empty on a CPU, where the rate varies because other programs run at the same time.
    """
    from reefknot.lab.bench.measure import SUSTAINED_SECONDS
    from reefknot.lab.training.throughput import measure_matrix_rate
    from reefknot.lab.training.update import AUTOCAST_DTYPES

    if device == "cpu":
        return {}
    rates = {}
    for precision in dict.fromkeys(precisions):
        rates[precision] = measure_matrix_rate(device, AUTOCAST_DTYPES[precision], 2 * SUSTAINED_SECONDS)
    return rates


def _format_update(row: ModeMeasurement) -> str:
    """Describe the tokens of one update, such as "20 streams of 35 steps"."""
    parts = f", in {row.accumulate} parts" if row.accumulate > 1 else ""
    if row.batching == "sentences":
        return f"sentences, {row.batch} x {row.steps} tokens at most{parts}"
    return f"{row.batch} {row.batching} of {row.steps} steps{parts}"


def _format_cells(row: ModeMeasurement) -> dict[str, str]:
    """Return the cells by column title. A cell is empty if its value was not measured."""
    tflops = None if row.flops is None else row.flops / 1e12
    return {
        "mode": row.mode,
        "ms": printing.format_number(row.ms),
        "tokens/s": printing.format_integer(row.tokens_per_second),
        "s/epoch": printing.format_number(row.epoch_seconds),
        "GiB": printing.format_gib(row.memory_bytes),
        "TFLOP/s": printing.format_number(tflops),
        "of rate": printing.format_percent(row.matrix_share),
        "encoder": printing.format_percent(row.encoder_share),
        "ends": printing.format_percent(row.ends_share),
        "x baseline": printing.format_number(row.over_baseline),
        "x compiled": printing.format_number(row.over_compiled),
        "x first": printing.format_number(row.over_first),
    }
