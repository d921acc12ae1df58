"""The typed definition of `result.json` and of saved evaluations. All code uses these types to read and write them.

Start reading at `RunResult`. The classes above it are its fields, and the field names are the keys of the JSON file.

    RunResult          RUN/result.json: the scores of a finished run
    SavedEvaluation    RUN/evaluations/<name>.json: scores of its best weights in another mode, in other windows, or
                       with another search
    MetricsLine        a line of RUN/metrics.jsonl, as reports read it

Terms: a row is one experiment of a recipe. The ends of a model are the input end, which turns words into vectors, and
the output end, which is a classifier with its loss. Tied ends share one table of word vectors.

Files of format 1 are upgraded when they are read, and never rewritten (`upgrade.py`). This module does not import
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.scores import (
    BLEU,
    CHRF,
    PERPLEXITY,
    RHO,
    TOKEN_PERPLEXITY,
    ItemValues,
    MetricScore,
    TextScore,
)
from reefknot.lab.runs.stored import OMIT_NONE, Stored, parse
from reefknot.storage import manifest
from reefknot.storage.files import decode_object

FORMAT: Literal[2] = 2
"""The format of the files that this version writes."""
SPLITS = ("valid", "test")
"""The splits whose scores an evaluation saves."""
SCORES_FILE = "scores.safetensors"
"""Negative log-likelihood of every token, by split."""


# -- where a result comes from -----------------------------------------------------------------------------------------


class Corpus(Stored):
    """The texts of a run."""

    name: str
    """Name of the corpus, or of the folder of a text."""
    fingerprint: str = ""
    """Hash of the texts."""
    describe: str = ""
    """Human-readable description of the texts: sizes and vocabulary."""


class Parameters(Stored):
    """The number of parameters of a model."""

    total: int
    """The number of parameters of the whole model."""
    parts: dict[str, int] = Field({})
    """The number of parameters of each part of the model, such as `encoder`."""
    expected: int | None = None
    """The number that the recipe expects."""


# -- scores and training -----------------------------------------------------------------------------------------------


class ProtocolScores(Stored):
    """The perplexity of one split as the program of a paper counts it."""

    perplexity: float
    """Perplexity as the program of the paper computes it."""
    nll: float | None = None
    """Mean negative log-likelihood, in nats."""
    tokens: int | None = None
    """The number that the program divides by."""


ProtocolName = Literal["definition", "zaremba", "awd"]
"""Protocols for computing a perplexity: our definition, or the program of a paper (`lab/evaluation/protocols.py`)."""


class Protocol(Stored):
    """The scores of the same weights by the protocol of a paper's program."""

    name: str
    """Name of the protocol."""
    definition: str = ""
    """Human-readable description of the protocol."""
    valid: ProtocolScores | None = None
    """Scores of the validation text."""
    test: ProtocolScores | None = None
    """Scores of the test text."""


class Best(Stored):
    """The step and the epoch at which the scored weights were saved."""

    step: int
    """The number of updates."""
    epoch: float
    """The epoch; 0 for the starting weights."""


class Start(Stored):
    """The finished run whose weights this run started from."""

    config_hash: str
    """Hash of the settings of that run."""
    weights_sha256: str
    """Hash of its weights."""


class Training(Stored):
    """The length of the training, its speed and its memory."""

    steps: int = 0
    """The number of updates."""
    averaged_from_epoch: int | None = None
    """The first epoch whose weights are averaged; None without averaging."""
    stopped: str | None = None
    """The rule that ended training early."""
    epochs: float | None = 0
    """The number of epochs in the settings; None if the settings limit updates instead."""
    tokens: int = 0
    """The number of tokens read, over all epochs."""
    seconds: float = 0.0
    """Seconds of training, without validation."""
    tokens_per_second: float | None = None
    """The number of tokens read per second of training."""
    peak_memory_bytes: int | None = None
    """Peak memory: of the GPU, or of the process without a GPU."""
    device: str = ""
    """Name of the GPU or CPU."""
    processes: int = 1
    """The number of processes that trained together."""
    earlier: tuple[str, ...] = ()
    """If the run was trained longer, the names of the folders in RUN/earlier with the results of shorter lengths."""
    workers: int | None = None
    """The number of threads that train skip-gram."""


