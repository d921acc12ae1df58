"""An experiment of skip-gram with negative sampling: everything that its run depends on (Press & Wolf 2017, section 3).

There is no encoder and no text to score: what is trained are the two tables, or the one that both ends share, and what
they are judged by is how near they put words that people find alike.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from reefknot.lab.config.settings import Settings
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.vocabulary import Sides, Vocabulary, VocabularySettings
from reefknot.lab.training.skip_gram import SkipGramTraining
from reefknot.nn.models.skip_gram import SkipGram, SkipGramSettings


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
        return SkipGram.of(self.skip_gram, words if isinstance(words, int) else len(words))
