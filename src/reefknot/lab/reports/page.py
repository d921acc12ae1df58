"""The report: one self-contained HTML page without scripts or network access."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports import embedding, plots, translations
from reefknot.lab.reports.cells import format_perplexity
from reefknot.lab.reports.reading import read
from reefknot.lab.reports.results import Result, differing, flatten
from reefknot.lab.reports.rows import TableRow, join, judged_by_time, mark
from reefknot.lab.reports.table import build
from reefknot.lab.runs.result import RunResult, SavedEvaluation
from reefknot.lab.runs.scores import TextScore
from reefknot.storage.files import write_text

_HEADINGS = {
    "pace": "seconds per epoch",
    "ratio": "times the first row",
    "valid BLEU": "validation BLEU",
    "test BLEU": "test BLEU",
    "training": "training perplexity",
    "validation": "validation perplexity",
    "test": "test perplexity",
    **{name: name for name in PRESS},
}
"""Headings of the groups of columns with a score of ours, which may also contain the paper's score."""
_ANCHORS = ("results", "training", "frequency", "ends", "samples", "translations", "perplexity", "settings")


@dataclass(frozen=True)
class _Setting:
    """A setting that differs between rows: its key and each row's value."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """An additional section of the page; its HTML is inserted unchanged."""

    title: str
    html: str
    anchor: str
    """The id that links point to."""

    def __post_init__(self) -> None:
        if self.anchor in _ANCHORS or not re.fullmatch("[a-z][a-z0-9-]*", self.anchor):
            raise SettingsError(
                f"invalid section anchor '{self.anchor}': use lower-case letters, digits and hyphens, and none of the "
                f"anchors that the page has already ({', '.join(_ANCHORS)})"
            )


def write_report(
    results: Sequence[Result],
    path: Path | str,
    *,
    rows: list[TableRow] | None = None,
    title: str,
    sections: Sequence[Section] = (),
) -> Path:
    """Write the report of the results atomically and return its path.

    Args:
        results: The runs to show.
        path: The file to write.
        rows: All rows of the recipe, in its order, whether they were run or not. Without it, the report shows the rows
            of the results.
        title: The heading of the page.
        sections: Additional sections, which follow the results.
    """
    path = Path(path)
    if path.is_dir():
        raise SettingsError(f"{path}: is a folder; name a file for the report, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = [embedding.with_picture(row) for row in join(rows or [], results)]
    write_text(path, render(joined, title, sections))
    return path


def render(rows: Sequence[TableRow], title: str, sections: Sequence[Section] = ()) -> str:
    """Return the page as HTML. Equal rows and sections give equal text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["perplexity"] = format_perplexity
    ran = [row for row in rows if row.results]
    plotted = [row for row in mark(rows)[0] if row.results]
    table = build(rows)
    runs = [result for row in ran for result in row.results]
    text = environment.get_template("page.html").render(
        title=title,
        headings=_HEADINGS,
        sections=sections,
        facts=_facts(rows, runs),
        corpora=_unique(record.corpus for row in ran for record in row.records),
        table=table,
        cost=table.only([bool(row.results) for row in rows]),
        reading=read(rows),
        sizes=[] if judged_by_time(rows) else plots.sizes(plotted),
        curves=plots.curves(plotted),
        frequency=plots.frequency(plotted),
        learned=embedding.learned(ran),
        samples=[(row.name, row.records[0]) for row in ran if row.records and row.records[0].samples],
        translations=_translations(plotted),
        scores=_scores(rows),
        definitions=_definitions(rows),
        changed=_changed(ran),
        ran=ran,
        runs=runs,
        environments=_unique(text for result in runs if (text := _environment(result))),
        settings=[(row.name, _json(row.results[0].settings)) for row in ran if row.results[0].settings],
    )
    # A lone surrogate in corpus text cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _translations(plotted: Sequence[TableRow]) -> dict[str, Any]:
    """Return the content of the section on translations, or an empty mapping if nothing was translated."""
    scores = translations.run_scores(plotted)
    if not scores:
        return {}
    return {
        "scores": scores,
        "signatures": translations.signatures(plotted),
        "by_length": translations.by_length(plotted),
        "pairs": translations.side_by_side(plotted),
        "attention": translations.attention(plotted),
    }


def _facts(rows: Sequence[TableRow], runs: Sequence[Result]) -> list[tuple[str, str]]:
    """Return the facts at the top of the page, as names and values."""
    records = [result.record for result in runs if result.record]
    counted = f"{len(records)} finished" + (f" of {len(runs)}" if len(records) < len(runs) else "")
    facts = [
        ("recipe", ", ".join(_unique(result.recipe for result in runs if result.recipe))),
        ("corpus", ", ".join(_unique(_corpus(record) for record in records))),
        ("rows", str(len(rows))),
        ("runs", counted),
        (
            "device",
            ", ".join(_unique(record.training.device for record in records if record.training.device)),
        ),
        ("commit", ", ".join(_unique(_code(record) for record in records if record.commit))),
    ]
    return [(name, value) for name, value in facts if value]


def _corpus(record: RunResult) -> str:
    fingerprint = record.corpus.fingerprint[:12]
    return f"{record.corpus.name} ({fingerprint})" if fingerprint else record.corpus.name


def _code(record: RunResult) -> str:
    return (record.commit or "")[:12] + (" with uncommitted changes" if record.dirty else "")


def _scores(rows: Sequence[TableRow]) -> list[tuple[str, int, TextScore]]:
    """Return the row, the seed and the score of each finished run and evaluation.

    The score is on the test text, or on the validation text if test scores are withheld.
    """
    scores = []
    for row in rows:
        by_seed: list[tuple[int, RunResult | SavedEvaluation]] = [(record.seed, record) for record in row.records]
        by_seed += zip((result.seed for result in row.models), row.evaluations, strict=True)
        scores += [(row.name, seed, score) for seed, record in by_seed if (score := record.test or record.valid)]
    return scores


def _definitions(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Return each distinct definition of perplexity with the names of its rows, or no names if all rows share it."""
    ours: dict[str, list[str]] = {}
    papers: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        scores = row.scores("test") or row.scores("valid")
        for text in _unique(score.definition for score in scores):
            ours.setdefault(text, []).append(row.name)
        protocols = [record.protocol for record in row.records if record.protocol]
        for protocol in _unique((protocol.name, protocol.definition) for protocol in protocols):
            papers.setdefault(protocol, []).append(row.name)
    definitions = [("" if len(ours) == 1 else ", ".join(names), text) for text, names in ours.items()]
    for (name, text), names in papers.items():
        definitions.append((f"protocol {name}" + (f": {', '.join(names)}" if len(papers) > 1 else ""), text))
    return definitions


def _changed(ran: Sequence[TableRow]) -> list[_Setting]:
    flat = [flatten(row.results[0].settings) for row in ran]
    return [_Setting(key, tuple(_json(row[key]) if key in row else "" for row in flat)) for key in differing(flat)]


def _environment(result: Result) -> str:
    """Return the environment of a run as JSON, without the command, which has its own column."""
    shown = {key: value for key, value in result.environment.items() if key != "command"}
    return _json(shown) if shown else ""


def _unique(values: Any) -> list[Any]:
    unique: list[Any] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return unique


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=2 if isinstance(value, dict) else None, ensure_ascii=False)