# -- analyses of the trained model -------------------------------------------------------------------------------------


class Band(Stored):
    """A frequency band: the tokens of a text that were seen `low` to `high` times in training, and their mean loss."""

    low: int
    """Smallest count of the band."""
    high: int | None
    """None if there is no upper limit."""
    tokens: int
    """The number of tokens in the band."""
    types: int = 0
    """The number of distinct words in the band."""
    nll: float
    """Mean loss of the tokens, in nats."""

    @property
    def label(self) -> str:
        """The limits of the band as tables show them."""
        if self.high is None:
            return f"{self.low:,}+"
        if self.low == self.high:
            return f"{self.low:,}"
        return f"{self.low:,}–{self.high:,}"


class Frequency(Stored):
    """Mean loss by the training frequency of the target, and by the training frequency of the token before it."""

    target: tuple[Band, ...] = ()
    """Bands by the count of the predicted token."""
    previous: tuple[Band, ...] = ()
    """Bands by the count of the token before it."""


NearestWords = dict[str, tuple[tuple[str, float], ...]]
"""The nearest words of each word, with their cosines."""


class Neighbors(Stored):
    """The nearest words of some words, by their input vectors and by their output vectors."""

    input: NearestWords = Field({})
    """By the vectors of the input end."""
    output: NearestWords = Field({})
    """By the vectors of the output end."""
    tied: bool = False
    """Whether both ends share one table."""


class Judgement(Stored):
    """The score of word vectors on a word-similarity benchmark: Spearman's rho with its 95 % interval.

    `rho`, `low` and `high` are None if rho is undefined: there are fewer than 3 pairs, or all human scores or all
    cosines are equal. Only `low` and `high` are None if there are fewer than 10 pairs, or if rho is 1 or -1.
    """

    name: str
    """Name of the benchmark."""
    rho: float | None = None
    """Spearman's rank correlation with human judgements."""
    low: float | None = None
    """Lower end of the interval."""
    high: float | None = None
    """Upper end of the interval."""
    pairs: int = 0
    """The number of pairs with a vector for both words."""
    of: int = 0
    """The number of pairs in the benchmark."""


class Picture(Stored):
    """The vectors of some words, projected to a plane by principal component analysis."""

    xy: tuple[tuple[float, float], ...]
    """The position of each word."""
    explained: tuple[float, float]
    """The share of the variance along each of the two axes."""


class Embedding(Stored):
    """Example words and their neighbours, and their positions by input, output or tied vectors."""

    words: tuple[str, ...] = ()
    """The words of the picture."""
    groups: tuple[int, ...] = ()
    """For each word, the index of the example word that it belongs to."""
    input: Annotated[Picture | None, OMIT_NONE] = None
    """Positions by input vectors."""
    output: Annotated[Picture | None, OMIT_NONE] = None
    """Positions by output vectors."""
    tied: Annotated[Picture | None, OMIT_NONE] = None
    """Positions by the vectors of a shared table."""


class Subspace(Stored):
    """The distance between the subspaces of the input vectors and of the output vectors (Inan et al. 2017)."""

    distance: float
    """Distance between the two subspaces."""
    chance: float
    """The distance that unrelated tables of word vectors would have."""
    words: int
    """The number of words in each table."""
    dim: int
    """The dimension of the vectors."""
    centred_distance: Annotated[float | None, OMIT_NONE] = None
    """The distance after the mean vector of each table is subtracted from its rows; None in older results."""


class TailsOpened(Stored):
    """The share of the tails that an exact search for the k best words opened, over the first tokens of a text.

    A tail is a group of rare words of an adaptive softmax. The search skips tails that cannot have a word among the k
    best.
    """

    k: int
    """The number of words that are searched."""
    tokens: int
    """The number of tokens of the text."""
    share: float
    """Share of the tails that were opened."""

    def __str__(self) -> str:
        return f"the {self.k} best next words: {self.share:.1%} of the tails opened (first {self.tokens:,} tokens)"


