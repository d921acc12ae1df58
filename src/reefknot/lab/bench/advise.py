"""Compare the eight ends of Baevski & Auli (2019), Table 3, on your text and machine: `reefknot advise CORPUS`.

Parameters are counted. Peak memory and speed are measured over a few training steps, with the same Transformer between
all ends. Dimensions are in the paper's proportions to the dimension of the model, which is 1,024 in the paper: plain
word vectors have half of it, the narrow inputs of ASM a sixteenth, and the three bands (clusters of words of similar
frequency) all, a quarter and a sixteenth of it. The char-CNN has proportionally fewer features.

An update reads the same number of tokens with every end. Sub-words are shorter than words, so speeds are compared in
words per second. Line ends count as words, as they do in the perplexity per word.
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
from reefknot.lab.bench.steps import CAPTURED, EAGER, Job, Text, Workload
from reefknot.lab.config.settings import check_settings
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularySettings
from reefknot.nn.inputs.char_cnn import PAPER_FILTERS

ENDS = {
    "SM": "word vectors into a softmax",
    "SM-T": "word vectors into a softmax, tied",
    "BPE": "sub-words into a softmax",
    "BPE-T": "sub-words into a softmax, tied",
    "ASM": "narrow word vectors into an adaptive softmax",
    "CNN": "spellings into an adaptive softmax",
    "ADP": "adaptive input into an adaptive softmax",
    "ADP-T": "adaptive input into an adaptive softmax, tied",
}
BEST = "ADP-T"
"""The end with the best perplexity in the paper."""
PAPER_WIDTH, PAPER_BANDS, PAPER_STEPS, PAPER_MERGES = 1024, (20_000, 40_000), 512, 32_000
LEAST = 80_000
"""The smallest vocabulary for the paper's bands. The last band then has as many words as the first."""
COVERED = (0.9, 0.975)
"""Shares of the text that the first band, and the first two bands, cover in a smaller vocabulary."""
AS_FAST = 0.9
"""A speed of at least this share of the highest speed counts as equally fast."""


@dataclass(frozen=True)
class Body:
    """The Transformer between the ends, and the number of tokens that it reads per update."""

    dim: int
    layers: int
    heads: int
    ffn: int
    tokens: int
    """Tokens per update."""

    @property
    def steps(self) -> int:
        """Tokens per block."""
        return min(PAPER_STEPS, self.tokens)

    def within(self, tokens: int) -> Body:
        """Return the same body with updates of whole blocks, at most as large as a text with this many tokens."""
        cut = replace(self, tokens=min(self.tokens, tokens))
        return replace(cut, tokens=cut.tokens - cut.tokens % cut.steps)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.dim} dimensions, {self.heads} heads, {self.ffn} feed-forward units; "
            f"updates of {self.tokens // self.steps} x {self.steps} tokens"
        )


BODIES = {"cuda": Body(512, 6, 8, 2048, 4096), "cpu": Body(128, 2, 4, 512, 512)}
"""The default bodies. On a CPU the measurement should take less than a minute."""


