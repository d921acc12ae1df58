"""Write the report: one self-contained HTML page about some runs, without network access.

`write_report` writes the page, and `render` returns it as a string. Both fill the template `page.html` with tables,
plots and sentences from the other modules of this package. A row of the report is one experiment of a recipe.

The page is complete without scripts. Its only script, `page.js`, makes tables sortable. The content security policy of
the page allows this script by its hash, and no other script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.recipes.file import find_recipe, list_shipped_recipes, read_recipe_file
from reefknot.lab.reports import embedding, plots, translations
from reefknot.lab.reports.cells import format_perplexity
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.rows import TableRow, has_only_times, join_runs
from reefknot.lab.reports.sentences import summarise_rows
from reefknot.lab.reports.table import build_table
from reefknot.lab.runs.definition import format_unknown_share
from reefknot.lab.runs.loading import Result, differing_keys, flatten
from reefknot.lab.runs.result import RunResult, SavedEvaluation
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.runs.tables import frequency_rows, metrics_rows, result_rows, to_csv
from reefknot.storage.files import write_text

T = TypeVar("T")

_FOLDER = Path(__file__).parent
_CURVE_COLUMNS = ("recipe", "row", "seed", "kind", "step", "epoch", "nll", "perplexity", "tokens", "learning_rate")
"""The columns of the curves in the page. `rk.open_run(RUN).to_pandas("metrics")` has all of them."""

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
_ANCHORS = (
    "results",
    "training",
    "frequency",
    "ends",
    "samples",
    "translations",
    "perplexity",
    "texts",
    "settings",
    "data",
)
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
    tables: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of the results atomically and return its path.

    Args:
        results: The runs to show.
        path: The file to write.
        rows: All rows of the recipe, in its order, whether they were run or not. Without it, the report shows the rows
            of the results.
        title: The heading of the page. The names of the corpora are added to it.
        sections: Additional sections, which follow the results.
        tables: Additional CSV files to offer for download, by file name.
    """
    path = Path(path)
    if path.is_dir():
        raise SettingsError(f"{path}: is a folder; use the path of a file, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_with_runs = [embedding.with_picture(row) for row in join_runs(rows or [], results)]
    write_text(path, render(rows_with_runs, title, sections, tables))
    return path


def create_environment() -> Environment:
    """Return the environment of the templates of this package. It escapes all values."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["perplexity"] = format_perplexity
    environment.filters["share"] = format_unknown_share
    return environment


def render(
    rows: Sequence[TableRow], title: str, sections: Sequence[Section] = (), tables: Mapping[str, str] | None = None
) -> str:
    """Return the page as HTML. Equal rows and sections give equal text."""
    trained = [row for row in rows if row.results]
    runs = [result for row in trained for result in row.results]
    rows_with_signs, _ = add_footnotes(rows)
    plotted = [row for row in rows_with_signs if row.results]
    table = build_table(rows)
    corpora = _unique(record.corpus for row in trained for record in row.records)
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    html = (
        create_environment()
        .get_template("page.html")
        .render(
            title=_add_corpora(title, _unique(corpus.name for corpus in corpora)),
            script=script,
            script_hash=_encode_base64(hashlib.sha256(script.encode()).digest()),
            headings=_HEADINGS,
            sections=sections,
            facts=_summarise_runs(rows, runs),
            corpora=corpora,
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
            texts=_list_other_texts(trained),
            changed=_list_differing_settings(trained),
            trained=trained,
            runs=runs,
            environments=_unique(filter(None, map(_format_environment, runs))),
            settings=[(row.name, _format_json(row.results[0].settings)) for row in trained if row.results[0].settings],
            downloads=[_Download(name, csv) for name, csv in {**_list_tables(runs), **(tables or {})}.items()],
        )
    )
    # A lone surrogate in corpus text cannot be written as UTF-8.
    return html.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class _Download:
    """A CSV file that is part of the page."""

    name: str
    csv: str

    @property
    def address(self) -> str:
        """The content as a `data:` address."""
        return f"data:text/csv;charset=utf-8;base64,{_encode_base64(self.csv.encode('utf-8', 'replace'))}"

    @property
    def size(self) -> str:
        return f"{self.csv.count(chr(10)) - 1:,} lines"


def _encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _list_tables(runs: Sequence[Result]) -> dict[str, str]:
    """Return the results, curves and losses by word frequency of all runs as CSV, by file name."""
    rows_by_name = {
        "results.csv": [row for run in runs for row in result_rows(run)],
        "curves.csv": [
            {column: row[column] for column in _CURVE_COLUMNS if column in row}
            for run in runs
            for row in metrics_rows(run)
        ],
        "frequency.csv": [row for run in runs for row in frequency_rows(run)],
    }
    return {name: to_csv(rows) for name, rows in rows_by_name.items() if rows}


def _add_corpora(title: str, names: Sequence[str]) -> str:
    """Return the title with the names of the corpora that it does not mention."""
    missing = [name for name in names if name.lower() not in title.lower()]
    return f"{title} · {', '.join(missing)}" if missing else title


def recipe_title(results: Sequence[Result], title: str | None = None) -> str:
    """Return the heading of a report on the runs of a recipe.

    The title of a recipe may name its text, so it is not used for runs on another text.

    Args:
        results: The runs.
        title: The title of the recipe. Without it, the title of a recipe of the package is looked up.
    """
    recipes = _unique(result.recipe for result in results if result.recipe)
    records = [result.record for result in results if result.record]
    is_changed = any(change.key == "corpus.name" for record in records for change in record.changed)
    if len(recipes) != 1:
        return "Reefknot report"
    if is_changed:
        return f"Recipe {recipes[0]}"
    if title is None and recipes[0] in list_shipped_recipes():
        path, _ = find_recipe(recipes[0])
        title = read_recipe_file(path, recipes[0]).title
    return title or f"Recipe {recipes[0]}"


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


def _list_other_texts(trained: Sequence[TableRow]) -> list[tuple[str, int, str, TextScore]]:
    """Return the row, the seed, the mode and the score of each saved evaluation of another text."""
    entries = []
    for row in trained:
        for result in row.results:
            for evaluation in result.texts.values():
                if evaluation.other:
                    entries.append((row.name, result.seed, evaluation.kind, evaluation.other))
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
