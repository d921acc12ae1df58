"""The task of skip-gram with negative sampling (word2vec; Press & Wolf 2017, section 3): trains word vectors.

Start with `SkipGramTask`, the shortest complete task. The model learns to tell the context words of a word from random
words, the noise words. It has a table of input vectors (of words) and a table of output vectors (of context words). If
it is tied, both are one table.

There is no encoder, and no text is scored. Word vectors are evaluated by the correlation of their similarities with
human judgements.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator

from reefknot.errors import SettingsError
from reefknot.kernels.skip_gram_draws import Counts, PairSampler, mask_learned_words
from reefknot.lab.config.settings import Count, Dim, NonNegative, Settings
from reefknot.lab.tasks.contract import Experiment, FittedModel, Session, Task
from reefknot.lab.tasks.word_vectors import build_word_vectors, evaluate_vectors
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.lab.training.skip_gram import SkipGramTrainer, SkipGramTraining
from reefknot.lab.training.state import Progress
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.similarity import Benchmark


class SkipGramSettings(Settings):
    """Settings of skip-gram with negative sampling. The defaults are those of word2vec."""

    dim: Annotated[Dim, Field(description="Dimension of the word vectors.")] = 100
    tied: Annotated[bool, Field(description="Use one table for input and output.")] = False
    window: Annotated[
        Count,
        Field(
            le=1000, description="Maximum number of context words on either side. The actual number is drawn at random."
        ),
    ] = 5
    negatives: Annotated[Count, Field(le=1000, description="Number of noise words per pair.")] = 5
    power: Annotated[
        NonNegative, Field(le=10, description="Exponent of the word counts in the distribution of noise words.")
    ] = 0.75
    sample: Annotated[
        NonNegative,
        Field(
            le=1,
            description="Words with a larger share of the text are randomly left out. With 0, no word is left out.",
        ),
    ] = 1e-3

    def build_sampler(self, counts: Counts, *, eos: int | None, unknown: int | None, seed: int) -> PairSampler:
        """Return the sampler that draws the training pairs of a text: windows, noise words, words that are left out.

        Args:
            counts: Number of occurrences of every word in the text.
            eos: Id of the end of a line, if there is one.
            unknown: Id of words outside the vocabulary, if there is one.
            seed: Seed of the random numbers.
        """
        return PairSampler.from_counts(
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
    """How trained word vectors are evaluated."""

    similarity: Annotated[
        bool,
        Field(description="Compare the word vectors with human judgements of word pairs, if benchmarks are available."),
    ] = False


class SkipGramExperiment(Experiment):
    """Everything a run of skip-gram depends on."""

    task: ClassVar[str] = "skip_gram"

    skip_gram: SkipGramSettings
    training: SkipGramTraining = SkipGramTraining()
    evaluation: VectorEvaluation = VectorEvaluation()

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.corpus.pairs is not None or self.vocabulary.sides != "joint":
            raise ValueError("skip-gram reads monolingual text; leave out corpus.pairs and vocabulary.sides")
        if self.vocabulary.keep_spellings:
            raise ValueError("vocabulary.keep_spellings: skip-gram cannot read spellings; leave it out")
        return self

    @property
    def workers(self) -> int | None:
        return self.training.workers


class SkipGramTask(Task[SkipGramExperiment, Dataset, SkipGram]):
    """Train skip-gram and evaluate its word vectors. The last weights are used, because no text is scored."""

    Settings: ClassVar[type[SkipGramExperiment]] = SkipGramExperiment
    noun: ClassVar[str] = "a run of skip-gram"
    scores_text: ClassVar[bool] = False
    verbs: ClassVar[str] = "`reefknot vectors` or `reefknot report`"

    def build_model(self, vocabulary: Vocabulary | VocabularyPair | int) -> SkipGram:
        if isinstance(vocabulary, VocabularyPair):
            vocabulary = vocabulary.target
        if isinstance(vocabulary, int):
            vocab_size = vocabulary
        else:
            vocab_size = len(vocabulary)
        return self.experiment.skip_gram.build(vocab_size)

    def check_data(self, dataset: Dataset, world: World) -> None:
        if world.size > 1:
            raise SettingsError("skip-gram is trained by one process; set training.workers instead of using torchrun")
        self._create_sampler(dataset)  # raises an error if the text has too few words

    def _create_sampler(self, dataset: Dataset) -> PairSampler:
        vocabulary = dataset.vocabulary
        return self.experiment.skip_gram.build_sampler(
            vocabulary.counts, eos=vocabulary.eos, unknown=vocabulary.unk, seed=self.experiment.seed
        )

    def fit(self, model: SkipGram, dataset: Dataset, session: Session) -> FittedModel[SkipGram]:
        trainer = SkipGramTrainer(
            model,
            dataset.splits["train"].ids,
            self._create_sampler(dataset),
            self.experiment.training,
            session.run,
            display=session.display,
            device=session.world.device,
            name=session.name,
            trackers=session.trackers,
        )
        progress = trainer.train()
        return FittedModel(model, progress)

    def score(
        self,
        model: SkipGram,
        dataset: Dataset,
        session: Session,
        progress: Progress,
        benchmarks: Mapping[str, Benchmark],
    ) -> dict[str, Any]:
        vectors_by_end = self.vectors(model, dataset.vocabulary)
        return evaluate_vectors(vectors_by_end, dataset.vocabulary, benchmarks, tied=model.tied)

    def vectors(self, model: SkipGram, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        """Return the vectors of the trained words. <eos> and <unk> are left out, because their rows are not trained."""
        with torch.no_grad():
            tensors_by_end = {"input": model.input.vectors(), "output": model.output.vectors()}
        vectors_by_end = build_word_vectors(tensors_by_end, vocabulary, tied=model.tied)

        is_learned_V = mask_learned_words(vocabulary.counts, eos=vocabulary.eos, unknown=vocabulary.unk)
        learned_by_end = {}
        for end, vectors in vectors_by_end.items():
            learned_words = compress(vectors.words, is_learned_V)
            learned_by_end[end] = vectors.select(learned_words)
        return learned_by_end