class Sample(Stored):
    """A text that the model wrote."""

    prompt: str
    """The words before the text."""
    text: str
    """The words that the model wrote."""
    temperature: float = 1.0
    """Temperature of sampling."""
    seed: int = 0
    """Seed of sampling."""


# -- translations ------------------------------------------------------------------------------------------------------


class LengthBand(Stored):
    """The pairs of sentences whose source has `low` to `high` tokens, and their BLEU."""

    low: int = Field(alias="from")
    """Smallest number of tokens of a source."""
    high: int | None = Field(alias="to")
    """None if there is no upper limit."""
    pairs: int
    """The number of pairs."""
    bleu: float
    """BLEU of these pairs."""


class TranslationScores(Stored):
    """The scores of one split's translations by sacrebleu. The signatures record its settings."""

    bleu: float
    """BLEU, from 0 to 100."""
    chrf: float | None = None
    """chrF, from 0 to 100."""
    bleu_signature: str = ""
    """How sacrebleu computed BLEU."""
    chrf_signature: str = ""
    """How sacrebleu computed chrF."""
    brevity_penalty: float | None = None
    """Factor of BLEU for short translations."""
    length_ratio: float | None = None
    """Length of the translations divided by the length of the references."""
    pairs: int = 0
    """The number of pairs of sentences."""
    unfinished: int = 0
    """The number of translations that reached the length limit."""
    search: dict[str, Any] = Field({})
    """The settings of the search for translations, such as the beam."""
    by_length: tuple[LengthBand, ...] = ()
    """BLEU by the length of the source."""


class Example(Stored):
    """A pair and its translation, with the attention over the source tokens for every target token."""

    source: str
    """The sentence to translate."""
    reference: str
    """Its translation in the corpus."""
    translation: str
    """The translation of the model."""
    source_tokens: tuple[str, ...] = ()
    """Tokens of the source."""
    target_tokens: tuple[str, ...] = ()
    """Tokens of the translation."""
    attention: tuple[tuple[float, ...], ...] = ()
    """One row per target token, with one weight per source token."""


class Translations(Stored):
    """The scores of a translator's output, and some examples."""

    valid: TranslationScores | None = None
    """Scores of the validation text."""
    test: TranslationScores | None = None
    """Scores of the test text."""
    examples: tuple[Example, ...] = ()
    """Some sentences with their translations."""


# -- the files ---------------------------------------------------------------------------------------------------------


class _SplitScores(Stored):
    """The scores of a result or of a saved evaluation, by split."""

    def score(self, split: str) -> TextScore | None:
        """Return the perplexity of a split, with details of the measurement."""
        score: TextScore | None = getattr(self, split, None)
        return score

    def translated(self, split: str) -> TranslationScores | None:
        """Return the scores of the translations of a split."""
        translations: Translations | None = getattr(self, "translation", None)
        scores: TranslationScores | None = getattr(translations, split, None)
        return scores

    def scores(self, split: str) -> tuple[MetricScore, ...]:
        """Return the scores of a split in all metrics. The first score is used to compare systems."""
        scores: list[MetricScore] = []
        translation_scores = self.translated(split)
        if translation_scores is not None:
            sentences = ItemValues(file=f"translations/{split}.txt", item="sentence")
            scores.append(MetricScore(metric=BLEU, value=translation_scores.bleu, items=sentences))
            if translation_scores.chrf is not None:
                scores.append(MetricScore(metric=CHRF, value=translation_scores.chrf, items=sentences))
        text_score = self.score(split)
        if text_score is not None:
            losses = ItemValues(file=SCORES_FILE, key=split, item="token")
            scores.append(MetricScore(metric=PERPLEXITY, value=text_score.per_word, items=losses))
            scores.append(MetricScore(metric=TOKEN_PERPLEXITY, value=text_score.perplexity, items=losses))
        return tuple(scores)


