"""The section of the report that `reefknot compare --html` adds: differences between systems with their intervals.

A system is one model, trained with one or more seeds. `build_section` takes the records that `reefknot compare --json`
prints. The first system is the baseline A, and every other system B is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from reefknot.lab.reports.cells import format_perplexity
from reefknot.lab.reports.drawing import COLOURS, Drawing
from reefknot.lab.reports.page import Section, create_environment

ANCHOR = "comparison"


@dataclass(frozen=True)
class _Row:
    """One comparison: a line of the table and an interval of the plot."""

    name: str
    cells: tuple[str, ...]
    verdict: str
    is_significant: bool
    difference: float
    """The value that is plotted."""
    interval: tuple[float, float]


def build_section(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], description: str, plots: Sequence[Drawing] = ()
) -> Section:
    """Return the section on a comparison.

    Args:
        records: The comparisons, as `reefknot compare --json` prints them.
        names: Names of the systems. The first is the baseline A, and the others are in the order of the records.
        description: Description of the text and of the units that were resampled.
        plots: Other plots of the comparison, such as differences by word frequency.
    """
    baseline, *other_names = names
    if "bleu_a" in records[0]:
        titles = ("BLEU of A", "BLEU of B", "B − A", "95 % interval", "seeds (A, B)")
        rows = [_bleu_row(name, record) for name, record in zip(other_names, records, strict=True)]
        label = "B − A, BLEU"
        better = "right"
    else:
        titles = ("perplexity of A", "perplexity of B", "B / A − 1", "95 % interval", "seeds (A, B)")
        rows = [_perplexity_row(name, record) for name, record in zip(other_names, records, strict=True)]
        label = "B / A − 1, % of perplexity"
        better = "left"
    caption = (
        f"Difference of each system from {baseline}, with its 95 % interval; further {better} is better. A filled "
        "marker is a difference that the interval separates from zero."
    )
    template = create_environment().get_template("comparison.html")
    html = template.render(
        comparison={
            "description": description,
            "baseline": baseline,
            "titles": titles,
            "rows": rows,
            "plots": [_plot_intervals(rows, label, caption), *plots],
        }
    )
    return Section("Comparison", html, ANCHOR)


def list_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons as rows of a CSV file. A pair of values, such as an interval, has two columns."""
    rows = []
    for record in records:
        row: dict[str, Any] = {}
        for name, value in record.items():
            if isinstance(value, list) and len(value) == 2 and name != "bleu_of_seeds":
                first, second = ("low", "high") if "interval" in name else ("a", "b")
                row |= {f"{name}.{first}": value[0], f"{name}.{second}": value[1]}
            elif not isinstance(value, list | dict):
                row[name] = value
        rows.append(row)
    return rows


def _perplexity_row(name: str, record: Mapping[str, Any]) -> _Row:
    percent = 100 * (record["ratio"] - 1)
    low, high = (100 * (ratio - 1) for ratio in record["ratio_interval"])
    return _Row(
        name,
        (
            format_perplexity(record["perplexity_a"]),
            format_perplexity(record["perplexity_b"]),
            f"{_signed(percent)} %",
            f"{_signed(low)} % to {_signed(high)} %",
            _format_seeds(record),
        ),
        record["verdict"],
        record["seen"],
        percent,
        (low, high),
    )


def _bleu_row(name: str, record: Mapping[str, Any]) -> _Row:
    low, high = record["interval_with_seeds"] or record["interval"]
    return _Row(
        name,
        (
            f"{record['bleu_a']:.2f}",
            f"{record['bleu_b']:.2f}",
            _signed(record["difference"]),
            f"{_signed(low)} to {_signed(high)}",
            _format_seeds(record),
        ),
        record["verdict"],
        record["seen"],
        record["difference"],
        (low, high),
    )


def _format_seeds(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record["seeds"]))


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _plot_intervals(rows: Sequence[_Row], label: str, caption: str) -> Drawing:
    """Draw each difference as a point with its interval, one above the other."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.axvline(0, color="#888888", linewidth=0.8)
        for position, row in enumerate(rows):
            low, high = row.interval
            axes.plot([low, high], [position, position], color=COLOURS[0], linewidth=1.4)
            fill = "full" if row.is_significant else "none"
            axes.plot([row.difference], [position], "o", color=COLOURS[0], markersize=7, fillstyle=fill)
        axes.set_yticks(range(len(rows)), [_shorten(row.name) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)  # the first system is at the top
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=label)

    height = 0.8 + 0.35 * len(rows)
    return Drawing("comparison", height, [], draw, caption)


def _shorten(name: str, length: int = 24) -> str:
    """Return a name that leaves space for the plot. The end of a path says more than its beginning."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
