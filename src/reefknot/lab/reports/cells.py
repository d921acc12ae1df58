"""Define the columns of a results table, and format its cells.

`COLUMNS` at the end of the file lists all columns: each has a group, a title and a function that formats the cell of a
`TableRow`. A cell is a string, empty if the row has no such score. `table.py` builds tables from these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports.results import Spread
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.scores import BLEU, CHRF, PERPLEXITY, Metric

CellFormat = Callable[[TableRow], str]
"""Formats the cell of a row."""
BLEU_TITLES = {"valid": "valid BLEU", "test": "test BLEU"}
"""Names of the groups of BLEU columns by split. The column of our score has the same title as its group."""
PROTOCOL_TITLE = "paper protocol"
"""Title of our perplexity, computed by the paper's protocol."""
STEP_SECONDS_TITLE, SPEEDUP_TITLE = "s/epoch alone", "x plain torch"
"""Titles of the times of training steps, measured by `reefknot bench steps` with nothing else on the device."""
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


def format_spread(value: Spread | None) -> str:
    """Format the mean perplexity over seeds with its standard deviation."""
    if value is None:
        return ""
    mean = format_perplexity(value.mean)
    return mean if value.sd is None else f"{mean} ± {value.sd:.1f}"


def format_points(value: Spread | None) -> str:
    """Format BLEU or chrF (out of 100) or a correlation, with two decimals."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.sd is None else f"{value.mean:.2f} ± {value.sd:.2f}"


def format_paper_points(value: float) -> str:
    """Format a paper's BLEU, with one decimal if the paper gives only one."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def format_score(metric: Metric, value: Spread | None) -> str:
    """Format a score of the given metric."""
    return format_spread(value) if metric == PERPLEXITY else format_points(value)


def format_difference(value: float) -> str:
    """Format a difference in points with its sign."""
    return f"{value:+.2f}".replace("-", "−")


def format_mean_rho(row: TableRow) -> str:
    """Format the mean correlation over Press & Wolf's benchmarks."""
    return _join_ends(_format_correlation(row.mean_rho(end)) for end in ENDS)


def format_paper_mean_rho(row: TableRow) -> str:
    """Format the paper's mean correlation over the same benchmarks."""
    by_end = [row.paper_similarity.get(end, {}) for end in ENDS]
    complete = [correlations for correlations in by_end if set(PRESS) <= correlations.keys()]
    return _join_ends(f"{fmean(correlations[name] for name in PRESS):.2f}" for correlations in complete)


def _join_ends(cells: Iterable[str]) -> str:
    """Join the cells of the ends that have a score: "0.21 / 0.33"."""
    return " / ".join(filter(None, cells))


def _format_correlation(value: Spread | None) -> str:
    return format_points(value).replace("-", "−")


# The functions below take a split or a benchmark and return the function that formats a cell of its column.


def _rho_column(benchmark: str) -> CellFormat:
    return lambda row: _join_ends(_format_correlation(row.rho(end, benchmark)) for end in ENDS)


def _paper_rho_column(benchmark: str) -> CellFormat:
    def format_cell(row: TableRow) -> str:
        by_end = [row.paper_similarity.get(end, {}) for end in ENDS]
        return _join_ends(f"{scores[benchmark]:.2f}" for scores in by_end if benchmark in scores)

    return format_cell


def _paper_bleu_column(split: str) -> CellFormat:
    key = f"bleu_{split}"
    return lambda row: format_paper_points(row.paper[key]) if key in row.paper else ""


def _bleu_difference_column(split: str) -> CellFormat:
    def format_cell(row: TableRow) -> str:
        value = row.bleu_difference(split)
        return "" if value is None else format_difference(value)

    return format_cell


def _paper_perplexity_column(split: str) -> CellFormat:
    return lambda row: format_perplexity(row.paper[split]) if split in row.paper else ""


def _relative_difference_column(split: str) -> CellFormat:
    def format_cell(row: TableRow) -> str:
        value = row.relative_difference(split)
        return "" if value is None else format_percent(value)

    return format_cell


def _format_validation(row: TableRow) -> str:
    """Format the validation perplexity, or the last one so far if the runs are not finished."""
    if row.state != "unfinished":
        return format_spread(row.mean_score(PERPLEXITY, "valid"))
    last_lines = [result.last_metrics("valid") for result in row.results]
    last = Spread.from_values(line.perplexity for line in last_lines if line)
    unit = " per sub-word" if any(result.uses_subwords for result in row.results) else ""
    return f"so far {format_perplexity(last.mean)}{unit}" if last else ""


