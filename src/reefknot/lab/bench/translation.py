"""Measure training and decoding of a recipe's translators: `reefknot bench translation [RECIPE]`.

Training: updates on the same pairs in three modes, all in one run: nn.Transformer with all scores stored, our model,
and our model captured as a CUDA graph. All use the row's sizes, dropout, ties, precision, clipping and optimiser. The
learning rate is 0, or nearly 0. A row that nn.Transformer cannot express is measured without it.

Decoding: three modes of beam search, which use the row's model and find the same translations. The first computes the
whole prefix of every hypothesis in every step. The second is our search, which has a KV cache. The third is our search
with its steps replayed as a CUDA graph. The model is not trained, so it would end sentences at random. Therefore the
bias of <eos> prevents it from ending a sentence, and a translation has as many tokens as its source. The same batch is
decoded repeatedly, so the graph is already captured, as it is when batches of the same shape follow each other.

Memory is the peak of the memory allocated on the GPU, including weights and optimiser. It is not measured on a CPU.

Shapes: B pairs, S source tokens, T target tokens, U = S + T.
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
from reefknot.lab.bench.measure import Absent, free_gpu_memory, ratio, reason, work_times
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_without_cache
from reefknot.lab.bench.steps import CAPTURED, EAGER, NOT_CAPTURED, prepare_update
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

RECIPE, ROW = "pappas2019/multi30k", "TWWT"
"""The default recipe and row."""
TRAINING, DECODING = "training", "decoding"
PLAIN, UNCACHED, CACHED = "nn.Transformer", "whole prefix", "cached"
WINDOWS = {"cuda": 16, "cpu": 1}
"""The number of batches of pairs that are trained on repeatedly."""
SENTENCES = {"cuda": 128, "cpu": 8}
"""The number of sources that are translated together."""
NEVER = -1e4
"""A bias that keeps a class from being chosen."""
RANDOM_PAIRS, SHORTEST, LONGEST = 20_000, 8, 48
"""The number of random pairs if the corpus was not found, and the limits of the tokens on a side."""

Window = tuple[Tensor, Tensor, int]
"""x_BU, y_BT, and the number of targets."""


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its settings of training and search, a function that builds its model, and the pairs."""

    name: str
    settings: TrainingSettings
    build: Callable[[], Translator]
    batches: PairBatches
    eos: int
    search: SearchSettings
    description: str
    """Human-readable description of the pairs, in one line."""

    def windows(self, device: str) -> list[Window]:
        first = range(min(WINDOWS[device], self.batches.num_windows))
        return [(*self.batches.window(index), self.batches.count_targets(index)) for index in first]


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


