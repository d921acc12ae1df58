"""What is found out about a trained model: its scores, what it puts near each other, what it writes. All of it is
result.json, which reports and comparisons read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import numpy as np
import torch

from reefknot.kernels.skip_gram_draws import learned
from reefknot.lab.evaluation import translation
from reefknot.lab.evaluation.beam import SearchSettings
from reefknot.lab.evaluation.bleu import BleuSettings, open_metrics
from reefknot.lab.evaluation.frequency import loss_by_frequency
from reefknot.lab.evaluation.generation import generate, prompt_ids
from reefknot.lab.evaluation.neighbors import examples, nearest_words
from reefknot.lab.evaluation.pairs import score_pairs
from reefknot.lab.evaluation.pca import EXAMPLES as DRAWN
from reefknot.lab.evaluation.pca import embedding
from reefknot.lab.evaluation.perplexity import Score, score
from reefknot.lab.evaluation.protocols import Counting, protocol, score_by_protocol
from reefknot.lab.evaluation.search import tails_opened
from reefknot.lab.evaluation.similarity import PRESS, Benchmark, judge
from reefknot.lab.evaluation.subspace import between_ends
from reefknot.lab.recipes.recipe import Experiment, Row
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import (
    FORMAT,
    Best,
    Corpus,
    Judgement,
    Neighbors,
    Parameters,
    RunResult,
    Sample,
    Start,
    Subspace,
    Training,
    Translations,
)
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.runs.units import shown
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.pair_dataset import PairDataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.training.distributed import World
from reefknot.lab.training.state import Progress
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.nn.models.translator import Translator
from reefknot.vectors.word_vectors import WordVectors

EXAMPLES = 5
"""Translations that a result shows, with where they looked."""


def score_split(model: LanguageModel, dataset: Dataset | PairDataset, experiment: Experiment, split: str) -> Score:
    """A text scored by our definition, in the precision of training, in the windows of the experiment if it has any;
    of pairs the target, each after its source.

    The training text is long: without windows it is scored in as many streams as it is trained in.
    """
    how: dict[str, Any] = {"precision": experiment.training.precision}
    if isinstance(dataset, PairDataset):
        return score_pairs(cast(Translator, model), dataset.splits[split], dataset.vocabulary, **how)
    if experiment.windows is not None:
        how["windows"] = experiment.windows
    else:
        how["streams"] = experiment.training.batch if split == "train" else experiment.evaluation.streams
    return score(model, dataset.splits[split], dataset.vocabulary, **how)


def check_scoring(experiment: Experiment, dataset: Dataset | PairDataset) -> None:
    """Refuse, before anything is trained, what could not be scored afterwards: texts that the paper's way of counting
    would find nothing in, and BLEU where it cannot be counted."""
    if isinstance(dataset, PairDataset):
        open_metrics(experiment.evaluation.bleu or BleuSettings())
        return
    for split, counting in (_countings(experiment) or {}).items():
        counting.targets(dataset.splits[split])


def _countings(experiment: Experiment) -> dict[str, Counting] | None:
    settings = experiment.training
    return protocol(experiment.evaluation.protocol, settings.batch, settings.steps)


@dataclass(frozen=True)
class Course:
    """How a model came to be: what a result says of that is the same for every kind of model."""

    run: RunFolder
    row: Row
    changed: list[Change]
    """Settings that are not the recipe's."""
    progress: Progress
    world: World


def write_findings(
    model: LanguageModel,
    dataset: Dataset | PairDataset,
    experiment: Experiment,
    course: Course,
    benchmarks: Mapping[str, Benchmark],
) -> RunResult:
    """Score a model that has its best weights and write everything a report or a comparison reads."""
    run, progress = course.run, course.progress
    scores = {split: score_split(model, dataset, experiment, split) for split in ("valid", "test")}
    run.write_scores({split: torch.from_numpy(each.nll) for split, each in scores.items()})
    if isinstance(dataset, PairDataset):
        own = _of_translator(cast(Translator, model), dataset, experiment, run)
    else:
        own = _of_language_model(model, dataset, experiment, scores["test"])
    start = run.config.get("start")
    result = RunResult(
        **_heading(model, dataset, experiment, course),
        task="translation" if isinstance(dataset, PairDataset) else "language_model",
        valid=scores["valid"].summary(),
        test=scores["test"].summary(),
        best=Best(step=progress.best_step, epoch=progress.best_epoch),
        **({"averaged": tuple(averaged)} if (averaged := run.checkpoints.averaged()) else {}),
        start=Start(**start) if start else None,
        training=_training(experiment, course),
        **own,
        **_look_at_ends(model, dataset.vocabulary, benchmarks),
        subspace=subspace(model, dataset.vocabulary) if experiment.evaluation.subspace else None,
    )
    run.write_result(result)
    return result


