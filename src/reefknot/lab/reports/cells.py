"""Define the columns of a results table, and format its cells.

`COLUMNS` at the end of the file lists all columns: each has a group, a title and a function that formats the cell of a
row. A row is one experiment of a recipe with its runs (`TableRow`). A cell is a string, empty if the row has no such
score. `table.py` builds tables from these columns.

An end is where a model holds word vectors: the input (embedding) or the output (classifier).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import NamedTuple

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.definition import format_unknown_share
from reefknot.lab.runs.loading import Spread
from reefknot.lab.runs.scores import BLEU, CHRF, PERPLEXITY, TOKEN_PERPLEXITY, Metric

CellFormat = Callable[[TableRow], str]
"""A function that formats the cell of a row."""


class ColumnFormat(NamedTuple):
    """The definition of a column."""

    group: str
    """Columns that belong together have the same group."""
    title: str
    format_cell: CellFormat


BLEU_TITLES = {"valid": "valid BLEU", "test": "test BLEU"}
"""Names of the groups of BLEU columns by split. The column of our score has the same title as its group."""
CORPUS_TITLE = "corpus"
"""Title of the name of the corpus, which is shown for recipes with different corpora."""
PROTOCOL_TITLE = "paper protocol"
"""Title of our perplexity, computed by the paper's protocol."""
PER_TOKEN_TITLE = "per token"
"""Title of our perplexity per token, which is shown for sub-words next to the perplexity per word."""
AUTHORS_TITLE = "authors, same epoch"
"""Title of the validation perplexity that the authors had after as many epochs as our scored weights."""
NOT_RECORDED = "not recorded"
"""The cell of a score that the paper's protocol needs and that our runs do not have."""
UNKNOWN_TITLE = "unknown words"
"""Title of the share of unknown words, and of its group."""
STEP_SECONDS_TITLE = "s/epoch alone"
"""Title of the time of training steps, measured by `reefknot bench steps` with nothing else on the device."""
SPEEDUP_TITLE = "x plain torch"
"""Title of the speed-up of these training steps over plain PyTorch."""
ENDS = ("input", "output", "tied")
"""Vectors with word similarity scores: the input's and the output's, or the vectors of the table that both share.

A cell shows the scores of the first two, separated by a slash, or the score of the third.
"""


def format_perplexity(value: float) -> str:
    """Format a perplexity with as many digits as papers print."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def format_percent(fraction: float) -> str:
    """Format a fraction as a signed percentage."""
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def format_spread(perplexity: Spread | None) -> str:
    """Format the mean perplexity over seeds with its standard deviation: "114.5 ± 0.7"."""
    if perplexity is None:
        return ""
    mean = format_perplexity(perplexity.mean)
    if perplexity.sd is None:
        return mean
    return f"{mean} ± {perplexity.sd:.1f}"


def format_row_perplexity(row: TableRow, split: str) -> str:
    """Format the perplexity of a row. Its unit is added if tokens are sub-words: "812.3 per word".

    The unit is a token if spaces do not separate the words of the text.
    """
    if not row.has_words:
        return _add_unit(format_spread(row.mean_score(TOKEN_PERPLEXITY, split)), "per token")
    perplexity = format_spread(row.mean_score(PERPLEXITY, split))
    return _add_unit(perplexity, "per word") if row.uses_subwords else perplexity


def _add_unit(score: str, unit: str) -> str:
    return f"{score} {unit}" if score else ""


def format_points(score: Spread | None) -> str:
    """Format BLEU or chrF (out of 100) or a correlation, with two decimals: "35.36 ± 0.09"."""
    if score is None:
        return ""
    if score.sd is None:
        return f"{score.mean:.2f}"
    return f"{score.mean:.2f} ± {score.sd:.2f}"


def format_paper_points(bleu: float) -> str:
    """Format a paper's BLEU, with one decimal if the paper gives only one."""
    has_one_decimal = round(bleu, 1) == bleu
    return f"{bleu:.1f}" if has_one_decimal else f"{bleu:.2f}"


