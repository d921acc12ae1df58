"""Loads a recipe: checks the settings of its rows, with overrides, and turns each trained row into an experiment.

`load_recipe` is the entry point; it returns a `Recipe`. A recipe is a TOML file with base settings and named rows that
differ from the base (`file.py` describes the format). On the command line:

    reefknot validate RECIPE        check a recipe without training
    reefknot ls                     list the shipped recipes

An experiment is everything that a run depends on. Its settings are those of the base, changed by the settings of the
row and then by `key=value` overrides. A TOML table with a `kind` replaces the whole table of the base, because every
kind has its own settings. The value "default" removes a setting of the base. An override that sets only a kind, such as
encoder.kind=gru, keeps the settings that the old and the new part have in common (see `lab/config/overrides.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from reefknot.errors import SettingsError, shorten
from reefknot.lab.config.overrides import merge, override
from reefknot.lab.config.settings import Mistake, build_settings_error, reject_deep_nesting
from reefknot.lab.recipes.file import RecipeFile, find_recipe, get_string, read_recipe_file
from reefknot.lab.recipes.file import Row as Row
from reefknot.lab.runs.changes import Change, find_changes
from reefknot.lab.tasks import build_model, load_task, validate_experiment
from reefknot.lab.tasks.contract import Experiment

MODEL_SECTIONS = ("corpus", "vocabulary", "tables", "projections", "source", "input", "encoder", "output", "skip_gram")
"""Sections of an experiment that determine the number of parameters."""
MAX_ROWS_LISTED = 6
"""Error messages list the rows of a recipe only if there are at most this many."""
META_VOCAB_SIZE = 300_000
"""Vocabulary size of models that are built only to compare the shapes of their parameters."""
IGNORED_SETTINGS = ("training.seed", "training.log_every", "training.save_every", "training.keep")
"""Settings that can change without making the experiment a different one."""


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked, with the requested rows."""

    name: str
    """The folder name of its runs. A recipe that selects rows of another recipe has the name of that recipe."""
    given_name: str
    """The name or path that the user gave."""
    title: str
    paper: str | None
    rows: tuple[Row, ...]
    experiments: Mapping[str, Experiment]
    """The experiment of every trained row, by name."""
    overrides: tuple[str, ...]
    changed: Mapping[str, list[Change]]
    """The settings of each row that overrides changed, except those in `IGNORED_SETTINGS`."""

    def build(self, row: Row, words: Any) -> Any:
        """Build the model of a row; see `tasks.build_model`."""
        with self.add_row_to_errors(row):
            return build_model(self.experiments[row.name], words)

    def experiment(self, row: Row, task: str, advice: str) -> Experiment:
        """Return the experiment of a row, or raise an error with advice if it belongs to another task."""
        experiment = self.experiments[row.name]
        if experiment.task != task:
            noun = load_task(experiment.task).noun
            raise SettingsError(f'{self.given_name}, row "{row.name}" trains {noun}; {advice}')
        return experiment

    @contextmanager
    def add_row_to_errors(self, row: Row) -> Iterator[None]:
        """Add the recipe and the row to the message of a `SettingsError` that building a model raises."""
        try:
            yield
        except SettingsError as error:
            raise SettingsError(f'{self.given_name}, row "{row.name}": {error}') from error

    def row(self, name: str | None) -> Row:
        """Return the trained row with this name, ignoring case; without a name, the only trained row."""
        return _choose_row(self.rows, name, self.given_name)


