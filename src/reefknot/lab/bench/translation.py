"""Measure training and decoding of translation models: `reefknot bench translation [RECIPE]`.

A recipe is a TOML file with experiments, which are called rows. Every row has a model. `measure_all` is the main
function: it yields two tables per row, with one line per mode.

    training    nn.Transformer  plain torch, which stores the scores of all classes
                eager           reefknot's model
                captured        reefknot's model, captured as a CUDA graph
    decoding    whole prefix    every step of the beam search computes the whole prefix of every hypothesis
                cached          reefknot's beam search, which has a KV cache
                captured        reefknot's beam search, with its steps replayed as a CUDA graph

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

from reefknot.errors import CorpusNotFound
from reefknot.lab.bench.measure import Unavailable, describe_error, divide, free_gpu_memory, time_with_memory
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_without_cache
from reefknot.lab.bench.steps import CAPTURED, EAGER, NOT_CAPTURABLE, Window, first_windows, prepare_update
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search
from reefknot.lab.evaluation.decoding import decoding
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.recipes.recipe import Recipe, Row
from reefknot.lab.tasks.translation import TranslationExperiment
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import Lines, open_pairs
from reefknot.lab.text.vocabulary import VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.models.translator import Translator, split_sides

DEFAULT_RECIPE = "pappas2019/multi30k"
DEFAULT_ROW = "TWWT"
TRAINING = "training"
DECODING = "decoding"
PLAIN = "nn.Transformer"
"""A mode of training."""
UNCACHED = "whole prefix"
"""A mode of decoding."""
CACHED = "cached"
"""A mode of decoding."""
MAX_WINDOWS = {"cuda": 16, "cpu": 1}
"""The largest number of windows (batches of sentence pairs) that are trained on repeatedly."""
NUM_SOURCES = {"cuda": 128, "cpu": 8}
"""The number of source sentences that are translated together."""
EXCLUDING_BIAS = -1e4
"""A bias that keeps a class from being chosen."""
NUM_RANDOM_PAIRS = 20_000
"""The number of random pairs if the corpus was not found."""
MIN_RANDOM_LENGTH = 8
"""The smallest number of words on each side of a random pair, without <eos>."""
MAX_RANDOM_LENGTH = 48
"""Random pairs have fewer words than this on each side, without <eos>."""


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its training and search settings, a function that builds its model, and the sentence pairs."""

    name: str
    settings: TrainingSettings
    build_model: Callable[[], Translator]
    batches: PairBatches
    eos: int
    """The id of the token that ends a sentence."""
    search: SearchSettings
    """Settings of the beam search."""
    description: str
    """Human-readable description of the pairs, in one line."""

    def windows(self, device: str) -> list[Window]:
        """Return the first windows, which are trained on repeatedly."""
        return first_windows(self.batches, min(MAX_WINDOWS[device], self.batches.num_windows))


