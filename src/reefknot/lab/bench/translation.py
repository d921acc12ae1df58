"""Measure training and decoding of translation models: `reefknot bench translation [RECIPE]`.

Every model is a row (one experiment) of a recipe. `measure_all` is the main function: it yields two tables per row,
with one line per mode.

Training: updates on the same sentence pairs, with the row's sizes, dropout, ties, precision, clipping and optimiser,
and a learning rate of (nearly) 0. A row that nn.Transformer cannot express is measured without it.

    nn.Transformer  plain torch, which stores the scores of all classes
    eager           reefknot's model
    captured        reefknot's model, captured as a CUDA graph

Decoding: beam search with the row's model. All modes find the same translations.

    whole prefix    every step computes the whole prefix of every hypothesis
    cached          reefknot's search, which has a KV cache
    captured        reefknot's search, with its steps replayed as a CUDA graph

An untrained model would end sentences at random. Therefore the bias of <eos> prevents it from ending a sentence, and a
translation has as many tokens as its source. The same batch is decoded repeatedly, so the graph is already captured, as
it is when batches of the same shape follow each other.

Memory is the peak of the memory allocated on the GPU, including weights and optimiser. It is not measured on a CPU.

Shapes: B pairs, S source tokens, T target tokens, U = S + T, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import CorpusNotFound
from reefknot.lab.bench.measure import Unavailable, describe_error, divide, free_gpu_memory, time_function
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_without_cache
from reefknot.lab.bench.steps import CAPTURED, EAGER, NOT_CAPTURABLE, prepare_update
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search
from reefknot.lab.evaluation.decoding import decoding
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.recipes.recipe import Recipe
from reefknot.lab.recipes.recipe import Row as RecipeRow
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.tasks.translation import TranslationExperiment
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import Lines, open_pairs
from reefknot.lab.text.vocabulary import VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.models.translator import Translator, split_sides

DEFAULT_RECIPE, DEFAULT_ROW = "pappas2019/multi30k", "TWWT"
TRAINING, DECODING = "training", "decoding"
PLAIN, UNCACHED, CACHED = "nn.Transformer", "whole prefix", "cached"
MAX_WINDOWS = {"cuda": 16, "cpu": 1}
"""The number of batches of pairs that are trained on repeatedly."""
NUM_SOURCES = {"cuda": 128, "cpu": 8}
"""The number of source sentences that are translated together."""
EXCLUDING_BIAS = -1e4
"""A bias that keeps a class from being chosen."""
NUM_RANDOM_PAIRS = 20_000
"""The number of random pairs if the corpus was not found."""
MIN_RANDOM_LENGTH, MAX_RANDOM_LENGTH = 8, 48
"""Limits of the tokens on each side of a random pair."""

Window = tuple[Tensor, Tensor, int]
"""pairs_BU, targets_BT, and the number of targets."""


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its settings of training and search, a function that builds its model, and the pairs."""

    name: str
    settings: TrainingSettings
    build_model: Callable[[], Translator]
    batches: PairBatches
    eos: int
    search: SearchSettings
    description: str
    """Human-readable description of the pairs, in one line."""

    def windows(self, device: str) -> list[Window]:
        """Return the first windows, which are trained on repeatedly."""
        num_windows = min(MAX_WINDOWS[device], self.batches.num_windows)
        return [(*self.batches.window(index), self.batches.count_targets(index)) for index in range(num_windows)]