def job_of(loaded: Recipe, row: RecipeRow, data: Path | None) -> Job:
    """Return a row with its pairs.

    If the corpus was not found, the pairs are random, with a vocabulary of the same number of sub-words.
    """
    experiment = cast(
        TranslationExperiment, loaded.experiment(row, "translation", "use reefknot bench steps for language models")
    )
    settings = experiment.training
    try:
        dataset = open_pairs(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if experiment.vocabulary.bpe is None:
            raise
        number = experiment.vocabulary.bpe.merges
        words, eos, lines = VocabularyPair(number, number), 0, random_pairs(number)
        description = f"{experiment.corpus.name} not found: random pairs of {number:,} types"
    else:
        assert dataset.vocabulary.eos is not None  # every line of a pair ends with it
        train = dataset.splits["train"]
        words, eos, lines = dataset.vocabulary_pair, dataset.vocabulary.eos, (train.source, train.target)
        description = dataset.summary
    batches = PairBatches(*lines, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    search = experiment.search.model_copy(update={"longest": 1.0, "beyond": 0, "early_stop": True})

    def build() -> Translator:
        return cast(Translator, loaded.build(row, words))

    return Job(row.name, settings, build, batches, eos, search, description)


def random_pairs(words: int) -> tuple[Lines, Lines]:
    """Draw sources and targets by Zipf's law, p(word v) proportional to 1 / (v + 1). The first word ends a line."""
    random = np.random.default_rng(0)
    unigram_V = np.cumsum(1.0 / np.arange(1, words))
    lengths = random.integers(SHORTEST, LONGEST, RANDOM_PAIRS)

    def side() -> Lines:
        lines = (np.searchsorted(unigram_V, unigram_V[-1] * random.random(length)) for length in lengths)
        return Lines.from_lists([*(1 + ids).tolist(), 0] for ids in lines)

    return side(), side()


def measure_all(jobs: Sequence[Job], device: str, seconds: float, notify: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows of every job: first the rows of training, then the rows of decoding."""
    for job in jobs:
        notify(job.name)
        captured = [CAPTURED] if device == "cuda" else []
        modes = [PLAIN, EAGER, *captured]
        yield _compared([_measure(job, TRAINING, mode, _train, device, seconds, notify)[0] for mode in modes])
        modes = [UNCACHED, CACHED, *captured]
        searches = [_measure(job, DECODING, mode, _search, device, seconds, notify) for mode in modes]
        baseline = searches[0][1]
        yield _compared([replace(row, same=_share_equal(best, baseline)) for row, best in searches])


def _compared(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, over_baseline=ratio(row.ms, rows[0].ms)) for row in rows]


def _share_equal(best: Sequence[Hypothesis], baseline: Sequence[Hypothesis]) -> float | None:
    if not best or not baseline:
        return None
    return sum(one.ids == other.ids for one, other in zip(best, baseline, strict=True)) / len(best)


@dataclass
class _Work:
    """The work that is timed."""

    run: Callable[[], object]
    tokens: Callable[[], int]
    """Returns the number of target tokens of a run."""
    parts: int = 1
    """The number of updates of a run."""
    translations: Callable[[], Sequence[Hypothesis]] = tuple
    """Returns the translations of the last run."""


def _measure(
    job: Job,
    what: str,
    mode: str,
    prepare: Callable[[Job, str, torch.device], AbstractContextManager[_Work]],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> tuple[Row, Sequence[Hypothesis]]:
    notify(f"  {what}, {mode}")
    row = Row(job.name, what, mode)
    try:
        if device == "cuda":
            free_gpu_memory()
        with prepare(job, mode, torch.device(device)) as work:
            if device == "cuda":
                # The warm-up counts too: a graph that is replayed allocates nothing that could be counted.
                torch.cuda.reset_peak_memory_stats()
            (milliseconds,) = work_times(device, [(work.run, lambda: None)], seconds)
            ms = median(milliseconds)
            speed = 1e3 * work.tokens() / ms
            memory = peak_memory_bytes(device) if device == "cuda" else None
            row = replace(
                row, ms=ms / work.parts, repeats=len(milliseconds), tokens_per_second=speed, memory_bytes=memory
            )
            return row, work.translations()
    except Exception as error:  # the other rows are still measured
        return replace(row, note=reason(error)), ()


def _model(job: Job, device: torch.device) -> Translator:
    set_determinism(job.settings.determinism)
    seed_everything(job.settings.seed)
    return job.build().to(device)


@contextmanager
def _train(job: Job, mode: str, device: torch.device) -> Iterator[_Work]:
    """Prepare updates on the first windows."""
    windows = job.windows(device.type)
    model = _model(job, device).train()
    settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
    if mode == PLAIN:
        plain = PlainTraining(PlainTranslator(model), settings, device)

        def run() -> None:
            for window in windows:
                plain(*window)
    else:
        update = prepare_update(model, settings, World(device=device), job.batches.batch_size)
        if mode == CAPTURED and not update.uses_graphs:
            raise Absent(NOT_CAPTURED)

        def run() -> None:
            for x_BU, y_BT, count in windows:
                update(x_BU, y_BT, 0.0, count)

    tokens = sum(count for *_, count in windows)
    yield _Work(run, lambda: tokens, len(windows))


@contextmanager
def _search(job: Job, mode: str, device: torch.device) -> Iterator[_Work]:
    """Prepare the search for translations of some sources of the first window."""
    model = _model(job, device).eval()
    classifier = getattr(model.output, "classifier", None)
    if isinstance(classifier, Classifier) and classifier.bias is not None:
        classifier.bias.data[job.eos] = NEVER
    x_BU, y_BT, _ = job.windows(device.type)[0]
    source_BS = split_sides(x_BU, y_BT)[0][: SENTENCES[device.type]].to(device)
    translations: list[Hypothesis] = []
    with autocast(device, job.settings.precision), decoding(model, fixed=mode == CAPTURED) as decoder:
        if mode == CAPTURED and decoder.graphs is None:
            raise Absent(NOT_CAPTURED)

        def run() -> None:
            if mode == UNCACHED:
                translations[:] = search_without_cache(model, source_BS, job.eos, job.search)
            else:
                translations[:] = [best for best, *_ in beam_search(decoder, source_BS, job.eos, job.search)]

        def tokens() -> int:
            return sum(len(best.ids) + best.finished for best in translations)

        yield _Work(run, tokens, translations=lambda: translations)
