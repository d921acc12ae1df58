"""Evaluates a trained translator: BLEU and chrF of its translations, and the perplexity of the references.

Start with `evaluate_translator`, which `reefknot evaluate` calls. It translates a text with beam search. Every score
comes with its definition: the signatures of sacrebleu, and how the perplexity is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.beam import SearchSettings
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.evaluation.references import score_references
from reefknot.lab.evaluation.saved import save_evaluation
from reefknot.lab.evaluation.translation import evaluate_translations, shorten_dataset
from reefknot.lab.runs.definition import describe_unknown_share, format_perplexity, warn_of_unknown_words
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import LengthBand, TranslationScores
from reefknot.lab.tasks.requests import EvaluationRequest
from reefknot.lab.training.generators import set_determinism
from reefknot.storage.progress import Notify, ProgressCallback

if TYPE_CHECKING:
    from reefknot.lab.tasks.translation import TranslationTask


def evaluate_translator(
    task: TranslationTask, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
) -> PairsEvaluations:
    """Translate and score texts with the best weights of a run."""
    if request.save and request.beam is None and request.length_penalty is None:
        raise SettingsError(
            "--save needs --beam or --length-penalty, because training has saved the scores of the run's own search"
        )
    request.check_saved_texts()

    # Open the model and its texts.
    trained_run = task.open_run(run, request.device)
    model = trained_run.model
    experiment = task.experiment
    set_determinism(experiment.training.determinism)
    request.check_finished(run)
    search = experiment.search_with(request.beam, request.length_penalty)
    precision = experiment.training.precision
    dataset = trained_run.dataset(request.data)
    request.check_split(dataset.splits)

    # Translate and score.
    evaluations = []
    for split in request.splits:
        texts = shorten_dataset(dataset, split, request.limit)
        translation_scores = evaluate_translations(
            model, texts, split, search, experiment.bleu, precision=precision, notify=notify, progress=progress
        ).scores
        reference_score = score_references(model, texts.splits[split], texts.vocabulary, precision=precision)
        total_pairs = dataset.splits[split].pairs
        evaluations.append(PairsEvaluation(split, translation_scores, reference_score, total_pairs))

    if request.save:
        reference_scores = {evaluation.split: evaluation.reference_score for evaluation in evaluations}
        translation_scores_by_split = {evaluation.split: evaluation.translation_scores for evaluation in evaluations}
        message = save_evaluation(
            run,
            _saved_name(search),
            search.model_dump(),
            None,
            reference_scores,
            translated=translation_scores_by_split,
        )
        notify(message)
    return PairsEvaluations(str(run.path), evaluations)


def _saved_name(search: SearchSettings) -> str:
    """Return the name that the scores of a beam search are saved under."""
    return f"beam-{search.beam}-length-penalty-{search.length_penalty:g}"


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairsEvaluations:
    """The evaluation of one run on one or two splits of parallel text."""

    run: str
    """Path of the run folder."""
    splits: list[PairsEvaluation]

    def record(self) -> Any:
        """Return the record of the split, or a list of records if there are two splits."""
        records = [{"run": self.run, **split.record()} for split in self.splits]
        return records[0] if len(records) == 1 else records

    def text(self) -> str:
        """Return the scores of every split with their definitions."""
        return "\n".join(line for split in self.splits for line in split.lines())


@dataclass(frozen=True)
class PairsEvaluation:
    """The scores of one split of parallel text."""

    split: str
    translation_scores: TranslationScores
    """BLEU and chrF of the translations that the beam search returned."""
    reference_score: Score
    """Losses of the reference translations."""
    total_pairs: int
    """Number of pairs of the whole split. It is larger than the number of scored pairs if `--limit` is used."""

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"split": self.split, **self.translation_scores.record(), **self.reference_score.summary().record()}

    def lines(self) -> list[str]:
        """Return the scores and their definitions as readable lines."""
        scores = self.translation_scores
        search = scores.search
        reference = self.reference_score.summary()
        bleu_by_length = ", ".join(
            f"{_format_lengths(band)}: {band.bleu:.1f} ({band.pairs:,})" for band in scores.by_length
        )
        lines = [
            f"{self.split} BLEU {scores.bleu:.2f}  chrF {scores.chrf:.2f}  "
            f"perplexity {format_perplexity(reference.perplexity)}  "
            f"word perplexity {format_perplexity(reference.per_word)}  "
            f"{describe_unknown_share(reference.unknown_share)}",
            f"BLEU|{scores.bleu_signature}",
            f"chrF2|{scores.chrf_signature}",
            f"brevity penalty {scores.brevity_penalty:.3f}, length ratio {scores.length_ratio:.3f}; "
            f"beam {search['beam']}, length penalty {search['length_penalty']:g}; "
            f"{scores.unfinished:,} of {scores.pairs:,} translations reached the length limit",
            f"BLEU by source tokens (pairs): {bleu_by_length}",
            reference.definition,
        ]
        warning = warn_of_unknown_words(reference.unknown_share, self.split, subwords=reference.uses_subwords)
        if warning:
            lines.append(warning)
        if scores.pairs < self.total_pairs:
            lines.append(f"limit: only the first {scores.pairs:,} of {self.total_pairs:,} pairs")
        return lines


def _format_lengths(band: LengthBand) -> str:
    """Return a range of sentence lengths, such as "11-20" or "over 50"."""
    if band.high is None:
        return f"over {band.low - 1}"
    return f"{band.low}-{band.high}"