@dataclass(frozen=True)
class ModeMeasurement:
    """The measurements of a row in one mode, or the reason why there are none."""

    row: str
    """The name of the row."""
    what: str
    """What is measured: `training` or `decoding`."""
    mode: str
    ms: float | None = None
    """Median time of an update, or of decoding a batch, in milliseconds."""
    repeats: int = 0
    tokens_per_second: float | None = None
    """Target tokens per second."""
    memory_bytes: int | None = None
    """The peak of the memory allocated on the GPU, with weights and optimiser. It is not measured on a CPU."""
    over_baseline: float | None = None
    """Time divided by the time of the first mode."""
    same: float | None = None
    """Share of translations that are equal to the translations of the first mode."""
    note: str = ""
    """The reason why something was not measured."""

    def record(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values."""
        return asdict(self)


def build_job(recipe: Recipe, row: Row, data: Path | None) -> Job:
    """Combine a row of a recipe with its sentence pairs.

    If the corpus was not found, the pairs are random, with a vocabulary of the same number of sub-words.
    """
    advice = "use reefknot bench steps for language models"
    experiment = cast(TranslationExperiment, recipe.experiment(row, "translation", advice))
    settings = experiment.training

    # Open the sentence pairs of the corpus, or sample random pairs.
    try:
        dataset = open_pairs(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if experiment.vocabulary.bpe is None:
            raise
        vocab_size = experiment.vocabulary.bpe.merges
        vocabularies = VocabularyPair(vocab_size, vocab_size)
        eos = 0
        source, target = sample_pairs(vocab_size)
        description = f"{experiment.corpus.name} not found: random pairs of {vocab_size:,} types"
    else:
        assert dataset.vocabulary.eos is not None  # every line of a pair ends with it
        vocabularies = dataset.vocabulary_pair
        eos = dataset.vocabulary.eos
        source = dataset.splits["train"].source
        target = dataset.splits["train"].target
        description = dataset.summary

    batches = PairBatches(source, target, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    # A translation has at most as many tokens as its source.
    search = experiment.search.model_copy(update={"longest": 1.0, "beyond": 0, "early_stop": True})

    def build_model() -> Translator:
        return cast(Translator, recipe.build(row, vocabularies))

    return Job(row.name, settings, build_model, batches, eos, search, description)


def sample_pairs(vocab_size: int) -> tuple[Lines, Lines]:
    """Return random sources and random targets.

    Words follow Zipf's law: p(word v) is proportional to 1 / v. Word 0 ends every line.
    """
    generator = np.random.default_rng(0)
    cumulative_V = np.cumsum(1.0 / np.arange(1, vocab_size))
    lengths = generator.integers(MIN_RANDOM_LENGTH, MAX_RANDOM_LENGTH, NUM_RANDOM_PAIRS)

    def sample_side() -> Lines:
        lines = []
        for length in lengths:
            uniform = generator.random(length)
            ids = 1 + np.searchsorted(cumulative_V, cumulative_V[-1] * uniform)
            lines.append([*ids.tolist(), 0])
        return Lines.from_lists(lines)

    source = sample_side()
    target = sample_side()
    return source, target


def measure_all(
    jobs: Sequence[Job], device: str, seconds: float, notify: Callable[[str], None]
) -> Iterator[list[ModeMeasurement]]:
    """Yield the measurements of every job: first the modes of training, then the modes of decoding."""
    graph_modes = [CAPTURED] if device == "cuda" else []
    for job in jobs:
        notify(job.name)

        training_measurements = []
        for mode in (PLAIN, EAGER, *graph_modes):
            measurement, _ = _measure_mode(job, TRAINING, mode, _prepare_training, device, seconds, notify)
            training_measurements.append(measurement)
        yield _add_ratios(training_measurements)

        decoding_measurements = []
        baseline_translations: Sequence[Hypothesis] = ()
        for mode in (UNCACHED, CACHED, *graph_modes):
            measurement, translations = _measure_mode(job, DECODING, mode, _prepare_decoding, device, seconds, notify)
            if mode == UNCACHED:
                baseline_translations = translations
            same = _share_equal(translations, baseline_translations)
            decoding_measurements.append(replace(measurement, same=same))
        yield _add_ratios(decoding_measurements)


def _add_ratios(measurements: Sequence[ModeMeasurement]) -> list[ModeMeasurement]:
    """Return the measurements with their times divided by the time of the first mode."""
    baseline_ms = measurements[0].ms
    return [replace(measurement, over_baseline=divide(measurement.ms, baseline_ms)) for measurement in measurements]


def _share_equal(translations: Sequence[Hypothesis], baseline: Sequence[Hypothesis]) -> float | None:
    """Return the share of translations that are equal to the baseline's, or None if there are none."""
    if not translations or not baseline:
        return None
    num_equal = sum(
        translation.ids == expected.ids for translation, expected in zip(translations, baseline, strict=True)
    )
    return num_equal / len(translations)


@dataclass
class _Workload:
    """The work that is timed."""

    run: Callable[[], object]
    """Trains on all windows, or translates all sources."""
    count_tokens: Callable[[], int]
    """Returns the number of target tokens of a run."""
    num_updates: int = 1
    """The number of updates of a run."""
    get_translations: Callable[[], Sequence[Hypothesis]] = tuple
    """Returns the translations of the last run. Training has none."""


def _measure_mode(
    job: Job,
    what: str,
    mode: str,
    prepare: Callable[[Job, str, torch.device], AbstractContextManager[_Workload]],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> tuple[ModeMeasurement, Sequence[Hypothesis]]:
    """Return the measurement of one mode, and the translations if `what` is decoding.

    An exception becomes the note of the measurement.
    """
    notify(f"  {what}, {mode}")
    measurement = ModeMeasurement(job.name, what, mode)
    try:
        if device == "cuda":
            free_gpu_memory()
        with prepare(job, mode, torch.device(device)) as workload:
            milliseconds, memory_bytes = time_with_memory(workload.run, device, seconds)
            run_ms = median(milliseconds)
            measurement = replace(
                measurement,
                ms=run_ms / workload.num_updates,
                repeats=len(milliseconds),
                tokens_per_second=1e3 * workload.count_tokens() / run_ms,
                memory_bytes=memory_bytes,
            )
            return measurement, workload.get_translations()
    except Exception as error:  # the other modes are still measured
        return replace(measurement, note=describe_error(error)), ()


@contextmanager
def _prepare_training(job: Job, mode: str, device: torch.device) -> Iterator[_Workload]:
    """Prepare updates on the first windows.

    All modes have the row's sizes, dropout, ties, precision, clipping and optimiser, and a learning rate of (nearly) 0.
    It is an error if `mode` is `PLAIN` and nn.Transformer cannot express the row's model.
    """
    windows = job.windows(device.type)
    model = _build_model(job, device).train()
    settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
    if mode == PLAIN:
        train_plain = PlainTraining(PlainTranslator(model), settings, device)

        def run() -> None:
            for window in windows:
                train_plain(window.inputs, window.targets, window.num_targets)
    else:
        update = prepare_update(model, settings, World(device=device), job.batches.batch_size)
        if mode == CAPTURED and not update.uses_graphs:
            raise Unavailable(NOT_CAPTURABLE)

        def run() -> None:
            for window in windows:
                update(window.inputs, window.targets, 0.0, window.num_targets)

    num_tokens = sum(window.num_targets for window in windows)
    yield _Workload(run, lambda: num_tokens, len(windows))


@contextmanager
def _prepare_decoding(job: Job, mode: str, device: torch.device) -> Iterator[_Workload]:
    """Prepare the search for translations of some sources of the first window. All modes find the same translations.

    The same batch is decoded repeatedly, so the graph is already captured when the timing starts, as it is when batches
    of the same shape follow each other.
    """
    model = _build_model(job, device).eval()
    # An untrained model would end sentences at random. Without <eos>, a translation is as long as the search allows.
    classifier = getattr(model.output, "classifier", None)
    if isinstance(classifier, Classifier) and classifier.bias is not None:
        classifier.bias.data[job.eos] = EXCLUDING_BIAS

    window = job.windows(device.type)[0]
    source_BS, _ = split_sides(window.inputs, window.targets)
    source_BS = source_BS[: NUM_SOURCES[device.type]].to(device)
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


def _build_model(job: Job, device: torch.device) -> Translator:
    """Return the row's model with new weights, which depend only on the seed."""
    set_determinism(job.settings.determinism)
    seed_everything(job.settings.seed)
    return job.build_model().to(device)
