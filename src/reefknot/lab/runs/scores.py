"""Scores of a run: a value with its metric, and everything that a perplexity depends on apart from the model.

    MetricScore   one score: metric, value and the file that has the value of every item
    TextScore     the perplexity of one split, with the text, the mode and the windows that it was measured with
    ScoredText    which text was scored, and how its words became tokens

Results store these classes as JSON, so the field names are keys of result.json (`result.py`). A field is None if its
value is not known, because results of format 1 do not have all fields. This module does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, computed_field

from reefknot.lab.runs import definition
from reefknot.lab.runs.stored import OMIT_NONE, Stored

_LONG_WORD_TOKENS = 5
_LONG_WORD_BYTES = 20
"""If the mean word is longer than both limits, spaces do not separate words, as in Chinese or Japanese."""


class Metric(Stored):
    """What a score measures, and whether lower or higher is better."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    """Which values are better."""

    @property
    def sign(self) -> float:
        """1 if lower is better, -1 if higher is better. Sorting by value times sign puts the best first."""
        return 1.0 if self.better == "lower" else -1.0


PERPLEXITY = Metric(name="perplexity", unit="per word", better="lower")
TOKEN_PERPLEXITY = Metric(name="perplexity", unit="per token", better="lower")
BLEU = Metric(name="BLEU", unit="points of 100", better="higher")
CHRF = Metric(name="chrF", unit="points of 100", better="higher")
RHO = Metric(name="rho", unit="Spearman's rank correlation", better="higher")


class ItemValues(Stored):
    """Where the values of individual tokens or sentences are stored, for tests that compare two systems by item."""

    file: str
    """Path of the file, relative to the run folder."""
    key: str | None = None
    """Name of the tensor in a file of tensors; None for a file with one line per item."""
    item: Literal["token", "sentence"]


class MetricScore(Stored):
    """One score of a run: its metric, its value, and the values of individual items if they are stored."""

    metric: Metric
    value: float
    items: ItemValues | None = None


class ScoredText(Stored):
    """Which text was scored, and how its words became tokens."""

    split: str
    """Name of the split."""
    tokens: int | None = None
    """The number of tokens of the text, whether they are scored or not."""
    sha256: str | None = None
    """Hash of the text."""
    line_ends: bool | None = None
    """Whether the end of a line is a token, and so is scored."""
    unknown: int | None = None
    """The number of <unk> tokens."""
    unknown_sha256: str | None = None
    """Hash of the positions of words that contain an <unk> token."""
    tokenisation: Literal["words", "pieces"] | None = None
    """Whether tokens are words or sub-words (`pieces`)."""
    vocabulary_sha256: str | None = None
    """Hash of the tokens in the order of their ids, and of the rules that split words into tokens."""

    @property
    def complete(self) -> bool:
        """Whether all fields are known that decide if token losses can be paired with those of another run."""
        return None not in (self.sha256, self.line_ends, self.unknown_sha256, self.vocabulary_sha256)


class Dynamic(Stored):
    """Dynamic evaluation: the model learns from each segment after it is scored."""

    kind: Literal["dynamic"]
    """`dynamic`."""
    scale: str
    """Scale of the three rates below: `mean` or `sum` (`lab/evaluation/dynamic.py`)."""
    eta: float
    """Learning rate."""
    decay: float = Field(alias="lambda")
    """Rate at which the weights return to the trained weights."""
    epsilon: float
    """Added to the mean squared gradients, by which the updates are divided."""
    segment: int
    """Number of tokens that are scored before the model learns from them."""
    gradients: int | None = None
    """The number of gradients of the training text that the statistics were computed from."""
    plain: float | None = None
    """Perplexity of the same model without dynamic evaluation."""


class Cache(Stored):
    """A continuous cache: words that followed similar states become more likely."""

    kind: Literal["cache"]
    """`cache`."""
    weight: float
    """Share of the cache in the probability of a word."""
    theta: float
    """Sharpness of the distribution over the cached positions."""
    window: int
    """Number of positions in the cache."""
    fill: str
    """When the cache is used: from the start (`partial`), or only once it is full (`full`)."""
    plain: float | None = None
    """Perplexity of the same model without the cache."""


class MonteCarlo(Stored):
    """Monte-Carlo dropout: the mean probability of several passes with dropout on."""

    kind: Literal["mc"]
    """`mc`."""
    passes: int
    """Number of passes over the text."""
    window: int | None = None
    """The number of tokens that share a mask; None if every window has its own mask."""
    seed: int
    """Seed of the masks."""
    drops: bool = True
    """Whether the model has dropout. Without dropout all passes are equal, so only one is made."""
    lowest: float | None = None
    """Perplexity of the best pass."""
    highest: float | None = None
    """Perplexity of the worst pass."""
    plain: float | None = None
    """Perplexity of the same model without dropout."""


Mode = Annotated[Dynamic | Cache | MonteCarlo, Field(discriminator="kind")]


class TextScore(Stored):
    """The perplexity of one split, with everything that it depends on apart from the model."""

    perplexity: float
    """Perplexity per token: exp(nll)."""
    word_perplexity: float | None = None
    """Perplexity per word. It differs from `perplexity` if tokens are sub-words."""
    bits_per_byte: float | None = None
    """Total loss in bits per byte of the text. Bytes that no token predicts are charged with 8 bits each."""
    unpredicted_bytes: int | None = None
    """The number of bytes that no token predicts: those of unknown words and of additional white space. None in older
    results, in which `bits_per_byte` does not charge for them."""
    nll: float
    """Mean negative log-likelihood per token, in nats."""
    tokens: int = 0
    """The number of scored tokens."""
    words: int | None = None
    """The number of words and line ends that the scored tokens make up."""
    bytes: int | None = None
    """The number of bytes of the text in UTF-8, which `bits_per_byte` divides by."""
    streams: int | None = None
    """The number of contiguous parts of the text, each of which starts from an empty state."""
    windows: Annotated[str | None, OMIT_NONE] = None
    """Name of the windows (`modes.py`), if they were computed independently; None if the state was carried along."""
    pairs: Annotated[int | None, OMIT_NONE] = None
    """The number of pairs of sentences, for a translator."""
    precision: str | None = None
    """The data type of the computation, such as `float32`."""
    text: ScoredText | None = None
    """The text that was scored."""
    mode: Annotated[Mode | None, OMIT_NONE] = None
    """The mode of evaluation; None for plain scores."""
    passes: tuple[float, ...] = ()
    """Perplexity of each pass of Monte-Carlo dropout."""
    passes_deviation: float | None = None
    """Standard deviation of the perplexities of the passes."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def definition(self) -> str:
        """Human-readable description of the perplexity. It is made from the fields above, and no code parses it."""
        return definition.describe_score(self)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def unknown_share(self) -> float | None:
        """The share of unknown words among the words and line ends of the text; None if it was not recorded."""
        if self.text is None or self.text.unknown is None or not self.words:
            return None
        return min(self.text.unknown / self.words, 1.0)

    @property
    def uses_subwords(self) -> bool:
        """Whether the tokens are known to be sub-words."""
        return self.text is not None and self.text.tokenisation == "pieces"

    @property
    def fair_bits_per_byte(self) -> float | None:
        """Bits per byte; None if the model does not predict all words and `bits_per_byte` does not charge for this."""
        if self.unpredicted_bytes is None and self.unknown_share != 0:
            return None
        return self.bits_per_byte

    @property
    def per_word(self) -> float:
        """Perplexity per word, by which models are compared. It differs from `perplexity` if tokens are sub-words."""
        if self.word_perplexity is None:
            return self.perplexity
        return self.word_perplexity

    @property
    def tokens_per_word(self) -> float:
        """The mean number of tokens per word; 1 if tokens are words."""
        if not self.words:
            return 1.0
        return self.tokens / self.words

    @property
    def has_words(self) -> bool:
        """Whether spaces separate the words of the text, so that perplexity per word is meaningful."""
        if not self.words or not self.bytes:
            return True
        return self.tokens_per_word <= _LONG_WORD_TOKENS or self.bytes / self.words <= _LONG_WORD_BYTES
