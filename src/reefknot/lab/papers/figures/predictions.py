"""Inan et al. 2017, Table 4: the next words that a plain model and a model with REAL predict.

REAL means reused embeddings (input and output share one table of word vectors) and the augmented loss. Start reading at
`NextWords`; `CONTEXTS` has the paper's contexts and predictions.

The paper prints the last words of four contexts from the test text of the Penn Treebank. If that text is available, a
model reads the line of a context from its beginning to the end of the context. Otherwise it reads the printed words as
the beginning of a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.evaluation.predictions import predict
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.reports.drawing import COLOURS, Drawing
from reefknot.lab.reports.rows import group_by_row
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import Result
from reefknot.lab.tasks.language_model import open_language_model, open_texts
from reefknot.lab.text.dataset import Dataset

TOP_COUNT = 10
"""The number of words that are shown for each model and context."""
WordProbabilities = Sequence[tuple[str, float]]
"""Words with their probabilities, most likely first."""


@dataclass(frozen=True)
class Context:
    """The end of a context as the paper prints it, the word that follows, and the predictions of the paper's models."""

    end: str
    next: str
    plain: WordProbabilities
    """Predictions of the paper's VD-LSTM large."""
    real: WordProbabilities
    """Predictions of the paper's VD-LSTM+REAL large."""


def _parse_words(prediction: str) -> WordProbabilities:
    """Parse words and probabilities: "the .27 a .13"."""
    items = prediction.split()
    words, probabilities = items[::2], items[1::2]
    return tuple((word, float(probability)) for word, probability in zip(words, probabilities, strict=True))


CONTEXTS = (
    Context(
        "complaints filed in",
        "federal",
        _parse_words("the .27 a .13 federal .13 N .09 <unk> .05 an .03 august .01 new .01 response .01 connection .01"),
        _parse_words(
            "federal .22 the .10 a .08 N .06 state .04 connection .03 august .03 july .03 an .03 september .03"
        ),
    ),
    Context(
        "driving season in july and",
        "august",
        _parse_words("the .09 N .08 a .07 <unk> .07 was .04 in .03 has .03 is .02 will .02 its .02"),
        _parse_words("august .08 N .05 early .05 september .05 the .03 a .03 in .03 that .02 ended .02 its .02"),
    ),
    Context(
        "as soon as its audit is",
        "completed",
        _parse_words(
            "the .06 <unk> .05 a .05 in .04 n't .04 to .03 likely .03 expected .03 scheduled .01 completed .01"
        ),
        _parse_words("expected .10 completed .04 <unk> .03 the .03 in .03 a .03 scheduled .03 n't .03 due .02 to .01"),
    ),
    Context(
        "minister of industry science and",
        "technology",
        _parse_words(
            "<unk> .33 the .06 a .01 other .01 others .01 industry .01 commerce .01 planning .01 management .01 "
            "mail .01"
        ),
        _parse_words(
            "<unk> .09 health .08 development .04 the .04 a .03 industry .03 business .02 telecomm. .02 human .02 "
            "other .01"
        ),
    ),
)
PAPER_COLUMNS = {"paper: VD-LSTM large": "plain", "paper: VD-LSTM+REAL large": "real"}
"""Titles of the columns of the paper's models, with the field of `Context` that they show."""


