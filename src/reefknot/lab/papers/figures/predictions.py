"""Inan et al. 2017, Table 4: the next words that a plain model and a model with REAL predict.

REAL means reused embeddings and the augmented loss. The paper prints the last words of four contexts from the test text
of the Penn Treebank. If that text is available, a model reads the line of a context from its beginning to the end of
the context. Otherwise it reads the printed words as the beginning of a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.evaluation.predictions import predict
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.reports.drawing import COLOURS, Drawing
from reefknot.lab.reports.results import Result
from reefknot.lab.reports.rows import group
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_language_model, open_texts
from reefknot.lab.text.dataset import Dataset

TOP = 10


@dataclass(frozen=True)
class Context:
    """The end of a context as the paper prints it, the word that follows, and the predictions of the paper's models."""

    end: str
    next: str
    plain: Sequence[tuple[str, float]]
    """Words and probabilities of the paper's VD-LSTM large."""
    real: Sequence[tuple[str, float]]
    """Words and probabilities of the paper's VD-LSTM+REAL large."""


def _words(text: str) -> tuple[tuple[str, float], ...]:
    """Parse words and probabilities: "the .27 a .13"."""
    parts = text.split()
    return tuple((word, float(value)) for word, value in zip(parts[::2], parts[1::2], strict=True))


CONTEXTS = (
    Context(
        "complaints filed in",
        "federal",
        _words("the .27 a .13 federal .13 N .09 <unk> .05 an .03 august .01 new .01 response .01 connection .01"),
        _words("federal .22 the .10 a .08 N .06 state .04 connection .03 august .03 july .03 an .03 september .03"),
    ),
    Context(
        "driving season in july and",
        "august",
        _words("the .09 N .08 a .07 <unk> .07 was .04 in .03 has .03 is .02 will .02 its .02"),
        _words("august .08 N .05 early .05 september .05 the .03 a .03 in .03 that .02 ended .02 its .02"),
    ),
    Context(
        "as soon as its audit is",
        "completed",
        _words("the .06 <unk> .05 a .05 in .04 n't .04 to .03 likely .03 expected .03 scheduled .01 completed .01"),
        _words("expected .10 completed .04 <unk> .03 the .03 in .03 a .03 scheduled .03 n't .03 due .02 to .01"),
    ),
    Context(
        "minister of industry science and",
        "technology",
        _words(
            "<unk> .33 the .06 a .01 other .01 others .01 industry .01 commerce .01 planning .01 management .01 "
            "mail .01"
        ),
        _words(
            "<unk> .09 health .08 development .04 the .04 a .03 industry .03 business .02 telecomm. .02 human .02 "
            "other .01"
        ),
    ),
)
PAPER = {"paper: VD-LSTM large": "plain", "paper: VD-LSTM+REAL large": "real"}


