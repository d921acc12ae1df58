"""The columns of a table. A column has a group, a title and a function that formats the cell of a row."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports.results import Spread
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.scores import BLEU, CHRF, PERPLEXITY, Metric

BLEU_TITLES = {"valid": "valid BLEU", "test": "test BLEU"}
"""Names of the groups of BLEU columns by split. The column of our score has the same title as its group."""
AS_PAPER = "paper protocol"
ALONE, TIMES_PLAIN = "s/epoch alone", "x plain torch"
"""Columns of training steps, measured by `reefknot bench steps` with nothing else on the device."""
ENDS = ("input", "output", "tied")
"""Ends with word similarity scores. A cell shows the scores of both ends, or the score of the table that they share."""


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
    return format_perplexity(value.mean) if value.sd is None else f"{format_perplexity(value.mean)} ± {value.sd:.1f}"


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


def _paper_bleu(split: str) -> Callable[[TableRow], str]:
    key = f"bleu_{split}"
    return lambda row: format_paper_points(row.paper[key]) if key in row.paper else ""


def _points_apart(split: str) -> Callable[[TableRow], str]:
    return lambda row: format_difference(value) if (value := row.bleu_difference(split)) is not None else ""


def format_difference(value: float) -> str:
    """Format a difference in points with its sign."""
    return f"{value:+.2f}".replace("-", "−")


def _rho(benchmark: str) -> Callable[[TableRow], str]:
    return lambda row: " / ".join(
        format_points(rho).replace("-", "−") for end in ENDS if (rho := row.rho(end, benchmark))
    )


def _paper_rho(benchmark: str) -> Callable[[TableRow], str]:
    return lambda row: " / ".join(
        f"{row.paper_similarity[end][benchmark]:.2f}" for end in ENDS if benchmark in row.paper_similarity.get(end, {})
    )


def format_mean_rho(row: TableRow) -> str:
    """Format the mean correlation over Press & Wolf's benchmarks."""
    return " / ".join(format_points(rho).replace("-", "−") for end in ENDS if (rho := row.mean_rho(end)))


def format_paper_mean_rho(row: TableRow) -> str:
    """Format the paper's mean correlation over the same benchmarks."""
    papers = [row.paper_similarity[end] for end in ENDS if end in row.paper_similarity]
    return " / ".join(f"{fmean(rhos[name] for name in PRESS):.2f}" for rhos in papers if set(PRESS) <= rhos.keys())


def _valid(row: TableRow) -> str:
    if row.state != "unfinished":
        return format_spread(row.mean_score(PERPLEXITY, "valid"))
    last = Spread.of(metric.perplexity for result in row.results if (metric := result.last("valid")))
    unit = " per sub-word" if any(result.cuts_words for result in row.results) else ""
    return f"so far {format_perplexity(last.mean)}{unit}" if last else ""


def _paper(split: str) -> Callable[[TableRow], str]:
    return lambda row: format_perplexity(row.paper[split]) if split in row.paper else ""


def _difference(split: str) -> Callable[[TableRow], str]:
    return lambda row: format_percent(value) if (value := row.difference(split)) is not None else ""


def _epochs(row: TableRow) -> str:
    """Format the number of epochs that were run, and the recipe's number of epochs if it is larger."""
    if not row.epochs:
        return ""
    low, high = min(row.epochs), max(row.epochs)
    ran = f"{low:g}" if low == high else f"{low:g}–{high:g}"
    return ran if low >= row.recipe_epochs else f"{ran} of {row.recipe_epochs:g}"


def _updates(row: TableRow) -> str:
    low, high = min(row.updates, default=0), max(row.updates, default=0)
    return "" if not high else f"{high:,}" if low == high else f"{low:,}–{high:,}"


def _seconds(row: TableRow) -> str:
    seconds = Spread.of(record.training.seconds for record in row.records)
    return _format_duration(seconds.mean) if seconds else ""


def _seconds_per_epoch(row: TableRow) -> str:
    return _format_duration(row.seconds_per_epoch) if row.seconds_per_epoch else ""


def _format_duration(seconds: float) -> str:
    """Format seconds with three digits, which is about the precision of the measurement."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def _speed(row: TableRow) -> str:
    speed = Spread.of(record.training.tokens_per_second for record in row.records)
    return f"{speed.mean:,.0f}" if speed else ""


def _memory(row: TableRow) -> str:
    peak = max((record.training.peak_memory_bytes or 0 for record in row.records), default=0)
    if not peak:
        return ""
    return f"{peak / 1e9:.1f} GB" if peak >= 1e9 else f"{peak / 1e6:.0f} MB"


def _seeds(row: TableRow) -> str:
    finished, total = len(row.records) + len(row.models), len(row.results) + len(row.models)
    return "" if not total else str(finished) if finished == total else f"{finished} of {total}"


COLUMNS: tuple[tuple[str, str, Callable[[TableRow], str]], ...] = (
    ("size", "parameters", lambda row: f"{row.size:,}" if row.size else ""),
    ("pace", "s/epoch", lambda row: _format_duration(row.pace) if row.pace else ""),
    ("pace", "paper", lambda row: f"{row.paper['seconds']:g}" if "seconds" in row.paper else ""),
    (BLEU_TITLES["valid"], BLEU_TITLES["valid"], lambda row: format_points(row.mean_score(BLEU, "valid"))),
    (BLEU_TITLES["valid"], "paper", _paper_bleu("valid")),
    (BLEU_TITLES["valid"], "diff", _points_apart("valid")),
    (BLEU_TITLES["test"], BLEU_TITLES["test"], lambda row: format_points(row.mean_score(BLEU, "test"))),
    (BLEU_TITLES["test"], "paper", _paper_bleu("test")),
    (BLEU_TITLES["test"], "diff", _points_apart("test")),
    (BLEU_TITLES["test"], "chrF", lambda row: format_points(row.mean_score(CHRF, "test"))),
    ("training", "train", lambda row: format_spread(row.mean_score(PERPLEXITY, "train"))),
    ("training", "paper", _paper("train")),
    ("training", "diff", _difference("train")),
    ("validation", "valid", _valid),
    ("validation", AS_PAPER, lambda row: format_spread(row.by_protocol("valid"))),
    ("validation", "paper", _paper("valid")),
    ("validation", "diff", _difference("valid")),
    ("test", "test", lambda row: format_spread(row.mean_score(PERPLEXITY, "test"))),
    ("test", AS_PAPER, lambda row: format_spread(row.by_protocol("test"))),
    ("test", "paper", _paper("test")),
    ("test", "diff", _difference("test")),
    *((name, title, cell(name)) for name in PRESS for title, cell in ((name, _rho), ("paper", _paper_rho))),
    ("time", "epochs", _epochs),
    ("time", "updates", _updates),
    ("time", "seconds", _seconds),
    ("time", "s/epoch", _seconds_per_epoch),
    ("time", ALONE, lambda row: _format_duration(row.steps.epoch_seconds) if row.steps else ""),
    ("time", TIMES_PLAIN, lambda row: f"{row.steps.times_plain:.1f}" if row.steps else ""),
    ("time", "paper hours", lambda row: f"{row.paper['hours']:g}" if "hours" in row.paper else ""),
    ("cost", "tokens/s", _speed),
    ("cost", "memory", _memory),
    ("cost", "seeds", _seeds),
)
"""The group, the title and the cell function of each column."""