def load_recipe(
    name: str, overrides: Iterable[str] = (), row: str | Collection[str] | None = None, *, alone: bool = False
) -> Recipe:
    """Read a recipe by its shipped name or its path, with `key=value` overrides.

    Only the chosen rows are checked, because an override may suit one row and not another.

    Args:
        name: Name of a shipped recipe, or the path of a TOML file.
        overrides: Settings to change, as `key=value`.
        row: Name of one row, or a list of names in which * matches anything. By default, all rows are returned.
        alone: With a list of names, return the trained rows in the order of the names, without the rows that they
            start from.
    """
    path, recipe_name = find_recipe(name)
    file, overrides = read_recipe_file(path, name), tuple(overrides)
    rows = _select_rows(file, row, name, overrides, alone=alone)
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[Change]] = {}
    mistakes: list[Mistake] = []
    for index, chosen in enumerate(rows):
        if not chosen.trained:
            continue
        source = f'{name}, row "{chosen.name}"'
        with reject_deep_nesting(source):
            row_settings = merge(file.base, chosen.set)
            settings = override(row_settings, overrides)
            experiment = validate_experiment(settings, source)
            if isinstance(experiment, list):
                mistakes += experiment
                continue
            experiments[chosen.name] = experiment
            changed[chosen.name] = _list_changes(row_settings, settings, experiment) if overrides else []
        if any(change.section in MODEL_SECTIONS for change in changed[chosen.name]):
            # The paper's number of parameters may be wrong for the changed model, so it is not checked.
            rows[index] = chosen.model_copy(update={"parameters": None})
    if mistakes:
        raise build_settings_error(mistakes)
    _check_starts(file, experiments, name)
    return Recipe(
        name=file.extends or recipe_name,
        given_name=name,
        title=file.title,
        paper=file.paper,
        rows=tuple(rows),
        experiments=experiments,
        overrides=overrides,
        changed=changed,
    )


def _select_rows(
    file: RecipeFile, names: str | Collection[str] | None, recipe: str, overrides: tuple[str, ...], *, alone: bool
) -> list[Row]:
    """Return the rows that were asked for: all rows, the row with this name, or the rows that match a list of names."""
    if names is None:
        return list(file.rows)
    if isinstance(names, str):
        return [_choose_row(file.rows, names, recipe)]
    rows = _match_rows(file.rows, names, recipe, only_trained=alone)
    return rows if alone else _add_needed_rows(file, rows, overrides)


def _check_starts(file: RecipeFile, experiments: Mapping[str, Experiment], recipe: str) -> None:
    """Check rows that start from another row: that row is trained, the chain of rows ends, and the shapes agree."""
    starts: dict[str, str | None] = {}  # for each trained row, the row that it starts from
    for row in file.rows:
        if row.trained:
            starts[row.name] = get_string(merge(file.base, row.set), "training", "start", "row")
    starts |= {name: experiment.start for name, experiment in experiments.items()}
    messages = []
    for name in experiments:
        error = _find_start_error(name, starts, experiments)
        if error:
            messages.append(f'{recipe}, row "{name}":\n  training.start.row: {error}')
    if messages:
        raise SettingsError("\n".join(messages))


def _find_start_error(name: str, starts: Mapping[str, str | None], experiments: Mapping[str, Experiment]) -> str | None:
    """Return what is wrong with the rows that a row starts from, or None.

    Args:
        name: The name of the row.
        starts: For each trained row of the recipe, the row that it starts from, or None.
        experiments: The experiments of the rows that were chosen.
    """
    chain = [name]
    while (start := starts.get(chain[-1])) and start not in chain:
        chain.append(start)
    is_cycle = bool(start)
    if len(chain) > 1 and chain[1] not in starts:
        trained_names = ", ".join(f'"{trained_name}"' for trained_name in starts)
        return f'no trained row is called "{shorten(chain[1])}"; there are: {trained_names}'
    if is_cycle:
        return "a row cannot start from its own weights: " + " <- ".join(f'"{row}"' for row in (*chain, start))
    if len(chain) > 1 and chain[1] in experiments:
        mismatches = _list_mismatches(experiments[name], experiments[chain[1]])
        if mismatches:
            return f'row "{chain[1]}" has another model; these parameters differ: {", ".join(mismatches[:5])}'
    return None


def _list_mismatches(experiment: Experiment, start: Experiment) -> list[str]:
    """Return the names of parameters that differ in shape or that only one of the two models has.

    The list is empty if a model cannot be built. Both models are built for the vocabulary of a large text, on the meta
    device, which needs no memory.
    """
    try:
        with torch.device("meta"):
            parameters = dict(build_model(experiment, META_VOCAB_SIZE).named_parameters())
            start_parameters = dict(build_model(start, META_VOCAB_SIZE).named_parameters())
    except SettingsError:
        return []  # this error is reported when the model is built for its vocabulary
    common_names = parameters.keys() & start_parameters.keys()
    reshaped = [name for name in common_names if parameters[name].shape != start_parameters[name].shape]
    return sorted([*reshaped, *(parameters.keys() ^ start_parameters.keys())])