def _format_epochs(row: TableRow) -> str:
    """Format the number of epochs that were run, and the recipe's number of epochs if it is larger."""
    if not row.epochs:
        return ""
    fewest, most = min(row.epochs), max(row.epochs)
    epochs = f"{fewest:g}" if fewest == most else f"{fewest:g}–{most:g}"
    return epochs if fewest >= row.recipe_epochs else f"{epochs} of {row.recipe_epochs:g}"


def _format_updates(row: TableRow) -> str:
    fewest, most = min(row.updates, default=0), max(row.updates, default=0)
    if not most:
        return ""
    return f"{most:,}" if fewest == most else f"{fewest:,}–{most:,}"


def _format_training_seconds(row: TableRow) -> str:
    seconds = Spread.from_values(record.training.seconds for record in row.records)
    return _format_duration(seconds.mean) if seconds else ""


def _format_seconds_per_epoch(row: TableRow) -> str:
    return _format_duration(row.seconds_per_epoch) if row.seconds_per_epoch else ""


def _format_duration(seconds: float) -> str:
    """Format seconds with three digits, which is about the precision of the measurement."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


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
    finished, total = len(row.records) + len(row.source_runs), len(row.results) + len(row.source_runs)
    if not total:
        return ""
    return str(finished) if finished == total else f"{finished} of {total}"


COLUMNS: tuple[tuple[str, str, CellFormat], ...] = (
    ("size", "parameters", lambda row: f"{row.parameter_count:,}" if row.parameter_count else ""),
    ("pace", "s/epoch", lambda row: _format_duration(row.epoch_seconds) if row.epoch_seconds else ""),
    ("pace", "paper", lambda row: f"{row.paper['seconds']:g}" if "seconds" in row.paper else ""),
    (BLEU_TITLES["valid"], BLEU_TITLES["valid"], lambda row: format_points(row.mean_score(BLEU, "valid"))),
    (BLEU_TITLES["valid"], "paper", _paper_bleu_column("valid")),
    (BLEU_TITLES["valid"], "diff", _bleu_difference_column("valid")),
    (BLEU_TITLES["test"], BLEU_TITLES["test"], lambda row: format_points(row.mean_score(BLEU, "test"))),
    (BLEU_TITLES["test"], "paper", _paper_bleu_column("test")),
    (BLEU_TITLES["test"], "diff", _bleu_difference_column("test")),
    (BLEU_TITLES["test"], "chrF", lambda row: format_points(row.mean_score(CHRF, "test"))),
    ("training", "train", lambda row: format_spread(row.mean_score(PERPLEXITY, "train"))),
    ("training", "paper", _paper_perplexity_column("train")),
    ("training", "diff", _relative_difference_column("train")),
    ("validation", "valid", _format_validation),
    ("validation", PROTOCOL_TITLE, lambda row: format_spread(row.protocol_perplexity("valid"))),
    ("validation", "paper", _paper_perplexity_column("valid")),
    ("validation", "diff", _relative_difference_column("valid")),
    ("test", "test", lambda row: format_spread(row.mean_score(PERPLEXITY, "test"))),
    ("test", PROTOCOL_TITLE, lambda row: format_spread(row.protocol_perplexity("test"))),
    ("test", "paper", _paper_perplexity_column("test")),
    ("test", "diff", _relative_difference_column("test")),
    *(
        column
        for name in PRESS
        for column in ((name, name, _rho_column(name)), (name, "paper", _paper_rho_column(name)))
    ),
    ("time", "epochs", _format_epochs),
    ("time", "updates", _format_updates),
    ("time", "seconds", _format_training_seconds),
    ("time", "s/epoch", _format_seconds_per_epoch),
    ("time", STEP_SECONDS_TITLE, lambda row: _format_duration(row.step_times.epoch_seconds) if row.step_times else ""),
    ("time", SPEEDUP_TITLE, lambda row: f"{row.step_times.speedup:.1f}" if row.step_times else ""),
    ("time", "paper hours", lambda row: f"{row.paper['hours']:g}" if "hours" in row.paper else ""),
    ("cost", "tokens/s", _format_tokens_per_second),
    ("cost", "memory", _format_peak_memory),
    ("cost", "seeds", _format_seeds),
)
"""The group, the title and the cell function of each column, in the order of the table."""