Task = Literal["language_model", "translation", "skip_gram"]
"""The kinds of experiments (`lab/tasks`)."""


class RunResult(_SplitScores):
    """The content of `result.json` of a finished run."""

    # -- where the result comes from -----------------------------------------------------------------------------
    format: Literal[2]
    """Format of the file."""
    task: Task
    """The kind of experiment."""
    recipe: str
    """Name of the recipe."""
    row: str
    """Name of the row."""
    seed: int
    """Seed of all random numbers."""
    command: str | None = None
    """The command that trained the run."""
    commit: str | None = None
    """Commit of the code; None if it is not known."""
    dirty: bool | None = None
    """Whether the code had uncommitted changes."""
    source_sha256: str | None = None
    """Hash of the source code."""
    config_hash: str | None = None
    """Hash of the settings."""
    corpus: Corpus
    """The texts."""
    parameters: Parameters
    """The size of the model."""
    paper: dict[str, float] = Field({})
    """Scores of the same row in the paper, such as the perplexity of a split."""
    paper_similarity: dict[str, dict[str, float]] = Field({})
    """The paper's Spearman correlation (rho) by end and benchmark."""
    changed: tuple[Change, ...] = ()
    """Settings that differ from the recipe's row."""
    # -- scores --------------------------------------------------------------------------------------------------
    train: Annotated[TextScore | None, OMIT_NONE] = None
    """Perplexity of the training text, if it was scored."""
    valid: Annotated[TextScore | None, OMIT_NONE] = None
    """Perplexity of the validation text."""
    test: Annotated[TextScore | None, OMIT_NONE] = None
    """Perplexity of the test text."""
    protocol: Annotated[Protocol | None, OMIT_NONE] = None
    """The same scores by the protocol of a paper's program."""
    best: Annotated[Best | None, OMIT_NONE] = None
    """When the scored weights were saved."""
    averaged: tuple[str, ...] = ()
    """Checkpoints whose mean is scored; empty if the best checkpoint is scored."""
    # -- training ------------------------------------------------------------------------------------------------
    start: Start | None = None
    """The run that training started from, if there is one."""
    training: Training = Training()
    """Length and speed of training."""
    # -- analyses of the trained model ---------------------------------------------------------------------------
    frequency: Frequency = Frequency()
    """Loss on the test text by training frequency."""
    samples: tuple[Sample, ...] = ()
    """Texts that the model wrote."""
    tails_opened: Annotated[TailsOpened | None, OMIT_NONE] = None
    """How many tails of an adaptive softmax a search opens."""
    translation: Annotated[Translations | None, OMIT_NONE] = None
    """Scores of a translator."""
    tied: Annotated[Literal["three-way", "decoder", "none"] | None, OMIT_NONE] = None
    """Which ends of a translator share a table."""
    neighbors: Neighbors = Neighbors()
    """Nearest neighbours of some words."""
    embedding: Embedding = Embedding()
    """A picture of some word vectors."""
    similarity: dict[str, tuple[Judgement, ...]] = Field({})
    """Word similarity scores by end: `input` and `output`, or `tied`."""
    subspace: Annotated[Subspace | None, OMIT_NONE] = None
    """Distance between the ends of an untied model."""

    def similarity_scores(self, end: str) -> dict[str, MetricScore]:
        """Return rho of the vectors of an end (`input`, `output` or `tied`), by benchmark."""
        scores: dict[str, MetricScore] = {}
        for judgement in self.similarity.get(end, ()):
            if judgement.rho is not None:
                scores[judgement.name] = MetricScore(metric=RHO, value=judgement.rho)
        return scores


class Search(Stored):
    """A search for the best settings of an evaluation mode, on the validation text."""

    text: str
    """A description of the text that was searched on."""
    best: dict[str, int | float]
    """The best settings."""
    edges: tuple[str, ...] = ()
    """Settings whose best value is at the edge of the search grid."""
    note: Annotated[str | None, OMIT_NONE] = None
    """A remark on the search."""
    points: tuple[dict[str, int | float | None], ...] = ()
    """The settings that were tried, each with its mean loss, which is None if it is not a number."""


