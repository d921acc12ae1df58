"""Write the report: one self-contained HTML page about some runs, without scripts or network access.

`write_report` writes the page, and `render` returns it as a string. Both fill the template `page.html` with tables,
plots and sentences from the other modules of this package. A row of the report is one experiment of a recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports import embedding, plots, translations
from reefknot.lab.reports.cells import format_perplexity
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.reading import summarise_rows
from reefknot.lab.reports.results import Result, differing_keys, flatten
from reefknot.lab.reports.rows import TableRow, has_only_times, join_runs
from reefknot.lab.reports.table import build_table
from reefknot.lab.runs.definition import format_unknown_share
from reefknot.lab.runs.result import RunResult, SavedEvaluation
from reefknot.lab.runs.scores import TextScore
from reefknot.storage.files import write_text

T = TypeVar("T")

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
"""Headings of column groups. Each group shows one of our scores, and the paper's score next to it if there is one."""
_ANCHORS = ("results", "training", "frequency", "ends", "samples", "translations", "perplexity", "settings")
"""The ids of the sections of `page.html`."""


@dataclass(frozen=True)
class _Setting:
    """A setting that differs between rows."""

    key: str
    values: tuple[str, ...]
    """The value of each row as JSON, empty if the row does not have the setting."""


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
        raise SettingsError(f"{path}: is a folder; use the path of a file, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_with_runs = [embedding.with_picture(row) for row in join_runs(rows or [], results)]
    write_text(path, render(rows_with_runs, title, sections))
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
    environment.filters["share"] = format_unknown_share

    trained = [row for row in rows if row.results]
    runs = [result for row in trained for result in row.results]
    rows_with_signs, _ = add_footnotes(rows)
    plotted = [row for row in rows_with_signs if row.results]
    table = build_table(rows)
    html = environment.get_template("page.html").render(
        title=title,
        headings=_HEADINGS,
        sections=sections,
        facts=_summarise_runs(rows, runs),
        corpora=_unique(record.corpus for row in trained for record in row.records),
        table=table,
        cost=table.select_rows([bool(row.results) for row in rows]),
        reading=summarise_rows(rows),
        sizes=[] if has_only_times(rows) else plots.plot_sizes(plotted),
        curves=plots.plot_curves(plotted),
        frequency=plots.plot_frequency(plotted),
        embeddings=embedding.build_sections(trained),
        samples=[(row.name, row.records[0]) for row in trained if row.records and row.records[0].samples],
        translations=_build_translations(plotted),
        scores=_list_scores(rows),
        definitions=_list_definitions(rows),
        changed=_list_differing_settings(trained),
        trained=trained,
        runs=runs,
        environments=_unique(filter(None, map(_format_environment, runs))),
        settings=[(row.name, _format_json(row.results[0].settings)) for row in trained if row.results[0].settings],
    )
    # A lone surrogate in corpus text cannot be written as UTF-8.
    return html.encode("utf-8", "replace").decode("utf-8")


def _build_translations(plotted: Sequence[TableRow]) -> dict[str, Any]:
    """Return the content of the section on translations, or an empty mapping if nothing was translated."""
    scores = translations.list_run_scores(plotted)
    if not scores:
        return {}
    return {
        "scores": scores,
        "signatures": translations.list_signatures(plotted),
        "by_length": translations.plot_by_length(plotted),
        "pairs": translations.compare_examples(plotted),
        "attention": translations.plot_attention(plotted),
    }


def _summarise_runs(rows: Sequence[TableRow], runs: Sequence[Result]) -> list[tuple[str, str]]:
    """Return the summary at the top of the page, as names and values."""
    records = [result.record for result in runs if result.record]
    run_count = f"{len(records)} finished"
    if len(records) < len(runs):
        run_count += f" of {len(runs)}"
    values_by_name = {
        "recipe": [result.recipe for result in runs if result.recipe],
        "corpus": [_format_corpus(record) for record in records],
        "rows": [str(len(rows))],
        "runs": [run_count],
        "device": [record.training.device for record in records if record.training.device],
        "commit": [_format_commit(record) for record in records if record.commit],
    }
    summary = []
    for name, values in values_by_name.items():
        value = ", ".join(_unique(values))
        if value:
            summary.append((name, value))
    return summary


def _format_corpus(record: RunResult) -> str:
    fingerprint = record.corpus.fingerprint[:12]
    return f"{record.corpus.name} ({fingerprint})" if fingerprint else record.corpus.name


def _format_commit(record: RunResult) -> str:
    commit = (record.commit or "")[:12]
    return f"{commit} with uncommitted changes" if record.dirty else commit


def _list_scores(rows: Sequence[TableRow]) -> list[tuple[str, int, TextScore]]:
    """Return the row, the seed and the score of each finished run and evaluation.

    The score is on the test text, or on the validation text if test scores are withheld.
    """
    entries = []
    for row in rows:
        records_with_seeds: list[tuple[int, RunResult | SavedEvaluation]] = []
        records_with_seeds += [(record.seed, record) for record in row.records]
        records_with_seeds += zip((result.seed for result in row.source_runs), row.evaluations, strict=True)
        for seed, record in records_with_seeds:
            score = record.test or record.valid
            if score:
                entries.append((row.name, seed, score))
    return entries


def _list_definitions(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Return each distinct definition of perplexity with its heading.

    The heading has the names of its rows, and the name of the paper's protocol if it is the definition of a protocol.
    It has no names if all rows share the definition.
    """
    rows_by_definition: dict[str, list[str]] = {}
    rows_by_protocol: dict[tuple[str, str], list[str]] = {}  # by name and definition of the protocol
    for row in rows:
        scores = row.scores("test") or row.scores("valid")
        for definition in _unique(score.definition for score in scores):
            rows_by_definition.setdefault(definition, []).append(row.name)
        protocols = [record.protocol for record in row.records if record.protocol]
        for name_and_definition in _unique((protocol.name, protocol.definition) for protocol in protocols):
            rows_by_protocol.setdefault(name_and_definition, []).append(row.name)

    entries = []
    for definition, names in rows_by_definition.items():
        heading = "" if len(rows_by_definition) == 1 else ", ".join(names)
        entries.append((heading, definition))
    for (protocol_name, definition), names in rows_by_protocol.items():
        heading = f"protocol {protocol_name}"
        if len(rows_by_protocol) > 1:
            heading += f": {', '.join(names)}"
        entries.append((heading, definition))
    return entries


def _list_differing_settings(trained: Sequence[TableRow]) -> list[_Setting]:
    """Return the settings that differ between rows, with the value of each row."""
    row_settings = [flatten(row.results[0].settings) for row in trained]
    differing = []
    for key in differing_keys(row_settings):
        values = tuple(_format_json(settings[key]) if key in settings else "" for settings in row_settings)
        differing.append(_Setting(key, values))
    return differing


def _format_environment(result: Result) -> str:
    """Return the environment of a run as JSON, without the command, which has its own column."""
    environment = {key: value for key, value in result.environment.items() if key != "command"}
    return _format_json(environment) if environment else ""


def _unique(values: Iterable[T]) -> list[T]:
    """Return the values without repetitions, in their order. Values need not be hashable."""
    unique: list[T] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return unique


def _format_json(value: Any) -> str:
    """Return a value as JSON, and a string unchanged."""
    if isinstance(value, str):
        return value
    indent = 2 if isinstance(value, dict) else None
    return json.dumps(value, indent=indent, ensure_ascii=False)
