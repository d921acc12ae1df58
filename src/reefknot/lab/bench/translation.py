"""Translators of a recipe's rows, trained and searched: `reefknot bench translation [RECIPE]`.

Training: updates on the same pairs, as people write them around nn.Transformer with all scores stored, then ours, then
ours captured as a CUDA graph, all in one run. Sizes, drop rates, ties, precision, clipping and optimiser are the row's;
the rate is 0, or as good as that. A row that nn.Transformer has no form for is measured without it.

Decoding: the beam search that people write, which computes the whole prefix of every hypothesis in every step, then
ours, which keeps what a step has computed, then ours with its steps replayed as a CUDA graph. All use the row's model
and find the same. It is not trained, so where it would end a sentence means nothing: the bias of <eos> keeps it from
that, and a translation has as many tokens as its source. A batch is decoded again and again, so the graph is there
already, as it is where batches of one shape follow each other.

Memory is the most that is allocated on the GPU, weights and optimiser included; it is not measured on a CPU.

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

from reefknot.errors import CorpusNotFound, SettingsError
from reefknot.lab.bench.measure import Absent, give_back, reason, work_times
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_anew
from reefknot.lab.bench.steps import CAPTURED, EAGER, prepare_update
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search
from reefknot.lab.evaluation.decoding import decoding
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.recipes.recipe import Recipe
from reefknot.lab.recipes.recipe import Row as RecipeRow
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import Lines, open_pairs
from reefknot.lab.text.vocabulary import Sides
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.models.translator import Translator, sides

RECIPE, ROW = "pappas2019/multi30k", "TWWT"
"""What is measured where nothing is named."""
TRAINING, DECODING = "training", "decoding"
PLAIN, ANEW, CACHED = "nn.Transformer", "whole prefix", "cached"
WINDOWS = {"cuda": 16, "cpu": 1}
"""Batches of pairs that are trained on again and again."""
SENTENCES = {"cuda": 128, "cpu": 8}
"""Sources that are translated together."""
NEVER = -1e4
"""A score that no class has."""
RANDOM_PAIRS, SHORTEST, LONGEST = 20_000, 8, 48
"""Of made-up text, where a corpus is not here: pairs, and tokens of their sides."""

Window = tuple[Tensor, Tensor, int]
"""x_BU, y_BT and the number of targets."""


@dataclass(frozen=True)
class Job:
    """A row of a recipe: how its model is built, trained and searched with, and on which pairs."""

    name: str
    settings: TrainingSettings
    build: Callable[[], Translator]
    batches: PairBatches
    eos: int
    search: SearchSettings
    told: str
    """What the pairs are, for people."""

    def windows(self, device: str) -> list[Window]:
        first = range(min(WINDOWS[device], self.batches.windows))
        return [(*self.batches.window(index), self.batches.count(index)) for index in first]


@dataclass(frozen=True)
class Row:
    """What was measured of one row in one way, or why nothing was."""

    row: str
    what: str
    mode: str
    ms: float | None = None
    """Of an update, or of the search for the translations of a batch: the median."""
    repeats: int = 0
    tokens_per_second: float | None = None
    """Target tokens."""
    memory_bytes: int | None = None
    over_baseline: float | None = None
    """Its time over that of the first way."""
    same: float | None = None
    """Share of the translations that are those of the first way."""
    note: str = ""
    """Why something was not measured."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def job_of(loaded: Recipe, row: RecipeRow, data: Path | None) -> Job:
    """A row with its pairs, or, where a published corpus is not here, with random ones of as many sub-words."""
    experiment = loaded.language_model(row)
    if experiment.corpus.pairs is None:
        raise SettingsError(f'{loaded.asked}, row "{row.name}": a language model; use reefknot bench steps')
    settings = experiment.training
    try:
        dataset = open_pairs(experiment.corpus, experiment.vocabulary, data=data)
    except CorpusNotFound:
        if experiment.vocabulary.bpe is None:
            raise
        number = experiment.vocabulary.bpe.merges
        words, eos, lines = Sides(number, number), 0, random_pairs(number)
        told = f"{experiment.corpus.name} is not here: random pairs of {number:,} types"
    else:
        assert dataset.vocabulary.eos is not None  # no line of pairs is without
        train = dataset.splits["train"]
        words, eos, lines, told = dataset.words, dataset.vocabulary.eos, (train.source, train.target), dataset.summary
    batches = PairBatches(*lines, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    wanted = (experiment.evaluation.search or SearchSettings()).model_copy(
        update={"longest": 1.0, "beyond": 0, "early_stop": True}
    )

    def build() -> Translator:
        return cast(Translator, loaded.build(row, words))

    return Job(row.name, settings, build, batches, eos, wanted, told)


def random_pairs(words: int) -> tuple[Lines, Lines]:
    """Sources and targets by Zipf's law, p(word v) proportional to 1 / (v + 1); the first word ends a line."""
    random = np.random.default_rng(0)
    unigram_V = np.cumsum(1.0 / np.arange(1, words))
    lengths = random.integers(SHORTEST, LONGEST, RANDOM_PAIRS)

    def side() -> Lines:
        drawn = (np.searchsorted(unigram_V, unigram_V[-1] * random.random(length)) for length in lengths)
        return Lines.of([*(1 + ids).tolist(), 0] for ids in drawn)

    return side(), side()


def measure_all(jobs: Sequence[Job], device: str, seconds: float, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """The rows of every job, training then decoding, as soon as they are measured."""
    for job in jobs:
        say(job.name)
        captured = [CAPTURED] if device == "cuda" else []
        trained = [PLAIN, EAGER, *captured]
        yield _compared([_measure(job, TRAINING, mode, _train, device, seconds, say)[0] for mode in trained])
        modes = [ANEW, CACHED, *captured]
        searched = [_measure(job, DECODING, mode, _search, device, seconds, say) for mode in modes]
        yield _compared([replace(row, same=_alike(found, searched[0][1])) for row, found in searched])


def _compared(rows: Sequence[Row]) -> list[Row]:
    first = rows[0].ms
    return [replace(row, over_baseline=row.ms / first if row.ms and first else None) for row in rows]


def _alike(found: Sequence[Hypothesis], first: Sequence[Hypothesis]) -> float | None:
    if not found or not first:
        return None
    return sum(one.ids == other.ids for one, other in zip(found, first, strict=True)) / len(found)


@dataclass
class _Work:
    """One pass of what is timed: how many target tokens and parts it has, and what it found."""

    run: Callable[[], object]
    tokens: Callable[[], int]
    parts: int = 1
    found: Callable[[], Sequence[Hypothesis]] = tuple


def _measure(
    job: Job,
    what: str,
    mode: str,
    prepare: Callable[[Job, str, torch.device], AbstractContextManager[_Work]],
    device: str,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[Row, Sequence[Hypothesis]]:
    say(f"  {what}, {mode}")
    row = Row(job.name, what, mode)
    try:
        if device == "cuda":
            give_back()
        with prepare(job, mode, torch.device(device)) as work:
            if device == "cuda":
                # Warming up counts too: while a graph is replayed, nothing is allocated that could be counted.
                torch.cuda.reset_peak_memory_stats()
            (spent,) = work_times(device, [(work.run, lambda: None)], seconds)
            ms = median(spent)
            speed = 1e3 * work.tokens() / ms
            memory = peak_memory_bytes(device) if device == "cuda" else None
            return replace(
                row, ms=ms / work.parts, repeats=len(spent), tokens_per_second=speed, memory_bytes=memory
            ), work.found()
    except Exception as error:  # the run goes on
        return replace(row, note=reason(error)), ()


def _model(job: Job, device: torch.device) -> Translator:
    set_determinism(job.settings.determinism)
    seed_everything(job.settings.seed)
    return job.build().to(device)


@contextmanager
def _train(job: Job, mode: str, device: torch.device) -> Iterator[_Work]:
    """Updates on the first windows."""
    windows = job.windows(device.type)
    model = _model(job, device).train()
    settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
    if mode == PLAIN:
        plain = PlainTraining(PlainTranslator(model), settings, device)

        def run() -> None:
            for window in windows:
                plain(*window)
    else:
        update = prepare_update(model, settings, World(device=device), job.batches.batch)
        if mode == CAPTURED and not update.captured:
            raise Absent("a part of the model asks the device for a number, so there is nothing to capture")

        def run() -> None:
            for x_BU, y_BT, count in windows:
                update(x_BU, y_BT, 0.0, count)

    tokens = sum(count for *_, count in windows)
    yield _Work(run, lambda: tokens, len(windows))


@contextmanager
def _search(job: Job, mode: str, device: torch.device) -> Iterator[_Work]:
    """The translations of some sources of the first window."""
    model = _model(job, device).eval()
    classifier = getattr(model.output, "classifier", None)
    if isinstance(classifier, Classifier) and classifier.bias is not None:
        classifier.bias.data[job.eos] = NEVER
    x_BU, y_BT, _ = job.windows(device.type)[0]
    source_BS = sides(x_BU, y_BT)[0][: SENTENCES[device.type]].to(device)
    found: list[Hypothesis] = []
    with autocast(device, job.settings.precision), decoding(model, fixed=mode == CAPTURED) as decoder:
        if mode == CAPTURED and decoder.graphs is None:
            raise Absent("a part of the model asks the device for a number, so there is nothing to capture")

        def run() -> None:
            if mode == ANEW:
                found[:] = search_anew(model, source_BS, job.eos, job.search)
            else:
                found[:] = [best for best, *_ in beam_search(decoder, source_BS, job.eos, job.search)]

        yield _Work(run, lambda: sum(len(each.ids) + each.finished for each in found), found=lambda: found)
