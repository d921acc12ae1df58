"""An experiment of skip-gram with negative sampling: everything that its run depends on (Press & Wolf 2017, section 3).

There is no encoder and no text to score: what is trained are the two tables, or the one that both ends share, and what
they are judged by is how near they put words that people find alike.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from reefknot.kernels.skip_gram_draws import Counts, Draws
from reefknot.lab.config.settings import Count, Dim, NonNegative, Settings
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.vocabulary import Sides, Vocabulary, VocabularySettings
from reefknot.lab.training.skip_gram import SkipGramTraining
from reefknot.nn.models.skip_gram import SkipGram


class SkipGramSettings(Settings):
    """Skip-gram with negative sampling; the defaults are word2vec's."""

    dim: Annotated[Dim, Field(description="dimension of the word vectors")] = 100
    tied: Annotated[bool, Field(description="use one table for input and output")] = False
    window: Annotated[
        Count, Field(le=1000, description="maximum number of context words on either side; reduced at random")
    ] = 5
    negatives: Annotated[Count, Field(le=1000, description="noise words per pair")] = 5
    power: Annotated[NonNegative, Field(le=10, description="noise words are drawn by counts to this power")] = 0.75
    sample: Annotated[
        NonNegative,
        Field(le=1, description="words with a larger share of the text are left out at random; 0: never"),
    ] = 1e-3

    def draws(self, counts: Counts, *, eos: int | None, unknown: int | None, seed: int) -> Draws:
        """Return what is drawn at random over a text with these word counts.

        `eos` is the id of the word that ends lines, `unknown` that of words outside the vocabulary.
        """
        return Draws.of(
            counts,
            window=self.window,
            negatives=self.negatives,
            power=self.power,
            sample=self.sample,
            eos=eos,
            unknown=unknown,
            seed=seed,
        )

    def build(self, vocab_size: int) -> SkipGram:
        """Return the model with initial weights drawn from torch's generator."""
        return SkipGram.create(vocab_size, self.dim, self.tied)


class VectorEvaluation(Settings):
    """How finished word vectors are judged."""

    similarity: Annotated[
        bool, Field(description="hold the vectors against people's judgements of word pairs, if they are here")
    ] = False


class SkipGramExperiment(Settings):
    """Everything a run of skip-gram depends on."""

    corpus: CorpusSettings
    vocabulary: VocabularySettings = VocabularySettings()
    skip_gram: SkipGramSettings
    training: SkipGramTraining = SkipGramTraining()
    evaluation: VectorEvaluation = VectorEvaluation()

    @model_validator(mode="after")
    def _check_text(self) -> SkipGramExperiment:
        if self.corpus.pairs is not None or self.vocabulary.sides != "joint":
            raise ValueError("skip-gram reads one text: leave out corpus.pairs and vocabulary.sides")
        if self.vocabulary.keep_spellings:
            raise ValueError("vocabulary.keep_spellings: a table of skip-gram reads no spellings; leave it out")
        return self

    @property
    def start(self) -> None:
        """No run of skip-gram begins with the weights of another."""
        return None

    def build(self, vocabulary: Vocabulary | int | Sides) -> SkipGram:
        """The tables that are trained, drawn from torch's generator as it stands."""
        words = vocabulary.target if isinstance(vocabulary, Sides) else vocabulary
        return self.skip_gram.build(words if isinstance(words, int) else len(words))
