"""The eight ends of Baevski & Auli (2019), Table 3, on a text and a machine: `reefknot advise CORPUS`.

Parameters are counted; peak memory and speed are measured over a few training steps of a Transformer whose body is the
same for all. Widths keep the paper's proportions to the model's, 1,024 there: plain word vectors have a half of it, the
narrow inputs of ASM a sixteenth, bands the whole, a quarter and a sixteenth, and a char-CNN has as many fewer features.

An update reads as many tokens at every end. Pieces of words are shorter than words, so ends are compared in words,
with line ends among them as in word perplexity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from reefknot.lab.bench.measure import reason, work_times
from reefknot.lab.bench.steps import CAPTURED, EAGER, Course, Job, Text
from reefknot.lab.config.settings import check
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularySettings
from reefknot.nn.inputs.char_cnn import PAPER_FILTERS

ENDS = {
    "SM": "word vectors into a softmax",
    "SM-T": "word vectors into a softmax, tied",
    "BPE": "pieces of words into a softmax",
    "BPE-T": "pieces of words into a softmax, tied",
    "ASM": "narrow word vectors into an adaptive softmax",
    "CNN": "spellings into an adaptive softmax",
    "ADP": "adaptive input into an adaptive softmax",
    "ADP-T": "adaptive input into an adaptive softmax, tied",
}
BEST = "ADP-T"
"""The end that did best in the paper."""
PAPER_WIDTH, PAPER_BANDS, PAPER_STEPS, PAPER_MERGES = 1024, (20_000, 40_000), 512, 32_000
LEAST = 80_000
"""Words from which on the paper's bands leave the last one as many as the first."""
COVERED = (0.9, 0.975)
"""Shares of a smaller vocabulary's text that its first band makes, and its first two."""
AS_FAST = 0.9
"""Share of the greatest speed that is taken for as fast."""


@dataclass(frozen=True)
class Body:
    """What stands between the ends, and how much it reads at once."""

    dim: int
    layers: int
    heads: int
    ffn: int
    tokens: int
    """Per update."""

    @property
    def steps(self) -> int:
        """Tokens of a block."""
        return min(PAPER_STEPS, self.tokens)

    def within(self, tokens: int) -> Body:
        """The body with updates of whole blocks, which a text of so many tokens has."""
        cut = replace(self, tokens=min(self.tokens, tokens))
        return replace(cut, tokens=cut.tokens - cut.tokens % cut.steps)

    def __str__(self) -> str:
        return (
            f"{self.layers} x width {self.dim}, {self.heads} heads, {self.ffn} feed-forward units; "
            f"updates of {self.tokens // self.steps} x {self.steps} tokens"
        )


BODIES = {"cuda": Body(512, 6, 8, 2048, 4096), "cpu": Body(128, 2, 4, 512, 512)}
"""What is measured where nothing else is asked for; a CPU should be through within a minute."""