@dataclass(frozen=True)
class Row:
    """The measurements of a row in one mode, or the reason why there are none."""

    row: str
    what: str
    """What is measured: `training` or `decoding`."""
    mode: str
    ms: float | None = None
    """Median time of an update, or of decoding a batch, in milliseconds."""
    repeats: int = 0
    tokens_per_second: float | None = None
    """Target tokens per second."""
    memory_bytes: int | None = None
    over_baseline: float | None = None
    """Time divided by the time of the first mode."""
    same: float | None = None
    """Share of translations that are equal to the translations of the first mode."""
    note: str = ""
    """The reason why something was not measured."""

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def build_job(recipe: Recipe, row: RecipeRow, data: Path | None) -> Job:
    """Combine a row of a recipe with its sentence pairs.

    If the corpus was not found, the pairs are random, with a vocabulary of the same number of sub-words.
    """
    experiment = cast(
        TranslationExperiment, recipe.experiment(row, "translation", "use reefknot bench steps for language models")
    )
    settings = experiment.training
    try:
        dataset = open_pairs(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if experiment.vocabulary.bpe is None:
            raise
        vocab_size = experiment.vocabulary.bpe.merges
        vocabularies, eos = VocabularyPair(vocab_size, vocab_size), 0
        source, target = sample_pairs(vocab_size)
        description = f"{experiment.corpus.name} not found: random pairs of {vocab_size:,} types"
    else:
        assert dataset.vocabulary.eos is not None  # every line of a pair ends with it
        train = dataset.splits["train"]
        vocabularies, eos = dataset.vocabulary_pair, dataset.vocabulary.eos
        source, target = train.source, train.target
        description = dataset.summary
    batches = PairBatches(source, target, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    search = experiment.search.model_copy(update={"longest": 1.0, "beyond": 0, "early_stop": True})

    def build_model() -> Translator:
        return cast(Translator, recipe.build(row, vocabularies))

    return Job(row.name, settings, build_model, batches, eos, search, description)


def sample_pairs(vocab_size: int) -> tuple[Lines, Lines]:
    """Sample sources and targets by Zipf's law, p(word v) proportional to 1 / (v + 1). The first word ends a line."""
    generator = np.random.default_rng(0)
    cumulative_V = np.cumsum(1.0 / np.arange(1, vocab_size))
    lengths = generator.integers(MIN_RANDOM_LENGTH, MAX_RANDOM_LENGTH, NUM_RANDOM_PAIRS)

    def sample_side() -> Lines:
        lines = (np.searchsorted(cumulative_V, cumulative_V[-1] * generator.random(length)) for length in lengths)
        return Lines.from_lists([*(1 + ids).tolist(), 0] for ids in lines)

    return sample_side(), sample_side()


def measure_all(jobs: Sequence[Job], device: str, seconds: float, notify: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows of every job: first the rows of training, then the rows of decoding."""
    for job in jobs:
        notify(job.name)
        graph_modes = [CAPTURED] if device == "cuda" else []
        training_rows = []
        for mode in (PLAIN, EAGER, *graph_modes):
            row, _ = _measure_mode(job, TRAINING, mode, _prepare_training, device, seconds, notify)
            training_rows.append(row)
        yield _add_ratios(training_rows)
        decoding_rows = []
        baseline_translations: Sequence[Hypothesis] = ()
        for mode in (UNCACHED, CACHED, *graph_modes):
            row, translations = _measure_mode(job, DECODING, mode, _prepare_decoding, device, seconds, notify)
            if mode == UNCACHED:
                baseline_translations = translations
            decoding_rows.append(replace(row, same=_share_equal(translations, baseline_translations)))
        yield _add_ratios(decoding_rows)


def _add_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their times divided by the time of the first mode."""
    return [replace(row, over_baseline=divide(row.ms, rows[0].ms)) for row in rows]


def _share_equal(translations: Sequence[Hypothesis], baseline: Sequence[Hypothesis]) -> float | None:
    """Return the share of translations that are equal to the baseline's, or None if there are none."""
    if not translations or not baseline:
        return None
    equal = [translation.ids == expected.ids for translation, expected in zip(translations, baseline, strict=True)]
    return sum(equal) / len(equal)


@dataclass
class _Workload:
    """The work that is timed."""

    run: Callable[[], object]
    count_tokens: Callable[[], int]
    """Returns the number of target tokens of a run."""
    num_updates: int = 1
    """The number of updates of a run."""
    get_translations: Callable[[], Sequence[Hypothesis]] = tuple
    """Returns the translations of the last run."""


def _measure_mode(
    job: Job,
    what: str,
    mode: str,
    prepare: Callable[[Job, str, torch.device], AbstractContextManager[_Workload]],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> tuple[Row, Sequence[Hypothesis]]:
    """Return the row of one mode, and the translations if `what` is decoding."""
    notify(f"  {what}, {mode}")
    row = Row(job.name, what, mode)
    try:
        if device == "cuda":
            free_gpu_memory()
        with prepare(job, mode, torch.device(device)) as workload:
            if device == "cuda":
                # The warm-up counts too: a graph that is replayed allocates nothing that could be counted.
                torch.cuda.reset_peak_memory_stats()
            milliseconds = time_function(workload.run, device, seconds)
            ms = median(milliseconds)
            row = replace(
                row,
                ms=ms / workload.num_updates,
                repeats=len(milliseconds),
                tokens_per_second=1e3 * workload.count_tokens() / ms,
                memory_bytes=peak_memory_bytes(device) if device == "cuda" else None,
            )
            return row, workload.get_translations()
    except Exception as error:  # the other rows are still measured
        return replace(row, note=describe_error(error)), ()


def _build_model(job: Job, device: torch.device) -> Translator:
    set_determinism(job.settings.determinism)
    seed_everything(job.settings.seed)
    return job.build_model().to(device)


@contextmanager
def _prepare_training(job: Job, mode: str, device: torch.device) -> Iterator[_Workload]:
    """Prepare updates on the first windows."""
    windows = job.windows(device.type)
    model = _build_model(job, device).train()
    settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
    if mode == PLAIN:
        train_plain = PlainTraining(PlainTranslator(model), settings, device)

        def run() -> None:
            for window in windows:
                train_plain(*window)
    else:
        update = prepare_update(model, settings, World(device=device), job.batches.batch_size)
        if mode == CAPTURED and not update.uses_graphs:
            raise Unavailable(NOT_CAPTURABLE)

        def run() -> None:
            for pairs_BU, targets_BT, count in windows:
                update(pairs_BU, targets_BT, 0.0, count)

    num_tokens = sum(count for *_, count in windows)
    yield _Workload(run, lambda: num_tokens, len(windows))


@contextmanager
def _prepare_decoding(job: Job, mode: str, device: torch.device) -> Iterator[_Workload]:
    """Prepare the search for translations of some sources of the first window."""
    model = _build_model(job, device).eval()
    classifier = getattr(model.output, "classifier", None)
    if isinstance(classifier, Classifier) and classifier.bias is not None:
        classifier.bias.data[job.eos] = EXCLUDING_BIAS
    pairs_BU, targets_BT, _ = job.windows(device.type)[0]
    source_BS = split_sides(pairs_BU, targets_BT)[0][: NUM_SOURCES[device.type]].to(device)
    translations: list[Hypothesis] = []
    with autocast(device, job.settings.precision), decoding(model, fixed=mode == CAPTURED) as decoder:
        if mode == CAPTURED and decoder.graphs is None:
            raise Unavailable(NOT_CAPTURABLE)

        def run() -> None:
            if mode == UNCACHED:
                translations[:] = search_without_cache(model, source_BS, job.eos, job.search)
            else:
                translations[:] = [best for best, *_ in beam_search(decoder, source_BS, job.eos, job.search)]

        def count_tokens() -> int:
            return sum(len(best.ids) + best.finished for best in translations)

        yield _Workload(run, count_tokens, get_translations=lambda: translations)