@dataclass(frozen=True)
class Row:
    """The measurements of one end, or the reason why there are none."""

    end: str
    ends_parameters: int | None = None
    parameters: int | None = None
    memory_bytes: int | None = None
    tokens_per_second: float | None = None
    words_per_second: float | None = None
    """Words and line ends per second."""
    note: str = ""
    """The reason why something was not measured."""

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def vocabulary_of(end: str, types: int) -> VocabularySettings:
    """Return the vocabulary of an end: words or sub-words. There are fewer sub-words than `types`, the words' types."""
    merges = max(min(PAPER_MERGES, types // 2), 1)
    return VocabularySettings.model_validate({"bpe": {"merges": merges}} if end.startswith("BPE") else {})


def choose_bands(words: Vocabulary) -> tuple[tuple[int, ...], str]:
    """Return the sizes of all bands but the last, and a line that explains them.

    The sizes are the paper's, or follow from the share of the text that the bands cover. No band is empty, so a very
    small vocabulary has fewer bands.
    """
    sizes: tuple[int, ...] = PAPER_BANDS
    why = "the paper's"
    if len(words) < LEAST:
        covered = np.cumsum(words.counts) / max(sum(words.counts), 1)
        bounds = sorted({int(np.searchsorted(covered, share)) + 1 for share in COVERED if covered[0] < share})
        bounds = [bound for bound in bounds if bound < len(words)]
        sizes = tuple(int(size) for size in np.diff([0, *bounds]))
        shares = ", ".join(f"{covered[bound - 1]:.1%}" for bound in bounds)
        why = f"cumulatively {shares} and 100% of the text" if bounds else "too few words for several"
    all_sizes = (*sizes, len(words) - sum(sizes))
    return sizes, f"bands of {' / '.join(f'{size:,}' for size in all_sizes)} words ({why})"


def experiment(
    end: str, corpus: str, body: Body, vocabulary: VocabularySettings, sizes: Sequence[int], device: str
) -> LanguageModelExperiment:
    """Return the settings of a language model with the given end and body."""
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
    return check_settings(LanguageModelExperiment, settings, f"advise, {end}")


def _ends(end: str, dim: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the settings of the tables, projections and both ends."""
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
    """Return the settings of a char-CNN with features in the paper's proportion to `dim`.

    The dimension of the byte vectors does not change.
    """
    filters = [[width, max(features * dim // PAPER_WIDTH, 1)] for width, features in PAPER_FILTERS]
    return {"kind": "char_cnn", "dim": dim, "filters": filters}


def count(row: Row, settings: LanguageModelExperiment, tokens: int) -> Row:
    """Return the row with its numbers of parameters, counted without allocating the model."""
    with torch.device("meta"):
        model = build_model(settings, tokens)
    counts = model.parameter_counts()
    return replace(row, ends_parameters=counts["input"] + counts["output"], parameters=sum(counts.values()))


def measure(row: Row, settings: LanguageModelExperiment, dataset: Dataset, device: str, seconds: float) -> Row:
    """Return the row with its speed over some training steps, and the peak memory of this process so far."""
    train = dataset.splits["train"]
    # The remainder of the text would make an update that is smaller than the others.
    end = train.tokens - train.tokens % (settings.training.batch * settings.training.steps)
    ids, inputs = train.ids[:end], train.inputs[:end]
    text = Text(ids, train.tokens, dataset.summary, dataset.name, inputs, dataset.vocabulary.eos)
    job = Job(row.end, settings.training, partial(build_model, settings, dataset.vocabulary), text)
    try:
        workload = Workload(job, CAPTURED if device == "cuda" else EAGER, device)
        (milliseconds,) = work_times(device, [(workload.run, lambda: None)], seconds)
    except Exception as error:  # the other ends are still measured
        return replace(row, note=reason(error))
    # On a CPU, other processes may slow some of the steps down, so the fastest step counts.
    speed = 1e3 * workload.tokens / (median(milliseconds) if device == "cuda" else min(milliseconds))
    return replace(
        row,
        memory_bytes=peak_memory_bytes(device),
        tokens_per_second=speed,
        words_per_second=speed * (train.words + train.lines) / train.tokens,
    )


def advice(rows: Iterable[Row]) -> str:
    """Return a recommendation in a sentence or two."""
    measured = [row for row in rows if row.words_per_second is not None]
    if not measured:
        return "No end could be measured: try a smaller body (--dim, --layers) or fewer --tokens."
    if len(measured) == 1:
        return f"Only {measured[0].end} was measured: there is nothing to compare it with."
    speeds = {row.end: row.words_per_second or 0.0 for row in measured}
    fastest = max(speeds, key=speeds.__getitem__)
    least_memory = min(measured, key=lambda row: row.memory_bytes or 0).end
    smallest = min(measured, key=lambda row: row.parameters or 0).end
    facts = (
        f"{fastest} reads the most words per second, {least_memory} needs the least memory, "
        f"{smallest} has the fewest parameters."
    )
    if BEST not in speeds:
        return f"{facts} {BEST}, the paper's best, was not measured."
    reached = speeds[BEST] / speeds[fastest]
    if reached >= AS_FAST:
        return f"{facts} Use {BEST}: it did best in the paper, and reaches {reached:.0%} of the highest speed here."
    return (
        f"{facts} {BEST} did best in the paper and reaches {reached:.0%} of the highest speed here: "
        f"use {fastest} if speed decides, {BEST} if perplexity does."
    )