def format_score(metric: Metric, row: TableRow, split: str) -> str:
    """Format a row's score of the given metric, for a sentence.

    A perplexity of sub-words is also given per token, or in bits per byte if the text has no words.
    """
    if metric != PERPLEXITY:
        return format_points(row.mean_score(metric, split))
    perplexity = format_row_perplexity(row, split)
    if not row.has_words:
        bits = Spread.from_values(score.fair_bits_per_byte for score in row.scores(split))
        return f"{perplexity} ({bits.mean:.3f} bits per byte)" if bits else perplexity
    if row.uses_subwords:
        return f"{perplexity} ({format_spread(row.mean_score(TOKEN_PERPLEXITY, split))} per token)"
    return perplexity


def format_difference(points: float) -> str:
    """Format a difference in points with its sign."""
    return f"{points:+.2f}".replace("-", "−")


def format_mean_rho(row: TableRow) -> str:
    """Format the mean correlation over Press & Wolf's benchmarks."""
    return _join_ends(_format_correlation(row.mean_rho(end)) for end in ENDS)


def format_paper_mean_rho(row: TableRow) -> str:
    """Format the paper's mean correlation over the same benchmarks."""
    correlations_by_end = [row.paper_similarity.get(end, {}) for end in ENDS]
    cells = []
    for correlations in correlations_by_end:
        if set(PRESS) <= correlations.keys():
            mean = fmean(correlations[benchmark] for benchmark in PRESS)
            cells.append(f"{mean:.2f}")
    return _join_ends(cells)


def _join_ends(cells: Iterable[str]) -> str:
    """Join the cells of the ends that have a score: "0.21 / 0.33"."""
    return " / ".join(cell for cell in cells if cell)


def _format_correlation(rho: Spread | None) -> str:
    return format_points(rho).replace("-", "−")


# The functions below format the cells of a column. Some of them serve several columns, one per split or benchmark.


def _format_our_rho(row: TableRow, benchmark: str) -> str:
    return _join_ends(_format_correlation(row.rho(end, benchmark)) for end in ENDS)


def _format_paper_rho(row: TableRow, benchmark: str) -> str:
    rhos_by_end = [row.paper_similarity.get(end, {}) for end in ENDS]
    return _join_ends(f"{rhos[benchmark]:.2f}" for rhos in rhos_by_end if benchmark in rhos)


def _format_our_bleu(row: TableRow, split: str) -> str:
    return format_points(row.mean_score(BLEU, split))


def _format_paper_bleu(row: TableRow, split: str) -> str:
    bleu = row.paper.get(f"bleu_{split}")
    return "" if bleu is None else format_paper_points(bleu)


def _format_bleu_difference(row: TableRow, split: str) -> str:
    difference = row.bleu_difference(split)
    return "" if difference is None else format_difference(difference)


def _format_token_perplexity(row: TableRow, split: str) -> str:
    """Format the perplexity per token. The cell is empty if another column has the same number."""
    if not row.uses_subwords or not row.has_words:
        return ""
    return format_spread(row.mean_score(TOKEN_PERPLEXITY, split))


def _format_protocol_perplexity(row: TableRow, split: str) -> str:
    perplexity = row.protocol_perplexity(split)
    if perplexity is None and row.paper_epoch == "last" and row.records and split in row.paper:
        return NOT_RECORDED
    return format_spread(perplexity)


def _format_paper_perplexity(row: TableRow, split: str) -> str:
    perplexity = row.paper.get(split)
    return "" if perplexity is None else format_perplexity(perplexity)


def _format_relative_difference(row: TableRow, split: str) -> str:
    difference = row.relative_difference(split)
    return "" if difference is None else format_percent(difference)


def _format_authors_perplexity(row: TableRow) -> str:
    return format_perplexity(row.authors_perplexity) if row.authors_perplexity else ""


def _format_paper_number(row: TableRow, key: str) -> str:
    """Format a number that the paper reports, such as `hours`."""
    return f"{row.paper[key]:g}" if key in row.paper else ""