class NextWords(Figure):
    """The ten most likely next words after each context."""

    name = "inan2017/table4"
    recipe = "inan2017/table4"
    needs = "weights"
    options = ("data", "device")
    title = "Inan et al. 2017, Table 4: the most likely next words"
    shows = (
        "The ten most likely next words of the large VD-LSTM and the large VD-LSTM+REAL after four contexts. REAL "
        "gives less probability to frequent words (the, a, <unk>) and more to words with a meaning similar to the "
        "word that follows."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure the mean probability over seeds of the top ten words and of the next word, by context and row."""
        lines = {result.folder: _lines(result, data) for result in runs}
        by_row: dict[str, list[list[Mapping[str, float]]]] = {}
        systems = group(runs)
        for name, results in systems.items():
            for result in results:
                trained = open_language_model(result.folder, device)
                prompts = [
                    line or context.end.split() for line, context in zip(lines[result.folder], CONTEXTS, strict=True)
                ]
                count = len(trained.vocabulary)  # the rank of the next word needs the probabilities of all words
                predictions = [predict(trained.model, prompt, trained.vocabulary, count) for prompt in prompts]
                by_row.setdefault(name, []).append([dict(prediction.words) for prediction in predictions])
        return {
            "seeds": {name: [result.seed for result in results] for name, results in systems.items()},
            "pieces": [name for name, results in systems.items() if results[0].cuts_words],
            "contexts": [
                {
                    "end": context.end,
                    "next": context.next,
                    "whole_line": all(run_lines[n] for run_lines in lines.values()),
                    "rows": {name: _mean([run[n] for run in row_runs], context) for name, row_runs in by_row.items()},
                }
                for n, context in enumerate(CONTEXTS)
            ],
        }

    def draw(self, measured: Measured) -> Drawing:
        """Draw the ten words of each context and model as bars, with the actual next word in another colour."""
        contexts = measured["contexts"]
        columns = [_columns(context) for context in contexts]

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(len(contexts), len(columns[0]), sharex="row", squeeze=False)
            for context, models, row_axes in zip(contexts, columns, grid, strict=True):
                for (name, words), axes in zip(models.items(), row_axes, strict=True):
                    colours = [COLOURS[word == context["next"]] for word, _ in words]
                    axes.barh([word for word, _ in words], [value for _, value in words], color=colours)
                    axes.invert_yaxis()
                    axes.set_title(f"{name}\n{context['end']} ...", fontsize=8)
                    axes.tick_params(labelsize=8)

        caption = "The ten most likely next words after each context; the actual next word is in another colour."
        return Drawing(self.slug, 2.1 * len(contexts), [], draw, caption, width=2.6 * len(columns[0]))

    def lines(self, measured: Measured) -> list[str]:
        """Return a column for each model, first ours and then the paper's."""
        lines = []
        for context in measured["contexts"]:
            columns = _columns(context)
            read = "its line of the test text" if context["whole_line"] else "the beginning of a line"
            lines += [f"{context['end']} [{context['next']}]   read as {read}"]
            lines.append("  ".join(f"{name:<26}" for name in columns).rstrip())
            for rank in range(TOP):
                entries = [words[rank] if rank < len(words) else None for words in columns.values()]
                cells = [f"{entry[1]:.2f} {entry[0]}" if entry else "" for entry in entries]
                lines.append("  ".join(f"{cell:<26}" for cell in cells).rstrip())
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


def _columns(context: Mapping[str, Any]) -> dict[str, Sequence[tuple[str, float]]]:
    """Return the words of each model after a context, first ours and then the paper's."""
    ours = {name: row["words"] for name, row in context["rows"].items()}
    (papers,) = [printed for printed in CONTEXTS if printed.end == context["end"]]
    return ours | {title: getattr(papers, kind) for title, kind in PAPER.items()}


def _lines(result: Result, data: Path | None) -> list[list[str] | None]:
    """Return the beginning of the test line of each context; None if the text is missing or has no such line."""
    try:
        texts = open_texts(RunFolder.open(result.folder), data)
    except DataError:
        return [None] * len(CONTEXTS)
    return [_line(texts, context) for context in CONTEXTS]


def _line(texts: Dataset, context: Context) -> list[str] | None:
    """Return the words of a test line from its beginning to the end of the context; None if no line has the context."""
    words, wanted = texts.vocabulary.words, context.end.split()
    line: list[str] = []
    for index in texts.splits["test"].ids:
        if index == texts.vocabulary.eos:
            line = []
            continue
        line.append(words[index])
        if line[-len(wanted) :] == wanted:
            return line
    return None


def _mean(runs: Sequence[Mapping[str, float]], context: Context) -> dict[str, Any]:
    """Return the top words by mean probability over the runs of a row, and the rank of the actual next word."""
    means = {word: sum(probabilities[word] for probabilities in runs) / len(runs) for word in runs[0]}
    ordered = sorted(means.items(), key=lambda entry: -entry[1])
    rank = next((rank for rank, (word, _) in enumerate(ordered, 1) if word == context.next), None)
    return {"words": ordered[:TOP], "rank": rank, "probability": means.get(context.next)}
