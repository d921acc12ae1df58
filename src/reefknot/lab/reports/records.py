"""What stands in the files of a run that reports read: result.json, evaluations/*.json and metrics.jsonl, checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Stored(BaseModel):
    """A part of a stored record. Keys this version does not know are ignored, so newer records still read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Corpus(Stored):
    name: str
    fingerprint: str = ""
    describe: str = ""


class Parameters(Stored):
    total: int
    parts: dict[str, int] = {}
    expected: int | None = None


class Score(Stored):
    """One split's perplexity, with what it was counted over and the text that defines it."""

    perplexity: float
    nll: float
    word_perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens: int = 0
    words: int | None = None
    bytes: int | None = None
    definition: str = ""

    @property
    def per_word(self) -> float:
        """What rows can be compared by: the same as `perplexity`, but for tokens that are pieces of words."""
        return self.perplexity if self.word_perplexity is None else self.word_perplexity


class Perplexity(Stored):
    """A figure alone: what it was counted over, its protocol says."""

    perplexity: float


class Protocol(Stored):
    """The same weights scored in a paper's own way, to be compared with the paper's figures."""

    name: str
    definition: str = ""
    valid: Perplexity | None = None
    test: Perplexity | None = None


class Best(Stored):
    step: int
    epoch: float


class Training(Stored):
    steps: int = 0
    epochs: float | None = 0
    """Those that were asked for; None where so many updates were."""
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    averaged_from_epoch: int | None = None
    device: str = ""


class Band(Stored):
    """Words seen `low` to `high` times in training (None: no upper end), and their mean loss in nats."""

    low: int
    high: int | None
    tokens: int
    nll: float
    types: int = 0

    @property
    def label(self) -> str:
        if self.high is None:
            return f"{self.low:,}+"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


class Frequency(Stored):
    target: tuple[Band, ...] = ()
    previous: tuple[Band, ...] = ()


class Neighbors(Stored):
    """For each word the nearest words and their cosines, in the input table and among the label vectors."""

    tied: bool = False
    input: dict[str, tuple[tuple[str, float], ...]] = {}
    labels: dict[str, tuple[tuple[str, float], ...]] = {}


class Judgement(Stored):
    """Rank correlation with a benchmark of word similarity, its 95 % interval, and the pairs whose words are known."""

    name: str
    rho: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    of: int = 0


class Picture(Stored):
    """Places of words in a plane, and the share of the variance along either axis."""

    xy: tuple[tuple[float, float], ...]
    explained: tuple[float, float]


class Embedding(Stored):
    """Words around examples (`groups` numbers them) and their places at either end, or in the table that both share."""

    words: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    input: Picture | None = None
    output: Picture | None = None
    tied: Picture | None = None


class Sample(Stored):
    prompt: str
    text: str
    temperature: float = 1.0
    seed: int = 0


class LengthBand(Stored):
    """Pairs whose source has `low` to `high` tokens (None: no upper end), and their BLEU."""

    low: int = Field(alias="from")
    high: int | None = Field(alias="to")
    pairs: int
    bleu: float


class Translated(Stored):
    """One split's translations, as sacrebleu counts them; a signature says how."""

    bleu: float
    chrf: float | None = None
    bleu_signature: str = ""
    chrf_signature: str = ""
    brevity_penalty: float | None = None
    length_ratio: float | None = None
    pairs: int = 0
    unfinished: int = 0
    search: dict[str, Any] = {}
    by_length: tuple[LengthBand, ...] = ()


class Example(Stored):
    """A pair and its translation, with the weights over the source's tokens at each of the translation's."""

    source: str
    reference: str
    translation: str
    source_tokens: tuple[str, ...] = ()
    target_tokens: tuple[str, ...] = ()
    attention: tuple[tuple[float, ...], ...] = ()


class Translations(Stored):
    valid: Translated | None = None
    test: Translated | None = None
    examples: tuple[Example, ...] = ()


class Record(Stored):
    """`result.json` of a finished run."""

    format: Literal[1]
    recipe: str
    row: str
    seed: int
    command: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    source_sha256: str | None = None
    config_hash: str | None = None
    corpus: Corpus
    parameters: Parameters
    paper: dict[str, float] = {}
    paper_similarity: dict[str, dict[str, float]] = {}
    """The paper's rho by end and benchmark."""
    train: Score | None = None
    valid: Score | None = None
    test: Score | None = None
    protocol: Protocol | None = None
    best: Best | None = None
    averaged: tuple[str, ...] = ()
    """The checkpoints whose mean was scored in the place of the best; none where that was not asked for."""
    changed: tuple[str, ...] = ()
    """Settings that differ from the recipe's row, which then is not the paper's any more."""
    training: Training = Training()
    frequency: Frequency = Frequency()
    neighbors: Neighbors = Neighbors()
    embedding: Embedding = Embedding()
    similarity: dict[str, tuple[Judgement, ...]] = {}
    """By end: input and output, or tied."""
    samples: tuple[Sample, ...] = ()
    translation: Translations | None = None
    tied: str | None = None
    """Of a translator, which of its ends share a table: three-way, decoder or none."""


class Searched(Stored):
    """What a search on the validation text came to."""

    edges: tuple[str, ...] = ()
    """Settings whose best value is the first or the last that was tried."""


class Evaluation(Stored):
    """`evaluations/<kind>.json`: the run's best weights, scored while they learn or remember, with dropout, or
    in other windows."""

    format: Literal[1]
    kind: str
    search: Searched | None = None
    valid: Score | None = None
    test: Score | None = None
    translation: Translations | None = None
    command: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    source_sha256: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _translations(cls, raw: Any) -> Any:
        """Of a translator, the figures of each text stand beside its perplexity."""
        if not isinstance(raw, dict):
            return raw
        texts = {split: raw.get(split) for split in ("valid", "test")}
        translated = {split: each for split, each in texts.items() if isinstance(each, dict) and "bleu" in each}
        return raw | ({"translation": translated} if translated else {})


class Wall(Stored):
    """What the clock says of a line."""

    seconds: float | None = None
    """Of a line of training, those since training began."""


class Metric(Stored):
    """One line of `metrics.jsonl`."""

    kind: str
    step: int
    epoch: float
    nll: float
    perplexity: float | None = None
    tokens: float = 1.0
    """What a line of training is the mean over; of skip-gram, the words read so far."""
    wall: Wall = Wall()

    @model_validator(mode="before")
    @classmethod
    def _of_pairs(cls, raw: Any) -> Any:
        """Skip-gram has the loss of a pair of words and its negatives, of which there is no perplexity."""
        return raw | {"kind": "pairs", "nll": raw["loss"]} if isinstance(raw, dict) and "loss" in raw else raw