class SavedEvaluation(_SplitScores):
    """The content of `evaluations/<name>.json`. Plain scores are in result.json."""

    format: Literal[2]
    """Format of the file."""
    kind: str
    """The name of the file: a mode, a window name (`modes.py`), or a search for translations."""
    settings: dict[str, Any] = Field({})
    """Settings of the mode."""
    search: Search | None = None
    """How the settings were tuned, if they were."""
    valid: Annotated[TextScore | None, OMIT_NONE] = None
    """Perplexity of the validation text."""
    test: Annotated[TextScore | None, OMIT_NONE] = None
    """Perplexity of the test text."""
    other: Annotated[TextScore | None, OMIT_NONE] = None
    """The score of another text (`evaluate --text`). `other.text` has its name, as `split`, and its SHA-256."""
    translation: Annotated[Translations | None, OMIT_NONE] = None
    """Scores of a translator."""
    command: str | None = None
    """The command that evaluated the run."""
    commit: str | None = None
    """Commit of the code; None if it is not known."""
    dirty: bool | None = None
    """Whether the code had uncommitted changes."""
    source_sha256: str | None = None
    """Hash of the source code."""


class WallTime(Stored):
    """Times and speeds, which differ between two equal runs."""

    seconds: float | None = None
    """Seconds of training so far, in a line about training; seconds of the validation, in a line about validation."""
    tokens_per_second: Annotated[float | None, OMIT_NONE] = None
    """The number of tokens read per second since the last line."""
    flops: Annotated[float | None, OMIT_NONE] = None
    """Floating-point operations of the model per second."""
    memory_bytes: Annotated[int | None, OMIT_NONE] = None
    """Peak memory so far."""
    share: Annotated[float | None, OMIT_NONE] = None
    """Share of the speed of a large matrix product on the same device."""


class MetricsLine(Stored):
    """One line of `metrics.jsonl`."""

    kind: str
    """What the line is about: `train`, `valid`, or `pairs` for the training of skip-gram."""
    step: int
    """The number of updates so far."""
    epoch: float
    """The epoch that the line belongs to."""
    nll: float
    """Mean loss, in nats: per token for `train` and `valid`, and per pair of words for `pairs`."""
    perplexity: Annotated[float | None, OMIT_NONE] = None
    """exp(nll), in a line about validation."""
    tokens: float = 1.0
    """The number of tokens behind a training loss, which is a mean; for skip-gram, the number of words read so far."""
    learning_rate: Annotated[float | None, OMIT_NONE] = None
    """Learning rate of the last update."""
    gradient_norm: Annotated[float | None, OMIT_NONE] = None
    """Norm of the gradient of the last update, before clipping."""
    parts: dict[str, float | None] = Field({})
    """Means of the other parts of the loss, such as the augmented loss."""
    penalties: dict[str, float | None] = Field({})
    """Penalties that are added to the loss, in the last update."""
    skipped: Annotated[int | None, OMIT_NONE] = None
    """The number of updates that were skipped because of an overflow in float16."""
    wall: WallTime = WallTime()
    """Times and speeds."""


def read_result(path: Path) -> RunResult:
    """Read a result of any format."""
    from reefknot.lab.runs.upgrade import upgrade_result

    content = manifest.read_object(path)
    return parse(RunResult, upgrade_result(content, path), path)


def read_metrics_line(line: bytes, source: str) -> MetricsLine:
    """Read a line of metrics.jsonl. `source` names the line in error messages."""
    from reefknot.lab.runs.upgrade import upgrade_metrics_line

    content = decode_object(line, source)
    return parse(MetricsLine, upgrade_metrics_line(content), source)


def read_evaluation(path: Path, result: RunResult | None) -> SavedEvaluation:
    """Read a saved evaluation of any format. `result` is the result of its run."""
    from reefknot.lab.runs.upgrade import upgrade_evaluation

    content = manifest.read_object(path)
    return parse(SavedEvaluation, upgrade_evaluation(content, result, path), path)
