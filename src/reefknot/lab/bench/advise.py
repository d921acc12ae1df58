"""Measure which input and output layers suit your text and machine: `reefknot advise CORPUS`.

The input end turns token ids into vectors, and the output end is a classifier with its loss. `ENDS` lists the eight
pairs of ends of Baevski & Auli (2019), Table 3; "end" below means such a pair. For each of them,

    build_experiment    makes the settings of a language model,
    count_parameters    counts its parameters, and
    measure_training    measures its peak memory and speed over a few training steps.

`combine_rounds` combines two measurements of an end, and `give_advice` compares the ends. The Transformer between the
ends (`Body`) is the same for all. Adaptive ends divide the words into bands, which are groups of words of similar
frequency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from reefknot.lab.bench.measure import describe_error, time_function
from reefknot.lab.bench.steps import CAPTURED, EAGER, Job, Text, Workload
from reefknot.lab.config.settings import check_settings
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings
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
"""The pairs of input and output ends, named as in the paper. Tied ends share their word vectors."""
BEST_IN_PAPER = "ADP-T"
"""The end with the best perplexity in the paper."""
PAPER_DIM = 1024
"""The dimension of the paper's model."""
PAPER_BANDS = (20_000, 40_000)
"""The sizes of the paper's first two bands."""
PAPER_BLOCK = 512
"""The number of tokens of the paper's blocks."""
PAPER_MERGES = 32_000
"""The number of the paper's sub-word merges."""
MIN_WORDS_FOR_PAPER_BANDS = 80_000
"""The smallest vocabulary for the paper's bands. The last band then has as many words as the first."""
BAND_COVERAGE = (0.9, 0.975)
"""Shares of the text that the first band, and the first two bands, cover in a smaller vocabulary."""
EQUAL_SPEED = 0.9
"""A speed of at least this share of the highest speed counts as equally fast."""
EQUAL_MEMORY = 1.02
"""A memory of at most this multiple of the smallest counts as equal, because repeated measurements differ this much."""


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
    def block_size(self) -> int:
        """Tokens per block."""
        return min(PAPER_BLOCK, self.tokens)

    def fit_to_text(self, text_tokens: int) -> Body:
        """Return the same body with updates of whole blocks, at most as large as a text with this many tokens."""
        body = replace(self, tokens=min(self.tokens, text_tokens))
        return replace(body, tokens=body.tokens - body.tokens % body.block_size)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.dim} dimensions, {self.heads} heads, {self.ffn} feed-forward units; "
            f"updates of {self.tokens // self.block_size} x {self.block_size} tokens"
        )


BODIES = {
    "cuda": Body(dim=512, layers=6, heads=8, ffn=2048, tokens=4096),
    "cpu": Body(dim=128, layers=2, heads=4, ffn=512, tokens=512),
}
"""The default bodies by device. On a CPU the measurement should take less than a minute."""


