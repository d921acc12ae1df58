"""What is found out about a trained model: its scores, what it puts near each other, what it writes. All of it is
result.json, which reports and comparisons read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

import torch

from reefknot.evaluation import translation
from reefknot.evaluation.beam import SearchSettings
from reefknot.evaluation.bleu import BleuSettings, open_metrics
from reefknot.evaluation.frequency import loss_by_frequency
from reefknot.evaluation.generation import generate, prompt_ids
from reefknot.evaluation.neighbors import examples, nearest
from reefknot.evaluation.pairs import score_pairs
from reefknot.evaluation.perplexity import Score, score
from reefknot.evaluation.protocols import Counting, protocol, score_by_protocol
from reefknot.evaluation.search import tails_opened
from reefknot.evaluation.units import shown
from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.models.translator import Translator
from reefknot.recipe import Experiment, Row
from reefknot.runs.folder import RunFolder, config_hash
from reefknot.text.dataset import Dataset
from reefknot.text.pair_dataset import PairDataset
from reefknot.text.vocabulary import Vocabulary
from reefknot.training.distributed import World
from reefknot.training.state import Progress

RESULT_FORMAT = 1
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


def write_findings(
    model: LanguageModel,
    dataset: Dataset | PairDataset,
    experiment: Experiment,
    run: RunFolder,
    progress: Progress,
    row: Row,
    changed: list[str],
    world: World,
) -> dict[str, Any]:
    """Score a model that has its best weights and write everything a report or a comparison reads."""
    scores = {split: score_split(model, dataset, experiment, split) for split in ("valid", "test")}
    run.write_scores({split: torch.from_numpy(each.nll) for split, each in scores.items()})
    if isinstance(dataset, PairDataset):
        own = _of_translator(cast(Translator, model), dataset, experiment, run)
    else:
        own = _of_language_model(model, dataset, experiment, scores["test"])
    result = {
        "format": RESULT_FORMAT,
        **_provenance(run, dataset, experiment),
        "parameters": {
            "total": sum(model.parameter_counts().values()),
            "parts": model.parameter_counts(),
            "expected": row.parameters,
        },
        "paper": row.paper,
        "changed": changed,
        **{split: each.summary() for split, each in scores.items()},
        "best": {"step": progress.best_step, "epoch": progress.best_epoch},
        **_averaged(run),
        "start": run.config.get("start"),
        "training": _training(run, experiment, progress, world),
        **own,
    }
    run.write_result(result)
    return result


def _averaged(run: RunFolder) -> dict[str, Any]:
    """The steps whose mean was scored in the place of the best, if that was asked for."""
    best = run.checkpoints.best()
    means = run.checkpoints.load(best).values.get("mean_of") if best else None
    return {"averaged": means} if means else {}


def _of_language_model(model: LanguageModel, dataset: Dataset, experiment: Experiment, scored: Score) -> dict[str, Any]:
    """`scored` is the test text by our definition."""
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    found = _other_scores(model, dataset, experiment)
    found["frequency"] = loss_by_frequency(scored, split, vocabulary)
    found |= _look_inside(model, vocabulary, experiment.training.steps)
    opened = tails_opened(model, split, vocabulary, experiment.windows)
    return found if opened is None else found | {"tails_opened": asdict(opened)}


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
    found["examples"] = translation.examples(
        model, dataset, "test", EXAMPLES, search, precision=experiment.training.precision
    )
    return {"neighbors": _neighbors(model, dataset.vocabulary), "translation": found, "tied": _ties(model)}


def _ties(model: Translator) -> str:
    return "three-way" if model.three_way else "decoder" if model.tied else "none"


def headline(result: dict[str, Any]) -> str:
    """The perplexities of a result in one line, and the BLEU of translations."""
    test = result["test"]
    streams = f" in {test['streams']} streams" if test["streams"] > 1 else ""
    told = [f"test perplexity {shown(test['perplexity'])}{streams}"]
    if "translation" in result:
        told.insert(0, f"test BLEU {result['translation']['test']['bleu']:.2f}")
    elif test["words"] != test["tokens"]:
        told.append(f"{shown(test['word_perplexity'])} per word")
    if "train" in result:
        told.append(f"train {shown(result['train']['perplexity'])}")
    if "protocol" in result:
        name, valid, test = (result["protocol"][key] for key in ("name", "valid", "test"))
        told.append(f"counted as {name}: valid {shown(valid['perplexity'])}, test {shown(test['perplexity'])}")
    return ", ".join(told)


def _provenance(run: RunFolder, dataset: Dataset | PairDataset, experiment: Experiment) -> dict[str, Any]:
    environment = run.environment or {}
    return {
        **{key: run.config[key] for key in ("recipe", "row")},
        "seed": experiment.training.seed,
        **{key: environment.get(key) for key in ("command", "commit", "dirty", "source_sha256")},
        "config_hash": config_hash(run.config),
        "corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint, "describe": dataset.describe()},
    }


def _other_scores(model: LanguageModel, dataset: Dataset, experiment: Experiment) -> dict[str, Any]:
    """What the recipe asks for beside the held-out texts by our definition."""
    found: dict[str, Any] = {}
    if experiment.evaluation.train:
        found["train"] = score_split(model, dataset, experiment, "train").summary()
    if countings := _countings(experiment):
        figures = score_by_protocol(model, dataset.splits, countings, experiment.training.precision)
        found["protocol"] = {"name": experiment.evaluation.protocol, **figures}
    return found


def _training(run: RunFolder, experiment: Experiment, progress: Progress, world: World) -> dict[str, Any]:
    environment = run.environment or {}
    gpus = environment.get("gpus") or ["GPU"]
    return {
        "steps": progress.step,
        "averaged_from_epoch": progress.averaged_from or None,
        "stopped": progress.stopped or None,
        "epochs": experiment.training.epochs,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens / progress.seconds,
        "peak_memory_bytes": progress.peak_memory_bytes,
        "device": gpus[0] if world.device.type == "cuda" else environment.get("cpu", "cpu"),
        "processes": world.size,
    }


def _neighbors(model: LanguageModel, vocabulary: Vocabulary) -> dict[str, Any]:
    words = examples(vocabulary, 8)
    found: dict[str, Any] = {
        end: nearest(vectors, vocabulary, words, 5) for end, vectors in word_vectors(model).items()
    }
    return found | {"tied": model.tied}


def _look_inside(model: LanguageModel, vocabulary: Vocabulary, window: int) -> dict[str, Any]:
    """Neighbours and samples: what a person looks at first."""
    start = prompt_ids([], vocabulary)
    never = () if vocabulary.unk is None else (vocabulary.unk,)
    samples = []
    for seed, temperature in enumerate((1.0, 0.8, 0.5)):
        ids = generate(model, start, 50, temperature=temperature, never=never, seed=seed, window=window)
        text = vocabulary.text(ids).strip()
        samples.append({"prompt": "", "text": text, "temperature": temperature, "seed": seed})
    return {"neighbors": _neighbors(model, vocabulary), "samples": samples}


def word_vectors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """One vector per token at either end; an input end may have more, of words that are only spelled."""
    with evaluating(model):
        return {"input": model.input.vectors(), "labels": model.output.vectors()}