def _list_changes(row_settings: Mapping[str, Any], settings: Mapping[str, Any], experiment: Experiment) -> list[Change]:
    """Return the settings that overrides changed.

    Complete experiments with all defaults are compared. If the row is not valid without the overrides, the settings are
    compared as they are written.

    Args:
        row_settings: The settings of the row without overrides.
        settings: The settings of the row with overrides.
        experiment: The experiment that `settings` describe.
    """
    original = validate_experiment(row_settings, "")
    if isinstance(original, list):
        changes = find_changes(_as_json(row_settings), _as_json(settings))
    else:
        changes = find_changes(original.model_dump(mode="json"), experiment.model_dump(mode="json"))
    return [change for change in changes if change.key not in IGNORED_SETTINGS]


def _as_json(raw: Any) -> Any:
    """Return unchecked settings as JSON. TOML has values that JSON does not have, such as dates."""
    if isinstance(raw, Mapping):
        return {name: _as_json(value) for name, value in raw.items()}
    try:
        json.dumps(raw, allow_nan=False)
    except (TypeError, ValueError):
        return "not a valid value"
    return raw


def _choose_row(rows: Iterable[Row], name: str | None, recipe: str) -> Row:
    """Return the trained row with this name, ignoring case; without a name, the only trained row."""
    rows = list(rows)
    trained_rows = [row for row in rows if row.trained]
    if name is None and len(trained_rows) == 1:
        return trained_rows[0]
    if name is None:
        raise SettingsError(f"{recipe}: choose a row with --row; {_format_available(trained_rows, recipe)}")
    chosen = next((row for row in rows if name.lower() in (row.name.lower(), row.slug)), None)
    if chosen is None:
        names = {row.name.lower(): row.name for row in trained_rows}
        matches = get_close_matches(name[:100].lower(), names, n=1)
        hint = f'did you mean "{names[matches[0]]}"?' if matches else _format_available(trained_rows, recipe)
        raise SettingsError(f'{recipe}: no row "{shorten(name)}"; {hint}')
    if chosen.of:
        raise SettingsError(f'{recipe}: row "{chosen.name}" evaluates the model of row "{chosen.of}"; train that row')
    if not chosen.trained:
        raise SettingsError(f'{recipe}: row "{chosen.name}" is quoted from another paper: there is nothing to train')
    return chosen


def _format_available(rows: list[Row], recipe: str) -> str:
    """Return the part of an error message that names the rows, or the command that lists them."""
    if len(rows) > MAX_ROWS_LISTED:
        return f"`reefknot ls {recipe}` lists the {len(rows)} rows"
    return "there are: " + ", ".join(f'"{row.name}"' for row in rows)


def _match_rows(rows: Sequence[Row], patterns: Iterable[str], recipe: str, *, only_trained: bool) -> list[Row]:
    """Return the rows that match any pattern, in the order of the patterns. In a pattern, * matches anything."""
    chosen: dict[str, Row] = {}
    for pattern in patterns:
        if "*" not in pattern:
            row = _choose_row(rows, pattern, recipe)
            chosen[row.name] = row
            continue
        expression = re.compile(re.escape(pattern.lower()).replace(r"\*", ".*"))
        matches = [row for row in rows if expression.fullmatch(row.name.lower()) and (row.trained or not only_trained)]
        if all(row.quoted for row in matches):
            available = _format_available([row for row in rows if row.trained], recipe)
            raise SettingsError(f'{recipe}: no row to train matches "{shorten(pattern)}"; {available}')
        chosen |= {row.name: row for row in matches}
    return list(chosen.values())


def _add_needed_rows(file: RecipeFile, chosen_rows: Iterable[Row], overrides: tuple[str, ...]) -> list[Row]:
    """Return the chosen rows and the rows whose weights they need, in the order of the recipe."""
    row_by_name = {row.name: row for row in file.rows}
    names = [row.name for row in chosen_rows]
    for name in names:  # the loop appends to this list, so it also visits the rows that it adds
        row = row_by_name[name]
        settings = override(merge(file.base, row.set), overrides) if row.trained else {}
        needed_name = row.of or get_string(settings, "training", "start", "row")
        if needed_name in row_by_name and needed_name not in names:
            names.append(needed_name)
    return [row for row in file.rows if row.name in names]


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Return the default folder of a row's run. `root` is the folder of all runs of the recipe."""
    return (root or Path("runs") / recipe.name) / row.slug / f"seed{seed}"