@dataclass(frozen=True)
class Row:
    """What was found of one end, or why nothing was."""

    end: str
    ends_parameters: int | None = None
    parameters: int | None = None
    memory_bytes: int | None = None
    tokens_per_second: float | None = None
    words_per_second: float | None = None
    """Words and line ends."""
    note: str = ""
    """Why something was not measured."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def vocabulary_of(end: str, types: int) -> VocabularySettings:
    """What the tokens of an end are: words, of which there are so many types, or pieces of them, fewer than words."""
    merges = max(min(PAPER_MERGES, types // 2), 1)
    return VocabularySettings.model_validate({"bpe": {"merges": merges}} if end.startswith("BPE") else {})


def choose_bands(words: Vocabulary) -> tuple[tuple[int, ...], str]:
    """How many words the first bands have, and for people why: the paper's sizes, or by how much of the text they make.

    No band is empty, so a very small vocabulary has fewer of them.
    """
    sizes: tuple[int, ...] = PAPER_BANDS
    why = "the paper's"
    if len(words) < LEAST:
        made = np.cumsum(words.counts) / max(sum(words.counts), 1)
        bounds = sorted({int(np.searchsorted(made, share)) + 1 for share in COVERED if made[0] < share})
        bounds = [bound for bound in bounds if bound < len(words)]
        sizes = tuple(int(size) for size in np.diff([0, *bounds]))
        shares = " and ".join(f"{made[bound - 1]:.1%}" for bound in bounds)
        why = f"{shares} of the text by the end of each but the last" if bounds else "too few words for several"
    all_sizes = (*sizes, len(words) - sum(sizes))
    return sizes, f"bands of {' / '.join(f'{size:,}' for size in all_sizes)} words ({why})"


def experiment(
    end: str, corpus: str, body: Body, vocabulary: VocabularySettings, sizes: Sequence[int], device: str
) -> LanguageModelExperiment:
    """An end on a body, as a recipe would say it."""
    settings = _ends(end, body.dim, sizes) | {
        "corpus": {"name": corpus},
        "vocabulary": vocabulary.model_dump(),
        "encoder": {"kind": "transformer", "layers": body.layers, "heads": body.heads, "ffn_dim": body.ffn},
        "training": {
            "updates": 1,
            "batching": "blocks",
            "batch": body.tokens // body.steps,
            "steps": body.steps,
            "clip": 0.1,
            "optimiser": {"kind": "sgd", "learning_rate": 1.0, "momentum": 0.99, "nesterov": True},
            "schedule": {"kind": "constant"},
            "precision": "bfloat16" if device == "cuda" else "float32",
            "determinism": "fast",
        },
    }
    return check(LanguageModelExperiment, settings, f"advise, {end}")


def _ends(end: str, dim: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Tables, projections and the two ends themselves."""
    word: dict[str, Any] = {"kind": "word", "dim": dim}
    banded = {"kind": "banded", "dim": dim, "sizes": list(sizes), "factor": 4}
    output: dict[str, Any] = {"kind": "softmax", "classifier": {"kind": "plain", "table": "classes", "bias": False}}
    source: dict[str, Any] = {"kind": "lookup", "table": "words"}
    projections: dict[str, Any] = {}
    classes = word
    if end.startswith("SM"):
        word["dim"] = max(dim // 2, 1)
        source["project_to"] = dim
        output["classifier"] |= {"kind": "projected", "penalty": 0.0, "projection_bias": False}
    elif not end.startswith("BPE"):
        classes = banded
        projections["out"] = {"kind": "bands", "table": "classes", "dim": dim, "head": False}
        output |= {"kind": "adaptive", "projections": "out"}
    tables = {"words": word, "classes": classes}
    if end == "ASM":
        tables["words"] = {"kind": "word", "dim": max(dim // 16, 1)}
        source["project_to"] = dim
    elif end == "CNN":
        del tables["words"]
        source = _char_cnn(dim)
    elif end.startswith("ADP"):
        tables["words"] = banded
        projections["in"] = {"kind": "bands", "table": "words", "dim": dim}
        source = {"kind": "adaptive", "table": "words", "projections": "in"}
    if end.endswith("-T"):
        del tables["classes"]
        output["classifier"]["table"] = "words"
        if end == "ADP-T":
            del projections["out"]
            output["projections"] = "in"
    return {"tables": tables, "projections": projections, "input": source, "output": output}


def _char_cnn(dim: int) -> dict[str, Any]:
    """As much narrower than the paper's as the model is; vectors of bytes keep their width."""
    filters = [[width, max(features * dim // PAPER_WIDTH, 1)] for width, features in PAPER_FILTERS]
    return {"kind": "char_cnn", "dim": dim, "filters": filters}


def count(row: Row, found: LanguageModelExperiment, tokens: int) -> Row:
    """The row with its parameters, counted without building the model in memory."""
    with torch.device("meta"):
        model = build_model(found, tokens)
    counts = model.parameter_counts()
    return replace(row, ends_parameters=counts["input"] + counts["output"], parameters=sum(counts.values()))


def measure(row: Row, found: LanguageModelExperiment, dataset: Dataset, device: str, seconds: float) -> Row:
    """The row with its speed, over some training steps, and the most memory that this process has held by then."""
    train = dataset.splits["train"]
    # What is left over would make smaller updates than the others.
    end = train.tokens - train.tokens % (found.training.batch * found.training.steps)
    ids, inputs = train.ids[:end], train.inputs[:end]
    text = Text(ids, train.tokens, dataset.summary, dataset.name, inputs, dataset.vocabulary.eos)
    job = Job(row.end, found.training, partial(build_model, found, dataset.vocabulary), text)
    try:
        course = Course(job, CAPTURED if device == "cuda" else EAGER, device)
        (spent,) = work_times(device, [(course.run, lambda: None)], seconds)
    except Exception as error:  # a cell says so; the others go on
        return replace(row, note=reason(error))
    # Others may use a CPU too, and slow some of the steps down.
    speed = 1e3 * course.tokens / (median(spent) if device == "cuda" else min(spent))
    return replace(
        row,
        memory_bytes=peak_memory_bytes(device),
        tokens_per_second=speed,
        words_per_second=speed * (train.words + train.lines) / train.tokens,
    )


def advice(rows: Iterable[Row]) -> str:
    """What follows from the figures, in a sentence or two."""
    measured = [row for row in rows if row.words_per_second is not None]
    if not measured:
        return "No end could be measured: try a smaller body (--dim, --layers) or fewer --tokens."
    if len(measured) == 1:
        return f"{measured[0].end} alone was measured: there is nothing to compare it with."
    speeds = {row.end: row.words_per_second or 0.0 for row in measured}
    fastest = max(speeds, key=speeds.__getitem__)
    leanest = min(measured, key=lambda row: row.memory_bytes or 0).end
    smallest = min(measured, key=lambda row: row.parameters or 0).end
    facts = f"{fastest} reads most words a second, {leanest} needs least memory, {smallest} has fewest parameters."
    if BEST not in speeds:
        return f"{facts} {BEST}, the paper's best, was not measured."
    reached = speeds[BEST] / speeds[fastest]
    if reached >= AS_FAST:
        return f"{facts} Take {BEST}: it did best in the paper, and has {reached:.0%} of the greatest speed here."
    return (
        f"{facts} {BEST} did best in the paper and has {reached:.0%} of the greatest speed here: "
        f"take {fastest} where speed decides, {BEST} where perplexity does."
    )
