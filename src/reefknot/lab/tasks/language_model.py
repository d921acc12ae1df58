"""The task of language modelling: building the model, and scoring a text by its perplexity.

`LanguageModelTask` is the class to start from; settings and training are those of `sequence_model.py`. A text is scored
as one stream (a contiguous text through which the recurrent state is carried) or in independent windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from reefknot.lab.config.parts import WINDOWS
from reefknot.lab.evaluation.frequency import loss_by_frequency
from reefknot.lab.evaluation.generation import encode_prompt, generate
from reefknot.lab.evaluation.perplexity import Score, score
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import Sample
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.lab.tasks.sequence_model import SequenceExperiment, SequenceTask
from reefknot.lab.text.batches import Batches, build_batches
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.nn.models.language_model import LanguageModel

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Progress
    from reefknot.lab.evaluation.protocols import Counting
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.tasks.compare_texts import TextComparisons
    from reefknot.lab.tasks.evaluate_language_model import TextEvaluations
    from reefknot.lab.tasks.requests import ComparisonRequest, EvaluationRequest, System
    from reefknot.storage.progress import Notify

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
        scores_lines = self.training.batching == "sentences" and self.vocabulary.end_of_line
        return Lines() if scores_lines else Sliding(context=0, stride=self.training.steps)


@dataclass(frozen=True)
class TrainedLanguageModel(TrainedRun[LanguageModelExperiment, Dataset, LanguageModel]):
    """A run of a language model, opened for use."""

    def with_spellings(self, words: Iterable[str]) -> Self:
        input_end = self.model.input
        if not self.experiment.vocabulary.keep_spellings:
            return self
        from reefknot.nn.inputs.char_cnn import CharCNN

        assert isinstance(input_end, CharCNN)  # checked when the settings were read
        vocabulary = self.vocabulary.with_spelled_words(words)
        input_end = input_end.with_spelled_words(vocabulary.spelled[len(self.vocabulary.spelled) :])
        model = LanguageModel(input_end, self.model.encoder, self.model.output, self.model.regularisation)
        return replace(self, words=VocabularyPair(vocabulary, vocabulary), model=model.eval())


class LanguageModelTask(SequenceTask[LanguageModelExperiment, Dataset, LanguageModel]):
    """Train and score language models."""

    Settings: ClassVar[type[LanguageModelExperiment]] = LanguageModelExperiment
    noun: ClassVar[str] = "a language model"
    verbs: ClassVar[str] = "`reefknot evaluate`, `generate` or `score`"
    evaluation_options: ClassVar[frozenset[str]] = frozenset(
        {"context", "stride", "windows", "streams", "protocol", "search", "search_tokens"}
        | {"dynamic", "dynamic_rate", "dynamic_decay", "dynamic_epsilon", "dynamic_scale", "dynamic_segment"}
        | {"cache", "cache_weight", "cache_theta", "cache_window", "cache_fill"}
        | {"monte_carlo", "monte_carlo_seed"}
    )
    comparison_options: ClassVar[frozenset[str]] = frozenset({"by", "block", "bands", "figure"})

    def _assemble(self, shared: dict[str, Any], sides: VocabularyPair) -> LanguageModel:
        input_end = self._build_input_end(shared, sides.target)
        encoder = self._build_encoder(shared, {"input_dim": input_end.dim})
        output_end = self._build_output_end(shared, encoder.dim)
        return LanguageModel(input_end, encoder, output_end, self.regularisation)

    def batches(self, data: Dataset) -> Batches:
        text = data.splits["train"]
        return build_batches(self.experiment.training, text.ids, text.inputs, data.vocabulary.eos)

    def check_data(self, data: Dataset, world: World) -> None:
        super().check_data(data, world)
        # Reject a text that is too short for the paper's protocol now, not after training.
        for split, counting in (self._protocol_countings() or {}).items():
            counting.targets(data.splits[split])

    def _protocol_countings(self) -> dict[str, Counting] | None:
        """Return how a paper's program counts tokens, by split; None if the settings name no such protocol."""
        name, training = self.experiment.evaluation.protocol, self.experiment.training
        if name == "definition":
            return None
        from reefknot.lab.evaluation.protocols import get_protocol

        return get_protocol(name, training.batch, training.steps)

    def score_split(self, model: LanguageModel, data: Dataset, split: str) -> Score:
        """Score one split in the experiment's windows or streams.

        Without windows, the training text is scored in as many streams as in training, because it is long.
        """
        experiment = self.experiment
        options: dict[str, Any] = {"precision": experiment.training.precision}
        if experiment.windows is not None:
            options["windows"] = experiment.windows
        else:
            options["streams"] = experiment.training.batch if split == "train" else experiment.evaluation.streams
        return score(model, data.splits[split], data.vocabulary, **options)

    def _task_fields(
        self, model: LanguageModel, data: Dataset, run: RunFolder, scores: Mapping[str, Score]
    ) -> dict[str, Any]:
        experiment, text = self.experiment, data.splits["test"]
        fields: dict[str, Any] = {}
        if experiment.evaluation.train:
            fields["train"] = self.score_split(model, data, "train").summary()
        countings = self._protocol_countings()
        if countings:
            from reefknot.lab.evaluation.protocols import score_by_protocol

            name, precision = experiment.evaluation.protocol, experiment.training.precision
            fields["protocol"] = score_by_protocol(name, model, data.splits, countings, precision)
        fields["frequency"] = loss_by_frequency(scores["test"], text, data.vocabulary)
        fields["samples"] = _generate_samples(model, data.vocabulary, experiment.training.steps)
        if model.output.bands > 1:
            from reefknot.lab.evaluation.search import measure_opened_tails

            fields["tails_opened"] = measure_opened_tails(model, text, data.vocabulary, experiment.windows)
        return fields

    def evaluate(
        self, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: Progress
    ) -> TextEvaluations:
        from reefknot.lab.tasks.evaluate_language_model import evaluate_language_model

        return evaluate_language_model(self, run, request, notify=notify, progress=progress)

    def compare(self, systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> TextComparisons:
        from reefknot.lab.tasks.compare_texts import compare_texts

        return compare_texts(systems, request, notify=notify)

    def _wrap_trained(self, run: RunFolder, words: VocabularyPair, model: LanguageModel) -> TrainedLanguageModel:
        return TrainedLanguageModel(run, self.experiment, words, model)


def _generate_samples(model: LanguageModel, vocabulary: Vocabulary, window: int) -> tuple[Sample, ...]:
    """Return short texts that the model generates at several temperatures."""
    start_ids = encode_prompt([], vocabulary)
    banned_ids = () if vocabulary.unk is None else (vocabulary.unk,)
    samples = []
    for seed, temperature in enumerate(SAMPLE_TEMPERATURES):
        ids = generate(
            model, start_ids, SAMPLE_TOKENS, temperature=temperature, banned=banned_ids, seed=seed, window=window
        )
        text = vocabulary.text(ids).strip()
        samples.append(Sample(prompt="", text=text, temperature=temperature, seed=seed))
    return tuple(samples)


def open_texts(run: RunFolder, data: Path | None) -> Dataset:
    """Open the texts of a language model's run; see `Task.open_run_data`."""
    from reefknot.lab.tasks import open_data

    return cast(Dataset, open_data(run, data, task="language_model"))


def open_language_model(path: Path | str, device: str = "cpu") -> TrainedLanguageModel:
    """Open the run of a language model; see `tasks.open_run`."""
    from reefknot.lab.tasks import open_run

    return cast(TrainedLanguageModel, open_run(path, device, task="language_model"))