class NextWords(Figure):
    """The ten most likely next words after each context."""

    name = "inan2017/table4"
    recipe = "inan2017/table4"
    needs = "weights"
    options = ("data", "device")
    title = "Inan et al. 2017, Table 4: the most likely next words"
    description = (
        "The ten most likely next words of the large VD-LSTM and the large VD-LSTM+REAL after four contexts. REAL "
        "gives less probability to frequent words (the, a, <unk>) and more to words with a meaning similar to the "
        "word that follows."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the mean probability over seeds of the top ten words and of the next word, by context and row."""
        test_lines = {result.folder: _find_lines(result, data) for result in runs}
        runs_by_row = group_by_row(runs)

        # Predict the next word of every context with every run.
        predictions_by_row = {}
        for name, results in runs_by_row.items():
            predictions_by_row[name] = [
                _predict_contexts(result, test_lines[result.folder], device) for result in results
            ]

        # Average the predictions of each row over its runs.
        contexts = []
        for index, context in enumerate(CONTEXTS):
            rows = {}
            for name, run_predictions in predictions_by_row.items():
                rows[name] = _average_predictions([predictions[index] for predictions in run_predictions], context)
            contexts.append(
                {
                    "end": context.end,
                    "next": context.next,
                    "whole_line": all(lines[index] for lines in test_lines.values()),
                    "rows": rows,
                }
            )
        return {
            "seeds": {name: [result.seed for result in results] for name, results in runs_by_row.items()},
            "pieces": [name for name, results in runs_by_row.items() if results[0].uses_subwords],
            "contexts": contexts,
        }

    def draw(self, measured: Measurements) -> Drawing:
        """Draw the ten words of each context and model as bars, with the actual next word in another colour."""
        contexts = measured["contexts"]
        columns_by_context = [_collect_columns(context) for context in contexts]
        model_count = len(columns_by_context[0])

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(len(contexts), model_count, sharex="row", squeeze=False)
            for context, columns, row_axes in zip(contexts, columns_by_context, grid, strict=True):
                for (model_name, predictions), axes in zip(columns.items(), row_axes, strict=True):
                    words = [word for word, _ in predictions]
                    probabilities = [probability for _, probability in predictions]
                    colours = [COLOURS[1] if word == context["next"] else COLOURS[0] for word in words]
                    axes.barh(words, probabilities, color=colours)
                    axes.invert_yaxis()
                    axes.set_title(f"{model_name}\n{context['end']} ...", fontsize=8)
                    axes.tick_params(labelsize=8)

        caption = "The ten most likely next words after each context; the actual next word is in another colour."
        return Drawing(self.slug, 2.1 * len(contexts), [], draw, caption, width=2.6 * model_count)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a column for each model, first ours and then the paper's."""
        lines = []
        for context in measured["contexts"]:
            columns = _collect_columns(context)
            prompt = "its line of the test text" if context["whole_line"] else "the beginning of a line"
            lines.append(f"{context['end']} [{context['next']}]   read as {prompt}")

            # The titles, and the words of all models by rank.
            lines.append("  ".join(f"{name:<26}" for name in columns).rstrip())
            for rank in range(TOP_COUNT):
                cells = []
                for predictions in columns.values():
                    cell = ""
                    if rank < len(predictions):
                        word, probability = predictions[rank]
                        cell = f"{probability:.2f} {word}"
                    cells.append(cell)
                lines.append("  ".join(f"{cell:<26}" for cell in cells).rstrip())

            # The rank of the actual next word in our models.
            for name, row in context["rows"].items():
                if row["rank"] is not None:
                    outcome = f"rank {row['rank']:,} in {name}, probability {row['probability']:.4f}"
                elif name in measured.get("pieces", ()):
                    outcome = f"no rank in {name}, because its tokens are sub-words"
                else:
                    outcome = f"no rank in {name}, because it is not in the vocabulary"
                lines.append(f"{context['next']}: {outcome}")
            lines.append("")
        return [*lines, "Our probabilities are means over seeds."]


def _collect_columns(context: Mapping[str, Any]) -> dict[str, WordProbabilities]:
    """Return the predictions of each model after a context, first ours and then the paper's."""
    columns = {name: row["words"] for name, row in context["rows"].items()}
    (paper_context,) = [candidate for candidate in CONTEXTS if candidate.end == context["end"]]
    for title, field in PAPER_COLUMNS.items():
        columns[title] = getattr(paper_context, field)
    return columns


def _find_lines(result: Result, data: Path | None) -> list[list[str] | None]:
    """Return the beginning of the test line of each context; None if the text is missing or has no such line."""
    try:
        texts = open_texts(RunFolder.open(result.folder), data)
    except DataError:
        return [None] * len(CONTEXTS)
    return [_find_line(texts, context) for context in CONTEXTS]


def _find_line(texts: Dataset, context: Context) -> list[str] | None:
    """Return the words of a test line from its beginning to the end of the context; None if no line has the context."""
    vocabulary_words = texts.vocabulary.words
    context_words = context.end.split()
    line_words: list[str] = []
    for token_id in texts.splits["test"].ids:
        if token_id == texts.vocabulary.eos:
            line_words = []
            continue
        line_words.append(vocabulary_words[token_id])
        if line_words[-len(context_words) :] == context_words:
            return line_words
    return None


def _predict_contexts(result: Result, lines: Sequence[list[str] | None], device: str) -> list[dict[str, float]]:
    """Return the probabilities of all words after each context, according to one run.

    Args:
        result: The run.
        lines: The test line of each context up to its end; None if it is not available.
        device: The device of the model.
    """
    trained = open_language_model(result.folder, device)
    word_count = len(trained.vocabulary)  # the rank of the next word needs the probabilities of all words
    predictions = []
    for line, context in zip(lines, CONTEXTS, strict=True):
        prompt = line or context.end.split()
        prediction = predict(trained.model, prompt, trained.vocabulary, word_count)
        predictions.append(dict(prediction.words))
    return predictions


def _average_predictions(run_predictions: Sequence[Mapping[str, float]], context: Context) -> dict[str, Any]:
    """Return the top words by mean probability over the runs of a row, and the rank of the actual next word."""
    means = {}
    for word in run_predictions[0]:
        means[word] = sum(probabilities[word] for probabilities in run_predictions) / len(run_predictions)
    ranking = sorted(means.items(), key=lambda entry: -entry[1])

    next_word_rank = None
    for rank, (word, _) in enumerate(ranking, 1):
        if word == context.next:
            next_word_rank = rank
    return {"words": ranking[:TOP_COUNT], "rank": next_word_rank, "probability": means.get(context.next)}
