"""The columns of a table: each column's group, title, and the function that formats a row's cell."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports.results import Spread
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.scores import BLEU, CHRF, PERPLEXITY, Metric

BLEU_TITLES = {"valid": "valid BLEU", "test": "test BLEU"}
"""Groups of BLEU columns, which are also the titles of our own columns in them, by split."""
AS_PAPER = "as paper counts"
ALONE, TIMES_PLAIN = "s/epoch alone", "x plain torch"
"""Columns for training steps measured alone on the device, which runs may have shared."""
ENDS = ("input", "output", "tied")
"""The ends whose vectors are judged; a cell shows both ends, or the table that they share."""


def number(value: float) -> str:
    """Format a perplexity with as many digits as papers print."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def percent(fraction: float) -> str:
    """Format a fraction as a signed percentage."""
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def spread(value: Spread | None) -> str:
    """Format the mean perplexity over seeds with its standard deviation."""
    if value is None:
        return ""
    return number(value.mean) if value.sd is None else f"{number(value.mean)} ± {value.sd:.1f}"


def points(value: Spread | None) -> str:
    """Format BLEU or chrF (out of 100) or a correlation, with two decimals."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.sd is None else f"{value.mean:.2f} ± {value.sd:.2f}"


def papers_points(value: float) -> str:
    """Format a paper's BLEU, with one decimal if the paper gives only one."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def shown(metric: Metric, value: Spread | None) -> str:
    """Format a score of the given metric."""
    return spread(value) if metric == PERPLEXITY else points(value)


def _paper_bleu(split: str) -> Callable[[TableRow], str]:
    key = f"bleu_{split}"
    return lambda row: papers_points(row.paper[key]) if key in row.paper else ""


def _points_apart(split: str) -> Callable[[TableRow], str]:
    return lambda row: signed(value) if (value := row.bleu_difference(split)) is not None else ""


def signed(value: float) -> str:
    """Format a difference in points with its sign."""
    return f"{value:+.2f}".replace("-", "−")


def _rho(benchmark: str) -> Callable[[TableRow], str]:
    return lambda row: " / ".join(points(rho).replace("-", "−") for end in ENDS if (rho := row.rho(end, benchmark)))


def _paper_rho(benchmark: str) -> Callable[[TableRow], str]:
    return lambda row: " / ".join(
        f"{row.paper_similarity[end][benchmark]:.2f}" for end in ENDS if benchmark in row.paper_similarity.get(end, {})
    )


def mean_rho(row: TableRow) -> str:
    """Format the mean correlation over Press & Wolf's benchmarks."""
    return " / ".join(points(rho).replace("-", "−") for end in ENDS if (rho := row.mean_rho(end)))


def papers_mean_rho(row: TableRow) -> str:
    """Format the paper's mean correlation over the same benchmarks."""
    papers = [row.paper_similarity[end] for end in ENDS if end in row.paper_similarity]
    return " / ".join(f"{fmean(rhos[name] for name in PRESS):.2f}" for rhos in papers if set(PRESS) <= rhos.keys())


def _valid(row: TableRow) -> str:
    if row.state != "unfinished":
        return spread(row.figure(PERPLEXITY, "valid"))
    last = Spread.of(metric.perplexity for result in row.results if (metric := result.last("valid")))
    per = " per sub-word" if any(result.cuts_words for result in row.results) else ""
    return f"so far {number(last.mean)}{per}" if last else ""


def _paper(split: str) -> Callable[[TableRow], str]:
    return lambda row: number(row.paper[split]) if split in row.paper else ""


def _difference(split: str) -> Callable[[TableRow], str]:
    return lambda row: percent(value) if (value := row.difference(split)) is not None else ""


def _epochs(row: TableRow) -> str:
    """Format the epochs that were run, with the recipe's number if it is larger."""
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
    return _duration(seconds.mean) if seconds else ""


def _seconds_per_epoch(row: TableRow) -> str:
    return _duration(row.seconds_per_epoch) if row.seconds_per_epoch else ""


def _duration(seconds: float) -> str:
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
    ("pace", "s/epoch", lambda row: _duration(row.pace) if row.pace else ""),
    ("pace", "paper", lambda row: f"{row.paper['seconds']:g}" if "seconds" in row.paper else ""),
    (BLEU_TITLES["valid"], BLEU_TITLES["valid"], lambda row: points(row.figure(BLEU, "valid"))),
    (BLEU_TITLES["valid"], "paper", _paper_bleu("valid")),
    (BLEU_TITLES["valid"], "diff", _points_apart("valid")),
    (BLEU_TITLES["test"], BLEU_TITLES["test"], lambda row: points(row.figure(BLEU, "test"))),
    (BLEU_TITLES["test"], "paper", _paper_bleu("test")),
    (BLEU_TITLES["test"], "diff", _points_apart("test")),
    (BLEU_TITLES["test"], "chrF", lambda row: points(row.figure(CHRF, "test"))),
    ("training", "train", lambda row: spread(row.figure(PERPLEXITY, "train"))),
    ("training", "paper", _paper("train")),
    ("training", "diff", _difference("train")),
    ("validation", "valid", _valid),
    ("validation", AS_PAPER, lambda row: spread(row.by_protocol("valid"))),
    ("validation", "paper", _paper("valid")),
    ("validation", "diff", _difference("valid")),
    ("test", "test", lambda row: spread(row.figure(PERPLEXITY, "test"))),
    ("test", AS_PAPER, lambda row: spread(row.by_protocol("test"))),
    ("test", "paper", _paper("test")),
    ("test", "diff", _difference("test")),
    *((name, title, cell(name)) for name in PRESS for title, cell in ((name, _rho), ("paper", _paper_rho))),
    ("time", "epochs", _epochs),
    ("time", "updates", _updates),
    ("time", "seconds", _seconds),
    ("time", "s/epoch", _seconds_per_epoch),
    ("time", ALONE, lambda row: _duration(row.steps.epoch_seconds) if row.steps else ""),
    ("time", TIMES_PLAIN, lambda row: f"{row.steps.times_plain:.1f}" if row.steps else ""),
    ("time", "paper hours", lambda row: f"{row.paper['hours']:g}" if "hours" in row.paper else ""),
    ("cost", "tokens/s", _speed),
    ("cost", "memory", _memory),
    ("cost", "seeds", _seeds),
)
"""The group, the title and the cell function of each column."""