@dataclass(frozen=True)
class Row:
    """The measurements of one end, or the reason why there are none."""

    end: str
    ends_parameters: int | None = None
    """The number of parameters of the input end and the output end."""
    parameters: int | None = None
    """The number of parameters of the whole model."""
    memory_bytes: int | None = None
    tokens_per_second: float | None = None
    words_per_second: float | None = None
    """Words per second, by which ends are compared, because sub-words are shorter than words. Line ends count as words,
    as they do in the perplexity per word."""
    min_words_per_second: float | None = None
    """The speed of the median step, in the slower round. Single steps are much slower if another process interrupts."""
    max_words_per_second: float | None = None
    """The speed of the fastest step, in the faster round."""
    note: str = ""
    """The reason why something was not measured."""

    def may_be_as_fast_as(self, other: Row) -> bool:
        """Return whether the ranges of the speeds overlap, so that it is uncertain which end is faster."""
        return (self.max_words_per_second or 0.0) >= (other.min_words_per_second or 0.0) and (
            other.max_words_per_second or 0.0
        ) >= (self.min_words_per_second or 0.0)

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def choose_vocabulary(end: str, num_words: int) -> VocabularySettings:
    """Return the vocabulary of an end: words, or fewer sub-words than the text has distinct words."""
    if not end.startswith("BPE"):
        return VocabularySettings()
    merges = max(min(PAPER_MERGES, num_words // 2), 1)
    return VocabularySettings.model_validate({"bpe": {"merges": merges}})


def choose_bands(vocabulary: Vocabulary) -> tuple[tuple[int, ...], str]:
    """Return the sizes of all bands but the last, and a line that explains them.

    The sizes are the paper's, or follow from the share of the text that the bands cover. No band is empty, so a very
    small vocabulary has fewer bands.
    """
    num_words = len(vocabulary)
    sizes: tuple[int, ...] = PAPER_BANDS
    reason = "the paper's"
    if num_words < MIN_WORDS_FOR_PAPER_BANDS:
        # The share of the text that each word covers, together with all more frequent words.
        coverage = np.cumsum(vocabulary.counts) / max(sum(vocabulary.counts), 1)
        cutoffs = {int(np.searchsorted(coverage, share)) + 1 for share in BAND_COVERAGE if coverage[0] < share}
        sorted_cutoffs = sorted(cutoff for cutoff in cutoffs if cutoff < num_words)
        sizes = tuple(int(size) for size in np.diff([0, *sorted_cutoffs]))
        if sorted_cutoffs:
            shares = ", ".join(f"{coverage[cutoff - 1]:.1%}" for cutoff in sorted_cutoffs)
            reason = f"cumulatively {shares} and 100% of the text"
        else:
            reason = "too few words for several"

    all_sizes = (*sizes, num_words - sum(sizes))
    formatted_sizes = " / ".join(f"{size:,}" for size in all_sizes)
    return sizes, f"bands of {formatted_sizes} words ({reason})"


def build_experiment(
    end: str, corpus: str, body: Body, vocabulary: VocabularySettings, band_sizes: Sequence[int], device: str
) -> LanguageModelExperiment:
    """Return the settings of a language model.

    An update reads the same number of tokens with every end. Dimensions are in the paper's proportions to the dimension
    of the model: plain word vectors have half of it, the narrow inputs of ASM a sixteenth, and the three bands all, a
    quarter and a sixteenth of it. The char-CNN has proportionally fewer features.

    Args:
        end: One of `ENDS`.
        corpus: The name of the corpus, or a folder of text.
        body: The Transformer between the ends.
        vocabulary: Settings of the vocabulary, from `choose_vocabulary`.
        band_sizes: Sizes of all bands but the last, from `choose_bands`.
        device: `cuda` or `cpu`.
    """
    end_settings = _build_end_settings(end, body.dim, band_sizes)
    settings = end_settings | {
        "corpus": {"name": corpus},
        "vocabulary": vocabulary.model_dump(),
        "encoder": {"kind": "transformer", "layers": body.layers, "heads": body.heads, "ffn_dim": body.ffn},
        "training": {
            "updates": 1,
            "batching": "blocks",
            "batch": body.tokens // body.block_size,
            "steps": body.block_size,
            "clip": 0.1,
            "optimiser": {"kind": "sgd", "learning_rate": 1.0, "momentum": 0.99, "nesterov": True},
            "schedule": {"kind": "constant"},
            "precision": "bfloat16" if device == "cuda" else "float32",
            "determinism": "fast",
        },
    }
    return check_settings(LanguageModelExperiment, settings, f"advise, {end}")


def _build_end_settings(end: str, dim: int, band_sizes: Sequence[int]) -> dict[str, Any]:
    """Return the settings of the tables, projections and both ends."""
    if end.startswith("SM"):
        settings = _build_projected_settings(dim)
    elif end.startswith("BPE"):
        settings = _build_sub_word_settings(dim)
    else:
        settings = _build_adaptive_settings(end, dim, band_sizes)

    # Tied ends: the output end uses the table, and an adaptive one also the projections, of the input end.
    if end.endswith("-T"):
        del settings["tables"]["classes"]
        settings["output"]["classifier"]["table"] = "words"
    if end == "ADP-T":
        del settings["projections"]["out"]
        settings["output"]["projections"] = "in"
    return settings


def _build_projected_settings(dim: int) -> dict[str, Any]:
    """Return the settings of SM: word vectors and class vectors of half the dimension, which are projected."""
    table = {"kind": "word", "dim": max(dim // 2, 1)}
    classifier = {
        "kind": "projected",
        "table": "classes",
        "bias": False,
        "penalty": 0.0,
        "projection_bias": False,
    }
    return {
        "tables": {"words": table, "classes": table},
        "projections": {},
        "input": {"kind": "lookup", "table": "words", "project_to": dim},
        "output": {"kind": "softmax", "classifier": classifier},
    }


def _build_sub_word_settings(dim: int) -> dict[str, Any]:
    """Return the settings of BPE: vectors of the model's dimension."""
    table = {"kind": "word", "dim": dim}
    return {
        "tables": {"words": table, "classes": table},
        "projections": {},
        "input": {"kind": "lookup", "table": "words"},
        "output": {"kind": "softmax", "classifier": {"kind": "plain", "table": "classes", "bias": False}},
    }


def _build_adaptive_settings(end: str, dim: int, band_sizes: Sequence[int]) -> dict[str, Any]:
    """Return the settings of ASM, CNN and ADP: three kinds of inputs into an adaptive softmax."""
    banded_table = {"kind": "banded", "dim": dim, "sizes": list(band_sizes), "factor": 4}
    tables: dict[str, Any] = {}
    projections: dict[str, Any] = {"out": {"kind": "bands", "table": "classes", "dim": dim, "head": False}}

    input_end: dict[str, Any]
    if end == "ASM":
        tables["words"] = {"kind": "word", "dim": max(dim // 16, 1)}
        input_end = {"kind": "lookup", "table": "words", "project_to": dim}
    elif end == "CNN":
        input_end = _build_char_cnn_settings(dim)
    else:
        tables["words"] = banded_table
        projections["in"] = {"kind": "bands", "table": "words", "dim": dim}
        input_end = {"kind": "adaptive", "table": "words", "projections": "in"}

    tables["classes"] = banded_table
    classifier = {"kind": "plain", "table": "classes", "bias": False}
    return {
        "tables": tables,
        "projections": projections,
        "input": input_end,
        "output": {"kind": "adaptive", "classifier": classifier, "projections": "out"},
    }


def _build_char_cnn_settings(dim: int) -> dict[str, Any]:
    """Return the settings of a char-CNN with features in the paper's proportion to `dim`.

    The dimension of the byte vectors does not change.
    """
    filters = [[width, max(features * dim // PAPER_DIM, 1)] for width, features in PAPER_FILTERS]
    return {"kind": "char_cnn", "dim": dim, "filters": filters}


def count_parameters(row: Row, experiment: LanguageModelExperiment, vocab_size: int) -> Row:
    """Return the row with its numbers of parameters, counted without allocating the model."""
    with torch.device("meta"):
        model = build_model(experiment, vocab_size)
    counts = model.parameter_counts()
    return replace(row, ends_parameters=counts["input"] + counts["output"], parameters=sum(counts.values()))


def measure_training(
    row: Row, experiment: LanguageModelExperiment, dataset: Dataset, device: str, seconds: float
) -> Row:
    """Return the row with its speed over some training steps, and the peak memory of this process so far."""
    # The remainder of the text would make an update that is smaller than the others.
    train_split = dataset.splits["train"]
    tokens_per_update = experiment.training.batch * experiment.training.steps
    num_tokens = train_split.tokens - train_split.tokens % tokens_per_update
    text = Text.from_dataset(dataset, num_tokens)

    job = Job(row.end, experiment.training, partial(build_model, experiment, dataset.vocabulary), text)
    mode = CAPTURED if device == "cuda" else EAGER
    try:
        workload = Workload(job, mode, device)
        milliseconds = time_function(workload.run, device, seconds)
    except Exception as error:  # the other ends are still measured
        return replace(row, note=describe_error(error))

    # On a CPU, other processes may slow some of the steps down, so the fastest step counts.
    pass_ms = median(milliseconds) if device == "cuda" else min(milliseconds)
    words_per_token = (train_split.words + train_split.lines) / train_split.tokens
    words_per_pass = workload.tokens * words_per_token
    return replace(
        row,
        memory_bytes=peak_memory_bytes(device),
        tokens_per_second=1e3 * workload.tokens / pass_ms,
        words_per_second=1e3 * words_per_pass / pass_ms,
        min_words_per_second=1e3 * words_per_pass / median(milliseconds),
        max_words_per_second=1e3 * words_per_pass / min(milliseconds),
    )


def combine_rounds(first: Row, second: Row) -> Row:
    """Return the faster of two measurements of an end, with a range of speeds that covers both."""
    if second.words_per_second is None:
        return first
    rounds = (first, second)
    return replace(
        max(rounds, key=lambda row: row.words_per_second or 0.0),
        min_words_per_second=min(row.min_words_per_second or 0.0 for row in rounds),
        max_words_per_second=max(row.max_words_per_second or 0.0 for row in rounds),
    )


def give_advice(rows: Iterable[Row], num_words: int) -> str:
    """Return a recommendation in a few sentences.

    The paper's vocabulary has 267,744 words, and adaptive ends are made for such sizes. So the paper's best end is
    recommended only for a large vocabulary. For a smaller one, the measurements decide: of the ends that are about as
    fast as the fastest, the one that needs the least memory. If several need about the least, the smallest is used. An
    end whose range of speeds overlaps with the range of the fastest counts as about as fast.

    Args:
        rows: The measurements.
        num_words: Number of words in the vocabulary of the text.
    """
    measured_rows = [row for row in rows if row.words_per_second is not None]
    if not measured_rows:
        return "No end could be measured: try a smaller body (--dim, --layers) or fewer --tokens."
    if len(measured_rows) == 1:
        return f"Only {measured_rows[0].end} was measured: there is nothing to compare it with."

    # Which end is best in each measurement?
    speeds = {row.end: row.words_per_second or 0.0 for row in measured_rows}
    fastest_row = max(measured_rows, key=lambda row: speeds[row.end])
    fastest = fastest_row.end
    perhaps_as_fast = [
        row.end for row in measured_rows if row is not fastest_row and row.may_be_as_fast_as(fastest_row)
    ]
    uncertain = f" (uncertain: its range overlaps with {', '.join(perhaps_as_fast)})" if perhaps_as_fast else ""
    leanest_rows = _find_leanest(measured_rows)
    equal_ends = ", ".join(row.end for row in leanest_rows[1:])
    equal_memory = f" (equal within {EQUAL_MEMORY - 1:.0%}: {equal_ends})" if equal_ends else ""
    smallest = min(measured_rows, key=lambda row: row.parameters or 0).end
    summary = _summarise_best(
        {
            f"reads the most words per second{uncertain}": fastest,
            f"needs the least memory{equal_memory}": leanest_rows[0].end,
            "is the smallest": smallest,
        }
    )

    if num_words < MIN_WORDS_FOR_PAPER_BANDS or BEST_IN_PAPER not in speeds:
        fast_rows = [
            row
            for row in measured_rows
            if speeds[row.end] >= EQUAL_SPEED * speeds[fastest] or row.end in perhaps_as_fast
        ]
        leanest_fast_rows = _find_leanest(fast_rows)
        choice = leanest_fast_rows[0].end
        is_equal = fastest in [row.end for row in leanest_fast_rows]
        advantage = "fewer parameters" if is_equal else "less memory"
        speed = f"reaches {speeds[choice] / speeds[fastest]:.0%} of the highest speed"
        if choice in perhaps_as_fast:
            speed = f"may be as fast as {fastest}"
        reason = "" if choice == fastest else f", which {speed} with {advantage}"
        return f"{summary} Use {choice}{reason}. {_explain_paper(choice, num_words, speeds)}"

    # The vocabulary is large. Is the paper's best end fast enough here?
    relative_speed = speeds[BEST_IN_PAPER] / speeds[fastest]
    reaches = f"reaches {relative_speed:.0%} of the highest speed here"
    if BEST_IN_PAPER in perhaps_as_fast:
        reaches = f"may be as fast as {fastest} here"
    if relative_speed >= EQUAL_SPEED or BEST_IN_PAPER in perhaps_as_fast:
        return f"{summary} Use {BEST_IN_PAPER}: it has the best perplexity in the paper, and {reaches}."
    return (
        f"{summary} {BEST_IN_PAPER} has the best perplexity in the paper and {reaches}: "
        f"use {fastest} if speed decides, {BEST_IN_PAPER} if perplexity does."
    )


def _find_leanest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that need about the least memory, the one with the fewest parameters first."""
    limit = EQUAL_MEMORY * min(row.memory_bytes or 0 for row in rows)
    leanest_rows = [row for row in rows if (row.memory_bytes or 0) <= limit]
    return sorted(leanest_rows, key=lambda row: row.parameters or 0)


def _summarise_best(end_by_property: Mapping[str, str]) -> str:
    """Return a sentence that names the best end in each measurement. An end is named once."""
    properties_by_end: dict[str, list[str]] = {}
    for description, end in end_by_property.items():
        properties_by_end.setdefault(end, []).append(description)
    clauses = []
    for end, descriptions in properties_by_end.items():
        *first, last = descriptions
        clauses.append(f"{end} {', '.join(first)} and {last}" if first else f"{end} {last}")
    return f"{', '.join(clauses)}."


def _explain_paper(choice: str, num_words: int, speeds: Mapping[str, float]) -> str:
    """Explain why the paper's best end is not recommended, if it is not."""
    if choice == BEST_IN_PAPER:
        return "It also has the best perplexity in the paper."
    if num_words >= MIN_WORDS_FOR_PAPER_BANDS:
        return f"{BEST_IN_PAPER}, the best in the paper, was not measured."
    relative_speed = ""
    if BEST_IN_PAPER in speeds:
        relative_speed = f" ({speeds[BEST_IN_PAPER] / max(speeds.values()):.0%} of the highest speed here)"
    return (
        f"{BEST_IN_PAPER}, the best in the paper{relative_speed}, is made for vocabularies of more than "
        f"{MIN_WORDS_FOR_PAPER_BANDS:,} words; this text has {num_words:,}. Perplexities are not measured: to compare "
        "them, train both."
    )