def write_vector_findings(
    model: SkipGram,
    dataset: Dataset,
    experiment: SkipGramExperiment,
    course: Course,
    benchmarks: Mapping[str, Benchmark],
) -> RunResult:
    """Judge the vectors of skip-gram and write everything a report reads."""
    training = _training(experiment, course).replace(workers=experiment.training.workers)
    result = RunResult(
        **_heading(model, dataset, experiment, course),
        task="skip_gram",
        training=training,
        **_look_at_ends(model, dataset.vocabulary, benchmarks),
    )
    course.run.write_result(result)
    return result


def _heading(
    model: LanguageModel | SkipGram,
    dataset: Dataset | PairDataset,
    experiment: Experiment | SkipGramExperiment,
    course: Course,
) -> dict[str, Any]:
    """What the result of every kind of model begins with."""
    row, counts = course.row, model.parameter_counts()
    return {
        "format": FORMAT,
        **_provenance(course.run, dataset, experiment),
        "parameters": Parameters(total=sum(counts.values()), parts=counts, expected=row.parameters),
        "paper": row.paper,
        "paper_similarity": row.paper_similarity,
        "changed": tuple(course.changed),
    }


def _of_language_model(model: LanguageModel, dataset: Dataset, experiment: Experiment, scored: Score) -> dict[str, Any]:
    """`scored` is the test text by our definition."""
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    found = _other_scores(model, dataset, experiment)
    found["frequency"] = loss_by_frequency(scored, split, vocabulary)
    found["samples"] = _samples(model, vocabulary, experiment.training.steps)
    opened = tails_opened(model, split, vocabulary, experiment.windows)
    return found | {"tails_opened": opened}


def _of_translator(model: Translator, dataset: PairDataset, experiment: Experiment, run: RunFolder) -> dict[str, Any]:
    search = experiment.evaluation.search or SearchSettings()
    bleu = experiment.evaluation.bleu or BleuSettings()
    found: dict[str, Any] = {}
    for split in ("valid", "test"):
        evaluated = translation.evaluate_translations(
            model, dataset, split, search, bleu, precision=experiment.training.precision
        )
        found[split] = evaluated.figures
        run.write_translations(split, evaluated.lines)
    found["examples"] = tuple(
        translation.examples(model, dataset, "test", EXAMPLES, search, precision=experiment.training.precision)
    )
    return {"translation": Translations(**found), "tied": _ties(model)}


def _ties(model: Translator) -> str:
    return "three-way" if model.three_way else "decoder" if model.tied else "none"


def headline(result: RunResult) -> str:
    """The figures of a result in one line: perplexities, the BLEU of translations, what people's judgements say."""
    told = [", ".join(_scored(result, result.test))] if result.test else []
    judged = {end: _rhos(each) for end, each in result.similarity.items()}
    told += [f"rho of {end} vectors: {figures}" for end, figures in judged.items() if figures]
    return "; ".join(told) or "finished"


def _rhos(judged: Iterable[Judgement]) -> str:
    """On the benchmarks of Press & Wolf, each with the pairs that it was counted over."""
    known = [each for each in judged if each.name in PRESS and each.rho is not None]
    return ", ".join(f"{each.name} {each.rho:.2f} ({each.pairs:,} of {each.of:,} pairs)" for each in known)


def _scored(result: RunResult, test: TextScore) -> list[str]:
    streams = f" in {test.streams} streams" if test.streams and test.streams > 1 else ""
    told = [f"test perplexity {shown(test.perplexity)}{streams}"]
    if translated := result.translated("test"):
        told.insert(0, f"test BLEU {translated.bleu:.2f}")
    if test.words != test.tokens:
        told.append(f"{shown(test.per_word)} per word")
    if result.train:
        told.append(f"train {shown(result.train.perplexity)}")
    if counted := result.protocol:
        splits = {"valid": counted.valid, "test": counted.test}
        figures = ", ".join(f"{split} {shown(each.perplexity)}" for split, each in splits.items() if each)
        told.append(f"counted as {counted.name}: {figures}")
    return told


def _provenance(
    run: RunFolder, dataset: Dataset | PairDataset, experiment: Experiment | SkipGramExperiment
) -> dict[str, Any]:
    environment = run.environment or {}
    return {
        **{key: run.config[key] for key in ("recipe", "row")},
        "seed": experiment.training.seed,
        **{key: environment.get(key) for key in ("command", "commit", "dirty", "source_sha256")},
        "config_hash": run.config_hash,
        "corpus": Corpus(name=dataset.name, fingerprint=dataset.fingerprint, describe=dataset.describe()),
    }


def _other_scores(model: LanguageModel, dataset: Dataset, experiment: Experiment) -> dict[str, Any]:
    """What the recipe asks for beside the held-out texts by our definition."""
    found: dict[str, Any] = {}
    if experiment.evaluation.train:
        found["train"] = score_split(model, dataset, experiment, "train").summary()
    if countings := _countings(experiment):
        name, precision = experiment.evaluation.protocol, experiment.training.precision
        found["protocol"] = score_by_protocol(name, model, dataset.splits, countings, precision)
    return found


