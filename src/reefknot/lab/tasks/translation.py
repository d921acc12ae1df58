"""The task of translation: settings, building the model, and scoring by perplexity and BLEU.

Start with `TranslationTask`. It trains a model that reads a sentence in the source language and generates a sentence in
the target language. Its base class in `sequence_model.py` has the training, here on pairs of sentences. A trained model
is opened like this:

    trained_run = open_translator(run_folder)

A translator has two input ends, which turn ids into vectors: one for the source, and one for the target. Its output
end (classifier and loss) predicts the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, field_validator

from reefknot.lab.config.parts import INPUTS, OUTPUTS
from reefknot.lab.config.settings import check_settings
from reefknot.lab.evaluation import translation
from reefknot.lab.evaluation.beam import SearchSettings
from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.evaluation.references import score_references
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import Translations
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.lab.tasks.sequence_model import (
    SCORED_SPLITS,
    EvaluationSettings,
    SequenceExperiment,
    SequenceTask,
    add_section_to_errors,
    spelling_arguments,
)
from reefknot.lab.text.batches import Batches
from reefknot.lab.text.corpus import CorpusSettings, PairsSettings
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import PairDataset, open_pairs
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.nn.models.translator import Translator
from reefknot.storage.progress import Notify, silent

if TYPE_CHECKING:
    from reefknot.lab.tasks.compare_translations import TranslationComparisons
    from reefknot.lab.tasks.evaluate_translation import PairsEvaluations
    from reefknot.lab.tasks.requests import ComparisonRequest, EvaluationRequest, System
    from reefknot.storage.progress import ProgressCallback

NUM_EXAMPLES = 5
"""Number of example translations in a result, with their attention."""


class TranslationEvaluation(EvaluationSettings):
    """How a finished translator is scored."""

    search: Annotated[
        SearchSettings | None, Field(description="Settings of the beam search. By default, the beam is 5.")
    ] = None
    bleu: Annotated[
        BleuSettings | None, Field(description="Settings of BLEU. The defaults are those of sacrebleu.")
    ] = None

    @field_validator("search", "bleu", mode="before")
    @classmethod
    def _check_translation(cls, settings: Any) -> Any:
        """Accept these settings, which the base class rejects."""
        return settings


class TranslationExperiment(SequenceExperiment):
    """Everything a run of a translator depends on."""

    task: ClassVar[str] = "translation"

    evaluation: TranslationEvaluation = TranslationEvaluation()

    def _check_task(self) -> None:
        source_tables = set(self.source_references("tables"))
        target_tables = {*INPUTS.references(self.input, "tables"), *OUTPUTS.references(self.output, "tables")}
        shared_tables = source_tables & target_tables
        if shared_tables and self.vocabulary.sides != "joint":
            raise ValueError(
                f"tables.{min(shared_tables)} is used by the source and by the target, whose vocabularies differ; use "
                'vocabulary.sides = "joint", or one table per side'
            )
        if self.evaluation.windows is not None or self.evaluation.train or not self.vocabulary.end_of_line:
            raise ValueError(
                "a translator scores pairs, which end with <eos>; leave out evaluation.windows, evaluation.train and "
                "vocabulary.end_of_line"
            )

    @property
    def pairs(self) -> PairsSettings:
        """Languages and filters of the pairs."""
        pairs = self.corpus.pairs
        assert pairs is not None  # checked when the settings were read
        return pairs

    @property
    def search(self) -> SearchSettings:
        """Settings of the beam search."""
        return self.evaluation.search or SearchSettings()

    def search_with(self, beam: int | None, length_penalty: float | None) -> SearchSettings:
        """Return the beam-search settings, with `beam` and `length_penalty` replaced unless they are None."""
        settings = self.search.model_dump()
        if beam is not None:
            settings["beam"] = beam
        if length_penalty is not None:
            settings["length_penalty"] = length_penalty
        return check_settings(SearchSettings, settings, "beam search")

    @property
    def bleu(self) -> BleuSettings:
        """Settings of BLEU."""
        return self.evaluation.bleu or BleuSettings()


TrainedTranslator = TrainedRun[TranslationExperiment, PairDataset, Translator]
"""A run of a translator, opened for use."""


class TranslationTask(SequenceTask[TranslationExperiment, PairDataset, Translator]):
    """Train and score translators."""

    Settings: ClassVar[type[TranslationExperiment]] = TranslationExperiment
    noun: ClassVar[str] = "a translator"
    verbs: ClassVar[str] = "`reefknot translate` or `evaluate`"
    evaluation_options: ClassVar[frozenset[str]] = frozenset({"beam", "length_penalty"})

    def open_data(
        self,
        data_folder: Path | None = None,
        *,
        corpus: CorpusSettings | None = None,
        vocabulary: Vocabulary | None = None,
        notify: Notify = silent,
    ) -> PairDataset:
        corpus = corpus or self.experiment.corpus
        return open_pairs(corpus, self.experiment.vocabulary, data=data_folder, notify=notify)

    def _assemble(self, shared: dict[str, Any], vocabulary_pair: VocabularyPair) -> Translator:
        source_settings = self.experiment.source
        assert source_settings is not None  # checked when the settings were read
        with add_section_to_errors("source"):
            spellings = spelling_arguments(source_settings, vocabulary_pair.source)
            source_end = INPUTS.build(source_settings, shared | spellings)
        input_end = self._build_input_end(shared, vocabulary_pair.target)
        encoder = self._build_encoder(shared, {"input_dim": input_end.dim, "source_dim": source_end.dim})
        output_end = self._build_output_end(shared, encoder.dim)
        return Translator(source_end, input_end, encoder, output_end, self.regularisation)

    def batches(self, dataset: PairDataset) -> Batches:
        training = self.experiment.training
        train_pairs = dataset.splits["train"]
        eos = dataset.vocabulary.eos
        assert eos is not None  # every line of a pair ends with <eos>
        return PairBatches(
            train_pairs.source, train_pairs.target, training.batch, training.steps, eos=eos, seed=training.seed
        )

    def check_data(self, dataset: PairDataset, world: World) -> None:
        super().check_data(dataset, world)
        create_metrics(self.experiment.bleu)  # raises an error if a package that the metric needs is not installed

    def score_split(self, model: Translator, dataset: PairDataset, split: str) -> Score:
        precision = self.experiment.training.precision
        return score_references(model, dataset.splits[split], dataset.vocabulary, precision=precision)

    def _task_fields(
        self, model: Translator, dataset: PairDataset, run: RunFolder, scores: Mapping[str, Score]
    ) -> dict[str, Any]:
        search = self.experiment.search
        precision = self.experiment.training.precision
        fields: dict[str, Any] = {}
        for split in SCORED_SPLITS:
            evaluation = translation.evaluate_translations(
                model, dataset, split, search, self.experiment.bleu, precision=precision
            )
            fields[split] = evaluation.scores
            run.write_translations(split, evaluation.translations)
        examples = translation.translate_examples(model, dataset, "test", NUM_EXAMPLES, search, precision=precision)
        fields["examples"] = tuple(examples)
        return {"translation": Translations(**fields), "tied": _describe_tying(model)}

    def save_vocabularies(self, run: RunFolder, dataset: PairDataset) -> None:
        if not dataset.vocabulary_pair.joint:
            source_vocabulary, _ = dataset.vocabulary_pair.vocabularies
            run.source_vocabulary_path.parent.mkdir(exist_ok=True)
            source_vocabulary.save(run.source_vocabulary_path)
        super().save_vocabularies(run, dataset)

    def load_vocabularies(self, run: RunFolder) -> VocabularyPair:
        target_vocabulary = Vocabulary.load(run.vocabulary_path)
        if self.experiment.vocabulary.sides == "joint":
            source_vocabulary = target_vocabulary
        else:
            source_vocabulary = Vocabulary.load(run.source_vocabulary_path)
        return VocabularyPair(source_vocabulary, target_vocabulary)

    def evaluate(
        self, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
    ) -> PairsEvaluations:
        from reefknot.lab.tasks.evaluate_translation import evaluate_translator

        return evaluate_translator(self, run, request, notify=notify, progress=progress)

    def compare(
        self, systems: Sequence[System], request: ComparisonRequest, *, notify: Notify
    ) -> TranslationComparisons:
        from reefknot.lab.tasks.compare_translations import compare_translators

        return compare_translators(systems, request, notify=notify)


def _describe_tying(model: Translator) -> str:
    """Return which ends share a word table.

    Returns `three-way` for the source end and both ends of the decoder, `decoder` for both ends of the decoder, or
    `none`.
    """
    if model.three_way:
        return "three-way"
    if model.tied:
        return "decoder"
    return "none"


def open_translator(path: Path | str, device: str = "cpu") -> TrainedTranslator:
    """Open the run of a translator; see `tasks.open_run`."""
    from reefknot.lab.tasks import open_run

    return cast(TrainedTranslator, open_run(path, device, task="translation"))


def open_parallel_texts(run: RunFolder, data_folder: Path | None) -> PairDataset:
    """Open the pairs of sentences of a translator's run; see `Task.open_run_data`."""
    from reefknot.lab.tasks import open_data

    return cast(PairDataset, open_data(run, data_folder, task="translation"))