def _format_corpus(row: TableRow) -> str:
    return row.scored_corpus


def _format_parameters(row: TableRow) -> str:
    return f"{row.parameter_count:,}" if row.parameter_count else ""


def _format_unknown(row: TableRow) -> str:
    """Format the share of unknown words in the validation and the test text: "5.1 % / 4.8 %", or one value if equal."""
    cells: dict[str, None] = {}
    for split in ("valid", "test"):
        scores = row.scores(split)
        if scores:
            cells[format_unknown_share(scores[0].unknown_share)] = None
    return " / ".join(cells)


def _format_chrf(row: TableRow) -> str:
    return format_points(row.mean_score(CHRF, "test"))


def _format_validation(row: TableRow) -> str:
    """Format the validation perplexity, or the last one so far if the runs are not finished."""
    if row.state != "unfinished":
        return format_row_perplexity(row, "valid")

    last_validations = [result.last_metrics("valid") for result in row.results]
    last_perplexity = Spread.from_values(metrics.perplexity for metrics in last_validations if metrics)
    if last_perplexity is None:
        return ""
    unit = " per sub-word" if any(result.uses_subwords for result in row.results) else ""
    return f"so far {format_perplexity(last_perplexity.mean)}{unit}"


def format_epochs(row: TableRow) -> str:
    """Format the number of epochs that were run, and the paper's or the recipe's number of epochs if it is larger.

    An evaluation row shows the epochs of its model only if it was trained for fewer.
    """
    if not row.epochs or (row.mode and not row.is_shortened):
        return ""
    fewest, most = min(row.epochs), max(row.epochs)
    epochs = f"{fewest:g}" if fewest == most else f"{fewest:g}–{most:g}"
    if fewest >= row.full_epochs:
        return epochs
    return f"{epochs} of {row.full_epochs:g}"


def _format_updates(row: TableRow) -> str:
    fewest, most = min(row.updates, default=0), max(row.updates, default=0)
    if not most:
        return ""
    return f"{most:,}" if fewest == most else f"{fewest:,}–{most:,}"


def _format_training_seconds(row: TableRow) -> str:
    seconds = Spread.from_values(record.training.seconds for record in row.records)
    return _format_duration(seconds.mean) if seconds else ""


def _format_seconds_per_epoch(row: TableRow) -> str:
    """Format the time of an epoch in the runs."""
    return _format_duration(row.seconds_per_epoch) if row.seconds_per_epoch else ""


def _format_epoch_seconds(row: TableRow) -> str:
    """Format the time of an epoch in the runs, or in the measured steps if there are no runs."""
    return _format_duration(row.epoch_seconds) if row.epoch_seconds else ""


def _format_step_seconds(row: TableRow) -> str:
    return _format_duration(row.step_times.epoch_seconds) if row.step_times else ""


def _format_speedup(row: TableRow) -> str:
    return f"{row.step_times.speedup:.1f}" if row.step_times else ""


def _format_duration(seconds: float) -> str:
    """Format seconds with three digits, which is about the precision of the measurement."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    if seconds >= 10:
        return f"{seconds:.1f}"
    return f"{seconds:.2f}"


def _format_tokens_per_second(row: TableRow) -> str:
    speed = Spread.from_values(record.training.tokens_per_second for record in row.records)
    return f"{speed.mean:,.0f}" if speed else ""


def _format_peak_memory(row: TableRow) -> str:
    peak = max((record.training.peak_memory_bytes or 0 for record in row.records), default=0)
    if not peak:
        return ""
    return f"{peak / 1e9:.1f} GB" if peak >= 1e9 else f"{peak / 1e6:.0f} MB"


def _format_seeds(row: TableRow) -> str:
    """Format the number of finished seeds, and the number of all seeds if it is larger."""
    finished = len(row.records) + len(row.source_runs)
    total = len(row.results) + len(row.source_runs)
    if not total:
        return ""
    return str(finished) if finished == total else f"{finished} of {total}"


def _similarity_columns() -> list[ColumnFormat]:
    """Return our correlation and the paper's correlation for each word similarity benchmark."""
    columns = []
    for benchmark in PRESS:
        columns.append(ColumnFormat(benchmark, benchmark, partial(_format_our_rho, benchmark=benchmark)))
        columns.append(ColumnFormat(benchmark, "paper", partial(_format_paper_rho, benchmark=benchmark)))
    return columns


