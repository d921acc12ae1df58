"""The task of language modelling: builds the model, and scores a text by its perplexity.

Start with `LanguageModelTask`. Its base class in `sequence_model.py` has the settings and the training. A trained model
is opened like this:

    trained_run = open_language_model("runs/demo/tied/seed0")
    test_text = trained_run.dataset(None).splits["test"]

A text is scored in streams (contiguous parts of the text through which the recurrent state is carried) or in windows
(parts that are scored independently). The end of a model that turns ids into vectors is its input end; the output end
is its classifier and loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from reefknot.lab.config.parts import WINDOWS
from reefknot.lab.evaluation.frequency import loss_by_frequency
from reefknot.lab.evaluation.generation import banned_ids, encode_prompt, generate
from reefknot.lab.evaluation.perplexity import Score, score
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import Sample
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.lab.tasks.sequence_model import SequenceExperiment, SequenceTask
from reefknot.lab.text.batches import Batches, build_batches
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.progress import Notify, silent

if TYPE_CHECKING:
    from reefknot.lab.evaluation.protocols import Counting
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.tasks.compare_texts import TextComparisons
    from reefknot.lab.tasks.evaluate_language_model import TextEvaluations
    from reefknot.lab.tasks.requests import ComparisonRequest, EvaluationRequest, System
    from reefknot.lab.text.sources import TextSource
    from reefknot.storage.progress import ProgressCallback

SAMPLE_TOKENS = 50
"""Length of the generated texts in a result, in tokens."""
SAMPLE_TEMPERATURES = (1.0, 0.8, 0.5)
"""Sampling temperatures of the generated texts in a result."""


class LanguageModelExperiment(SequenceExperiment):
    """Everything a run of a language model depends on."""

    task: ClassVar[str] = "language_model"

    def _check_task(self) -> None:
        if self.vocabulary.sides != "joint":
            raise ValueError("vocabulary.sides is only for translation, and this is a language model; leave it out")

    @property
    def windows(self) -> Windows | None:
        """The independent windows in which texts are scored; None if the state is carried through the text."""
        if self.evaluation.windows is not None:
            windows: Windows = WINDOWS.build(self.evaluation.windows, {})
            return windows
        if self.carries_state:
            return None
        from reefknot.lab.evaluation.windows import Lines, Sliding

        # Use windows like those of training: single lines, or blocks of the same number of tokens.
        if self.training.batching == "sentences" and self.vocabulary.end_of_line:
            return Lines()
        return Sliding(context=0, stride=self.training.steps)


@dataclass(frozen=True, repr=False)
class TrainedLanguageModel(TrainedRun[LanguageModelExperiment, Dataset, LanguageModel]):
    """A run of a language model, opened for use."""

    def with_spellings(self, words: Iterable[str]) -> Self:
        if not self.experiment.vocabulary.keep_spellings:
            return self
        from reefknot.nn.inputs.char_cnn import CharCNN

        input_end = self.model.input
        assert isinstance(input_end, CharCNN)  # checked when the settings were read
        extended_vocabulary = self.vocabulary.with_spelled_words(words)
        num_known_spellings = len(self.vocabulary.spelled_words)
        new_words = extended_vocabulary.spelled_words[num_known_spellings:]
        extended_input_end = input_end.with_spelled_words(new_words)

        model = self.model
        extended_model = LanguageModel(extended_input_end, model.encoder, model.output, model.regularisation)
        vocabulary_pair = VocabularyPair(extended_vocabulary, extended_vocabulary)
        return replace(self, words=vocabulary_pair, model=extended_model.eval())

    def encode_other_text(self, source: TextSource, notify: Notify = silent) -> tuple[TrainedLanguageModel, Split]:
        """Encode any text with the vocabulary of the run. Returns the run that can read the text, and the text.

        The returned run differs from this run only if its input end reads the spellings of unknown words.
        """
        from reefknot.lab.text.other_text import encode_text

        keep_spellings = self.experiment.vocabulary.keep_spellings
        encoded = encode_text(source, self.vocabulary, keep_spellings=keep_spellings, notify=notify)
        return self.with_spellings(encoded.spelled_words), encoded.split


class LanguageModelTask(SequenceTask[LanguageModelExperiment, Dataset, LanguageModel]):
    """Train and score language models."""

    Settings: ClassVar[type[LanguageModelExperiment]] = LanguageModelExperiment
    noun: ClassVar[str] = "a language model"
    verbs: ClassVar[str] = "`reefknot evaluate`, `generate` or `score`"
    evaluation_options: ClassVar[frozenset[str]] = frozenset(
        {"text", "field", "encoding"}
        | {"context", "stride", "windows", "streams", "protocol", "search", "search_tokens"}
        | {"dynamic", "dynamic_rate", "dynamic_decay", "dynamic_epsilon", "dynamic_scale", "dynamic_segment"}
        | {"cache", "cache_weight", "cache_theta", "cache_window", "cache_fill"}
        | {"monte_carlo", "monte_carlo_seed"}
    )
    comparison_options: ClassVar[frozenset[str]] = frozenset(
        {"by", "block", "bands", "figure", "text", "field", "encoding", "device"}
    )

    def _assemble(self, shared: dict[str, Any], vocabulary_pair: VocabularyPair) -> LanguageModel:
        input_end = self._build_input_end(shared, vocabulary_pair.target)
        encoder = self._build_encoder(shared, {"input_dim": input_end.dim})
        output_end = self._build_output_end(shared, encoder.dim)
        return LanguageModel(input_end, encoder, output_end, self.regularisation)

    def batches(self, dataset: Dataset) -> Batches:
        train_text = dataset.splits["train"]
        return build_batches(self.experiment.training, train_text.ids, train_text.inputs, dataset.vocabulary.eos)

    def check_data(self, dataset: Dataset, world: World) -> None:
        super().check_data(dataset, world)
        # Reject a text that is too short for the paper's protocol now, not after training.
        for split, counting in self._protocol_countings().items():
            counting.targets_per_stream(dataset.splits[split])

    def _protocol_countings(self) -> dict[str, Counting]:
        """Return how a paper's program counts tokens, by split; {} if the settings name no such program."""
        protocol_name = self.experiment.evaluation.protocol
        if protocol_name == "definition":
            return {}
        from reefknot.lab.evaluation.protocols import get_protocol

        training = self.experiment.training
        return get_protocol(protocol_name, training.batch, training.steps) or {}

    def score_split(self, model: LanguageModel, dataset: Dataset, split: str) -> Score:
        """Score one split in the experiment's windows or streams.

        Without windows, the training text is scored in as many streams as in training, because it is long.
        """
        experiment = self.experiment
        options: dict[str, Any] = {"precision": experiment.training.precision}
        if experiment.windows is not None:
            options["windows"] = experiment.windows
        elif split == "train":
            options["streams"] = experiment.training.batch
        else:
            options["streams"] = experiment.evaluation.streams
        return score(model, dataset.splits[split], dataset.vocabulary, **options)

    def _task_fields(
        self, model: LanguageModel, dataset: Dataset, run: RunFolder, scores: Mapping[str, Score]
    ) -> dict[str, Any]:
        experiment = self.experiment
        vocabulary = dataset.vocabulary
        test_text = dataset.splits["test"]
        fields: dict[str, Any] = {}

        if experiment.evaluation.train:
            fields["train"] = self.score_split(model, dataset, "train").summary()

        countings = self._protocol_countings()
        if countings:
            from reefknot.lab.evaluation.protocols import score_by_protocol

            fields["protocol"] = score_by_protocol(
                experiment.evaluation.protocol, model, dataset.splits, countings, experiment.training.precision
            )

        fields["frequency"] = loss_by_frequency(scores["test"], test_text, vocabulary)
        fields["samples"] = _generate_samples(model, vocabulary, experiment.training.steps)

        if model.output.bands > 1:  # an adaptive softmax
            from reefknot.lab.evaluation.opened_tails import measure_opened_tails

            fields["tails_opened"] = measure_opened_tails(model, test_text, vocabulary, experiment.windows)
        return fields

    def evaluate(
        self, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
    ) -> TextEvaluations:
        from reefknot.lab.tasks.evaluate_language_model import evaluate_language_model

        return evaluate_language_model(self, run, request, notify=notify, progress=progress)

    def compare(self, systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> TextComparisons:
        from reefknot.lab.tasks.compare_texts import compare_texts

        return compare_texts(systems, request, notify=notify)

    def _wrap_trained(
        self, run: RunFolder, vocabulary_pair: VocabularyPair, model: LanguageModel
    ) -> TrainedLanguageModel:
        return TrainedLanguageModel(run, self.experiment, vocabulary_pair, model)


def _generate_samples(model: LanguageModel, vocabulary: Vocabulary, window: int) -> tuple[Sample, ...]:
    """Return short texts that the model generates without a prompt, at several temperatures.

    Args:
        model: The trained model.
        vocabulary: Its vocabulary. The unknown word is never generated.
        window: Maximum number of tokens in the KV cache of an encoder that does not carry its state.
    """
    prompt_ids = encode_prompt([], vocabulary)
    banned = banned_ids(vocabulary)
    samples = []
    for seed, temperature in enumerate(SAMPLE_TEMPERATURES):
        ids = generate(
            model, prompt_ids, SAMPLE_TOKENS, temperature=temperature, banned=banned, seed=seed, window=window
        )
        text = vocabulary.decode_text(ids).strip()
        samples.append(Sample(prompt="", text=text, temperature=temperature, seed=seed))
    return tuple(samples)


def open_language_model(path: Path | str, device: str = "cpu") -> TrainedLanguageModel:
    """Open the run of a language model; see `tasks.open_run`."""
    from reefknot.lab.tasks import open_run

    return cast(TrainedLanguageModel, open_run(path, device, task="language_model"))


def open_texts(run: RunFolder, data_folder: Path | None) -> Dataset:
    """Open the texts of a language model's run; see `Task.open_run_data`."""
    from reefknot.lab.tasks import open_data

    return cast(Dataset, open_data(run, data_folder, task="language_model"))