def _training(experiment: Experiment | SkipGramExperiment, course: Course) -> Training:
    progress, world, environment = course.progress, course.world, course.run.environment or {}
    gpus = environment.get("gpus") or ["GPU"]
    return Training(
        steps=progress.step,
        averaged_from_epoch=progress.averaged_from or None,
        stopped=progress.stopped or None,
        epochs=experiment.training.epochs,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds,
        peak_memory_bytes=progress.peak_memory_bytes,
        device=gpus[0] if world.device.type == "cuda" else environment.get("cpu", "cpu"),
        processes=world.size,
    )


def look_at_words(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None, *, tied: bool
) -> dict[str, Any]:
    """Neighbours and a picture of some tokens, which all ends have, or of the vocabulary's examples."""
    words = examples(vocabulary, DRAWN) if words is None else words
    near = _neighbors(vectors, vocabulary, words, tied=tied)
    return {"neighbors": near, "embedding": embedding(vectors, vocabulary, words)}


def _neighbors(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str], *, tied: bool
) -> Neighbors:
    """By end, as `vectors_by_end` has them: without what is only spelled, which has neighbours but is none."""
    if vocabulary.spelled:
        vectors = {end: each.select(each.words[: len(vocabulary)]) for end, each in vectors.items()}
    found = {end: nearest_words(each, list(words), 5) for end, each in vectors.items()}
    one, other = ("tied", "tied") if "tied" in found else ("input", "output")
    return Neighbors(input=found[one], output=found[other], tied=tied)


def _samples(model: LanguageModel, vocabulary: Vocabulary, window: int) -> tuple[Sample, ...]:
    """What a model writes: what a person looks at first."""
    start = prompt_ids([], vocabulary)
    never = () if vocabulary.unk is None else (vocabulary.unk,)
    samples = []
    for seed, temperature in enumerate((1.0, 0.8, 0.5)):
        ids = generate(model, start, 50, temperature=temperature, never=never, seed=seed, window=window)
        text = vocabulary.text(ids).strip()
        samples.append(Sample(prompt="", text=text, temperature=temperature, seed=seed))
    return tuple(samples)


def word_vectors(model: LanguageModel | SkipGram) -> dict[str, torch.Tensor]:
    """One vector per token at either end; an input end may have more, of words that are only spelled."""
    with torch.no_grad() if isinstance(model, SkipGram) else evaluating(model):
        return {"input": model.input.vectors(), "labels": model.output.vectors()}


def vectors_by_end(model: LanguageModel | SkipGram, vocabulary: Vocabulary) -> dict[str, WordVectors]:
    """The words with their vectors at the input and at the output, or as `tied` where these are the same.

    Those of skip-gram are the words that it has learned: <eos> and <unk> have rows, but they stay as they began.
    """
    found = {end: each.detach().float().cpu() for end, each in word_vectors(model).items()}
    names = {"input": "input", "labels": "output"}
    if model.tied and torch.equal(found["input"][: len(vocabulary)], found["labels"]):
        names = {"input": "tied"}
    words = (*vocabulary.words, *vocabulary.spelled)
    counts = (*vocabulary.counts, *(0 for _ in vocabulary.spelled))
    whole = {
        name: WordVectors(
            words[: len(found[end])],
            found[end].numpy(),
            np.asarray(counts[: len(found[end])]),
            pieces=vocabulary.bpe is not None,
        )
        for end, name in names.items()
    }
    if not isinstance(model, SkipGram):
        return whole
    learned_V = learned(vocabulary.counts, eos=vocabulary.eos, unknown=vocabulary.unk)
    return {name: each.select(compress(each.words, learned_V)) for name, each in whole.items()}


def subspace(model: LanguageModel, vocabulary: Vocabulary) -> Subspace:
    """The distance of Inan et al. between the ends, over the words that both know."""
    found = word_vectors(model)
    input_VD, output_VD = (found[end][: len(vocabulary)].detach().float().cpu().numpy() for end in ("input", "labels"))
    return between_ends(input_VD, output_VD)


def _look_at_ends(
    model: LanguageModel | SkipGram, vocabulary: Vocabulary, benchmarks: Mapping[str, Benchmark]
) -> dict[str, Any]:
    """What the ends have learned: neighbours, a picture, and how they do on each benchmark that there is."""
    vectors = vectors_by_end(model, vocabulary)
    found = look_at_words(vectors, vocabulary, tied=model.tied)
    if benchmarks:
        found["similarity"] = {
            end: tuple(judge(each, one) for one in benchmarks.values()) for end, each in vectors.items()
        }
    return found