COLUMNS: tuple[ColumnFormat, ...] = (
    ColumnFormat("size", CORPUS_TITLE, _format_corpus),
    ColumnFormat("size", "parameters", _format_parameters),
    ColumnFormat("pace", "s/epoch", _format_epoch_seconds),
    ColumnFormat("pace", "paper", partial(_format_paper_number, key="seconds")),
    ColumnFormat(BLEU_TITLES["valid"], BLEU_TITLES["valid"], partial(_format_our_bleu, split="valid")),
    ColumnFormat(BLEU_TITLES["valid"], "paper", partial(_format_paper_bleu, split="valid")),
    ColumnFormat(BLEU_TITLES["valid"], "diff", partial(_format_bleu_difference, split="valid")),
    ColumnFormat(BLEU_TITLES["test"], BLEU_TITLES["test"], partial(_format_our_bleu, split="test")),
    ColumnFormat(BLEU_TITLES["test"], "paper", partial(_format_paper_bleu, split="test")),
    ColumnFormat(BLEU_TITLES["test"], "diff", partial(_format_bleu_difference, split="test")),
    ColumnFormat(BLEU_TITLES["test"], "chrF", _format_chrf),
    ColumnFormat("training", "train", partial(format_row_perplexity, split="train")),
    ColumnFormat("training", PROTOCOL_TITLE, partial(_format_protocol_perplexity, split="train")),
    ColumnFormat("training", "paper", partial(_format_paper_perplexity, split="train")),
    ColumnFormat("training", "diff", partial(_format_relative_difference, split="train")),
    ColumnFormat("validation", "valid", _format_validation),
    ColumnFormat("validation", PER_TOKEN_TITLE, partial(_format_token_perplexity, split="valid")),
    ColumnFormat("validation", PROTOCOL_TITLE, partial(_format_protocol_perplexity, split="valid")),
    ColumnFormat("validation", AUTHORS_TITLE, _format_authors_perplexity),
    ColumnFormat("validation", "paper", partial(_format_paper_perplexity, split="valid")),
    ColumnFormat("validation", "diff", partial(_format_relative_difference, split="valid")),
    ColumnFormat("test", "test", partial(format_row_perplexity, split="test")),
    ColumnFormat("test", PER_TOKEN_TITLE, partial(_format_token_perplexity, split="test")),
    ColumnFormat("test", PROTOCOL_TITLE, partial(_format_protocol_perplexity, split="test")),
    ColumnFormat("test", "paper", partial(_format_paper_perplexity, split="test")),
    ColumnFormat("test", "diff", partial(_format_relative_difference, split="test")),
    ColumnFormat(UNKNOWN_TITLE, UNKNOWN_TITLE, _format_unknown),
    *_similarity_columns(),
    ColumnFormat("time", "epochs", format_epochs),
    ColumnFormat("time", "updates", _format_updates),
    ColumnFormat("time", "seconds", _format_training_seconds),
    ColumnFormat("time", "s/epoch", _format_seconds_per_epoch),
    ColumnFormat("time", STEP_SECONDS_TITLE, _format_step_seconds),
    ColumnFormat("time", SPEEDUP_TITLE, _format_speedup),
    ColumnFormat("time", "paper hours", partial(_format_paper_number, key="hours")),
    ColumnFormat("cost", "tokens/s", _format_tokens_per_second),
    ColumnFormat("cost", "memory", _format_peak_memory),
    ColumnFormat("cost", "seeds", _format_seeds),
)
"""All columns, in the order of the table."""
