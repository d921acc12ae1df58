"""Loads a recipe: checks the settings of its rows, with overrides, and turns each trained row into an experiment.

A recipe is a TOML file with base settings and named rows that differ from the base (`file.py` describes the format).

    recipe = load_recipe("press2017/table6", overrides=["training.epochs=3"])
    row = recipe.row("Small + WT")
    experiment = recipe.experiments[row.name]       # the checked settings of the row

The settings of an experiment are the base settings, changed by the settings of the row and then by the overrides.
`lab/config/overrides.py` describes how settings are merged. `lab/experiment.py` trains a row.
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
from reefknot.lab.config.overrides import apply_overrides, merge_settings
from reefknot.lab.config.settings import Mistake, build_settings_error, reject_deep_nesting
from reefknot.lab.recipes.file import RecipeFile, find_recipe, get_string, read_recipe_file
from reefknot.lab.recipes.file import Row as Row
from reefknot.lab.runs.changes import Change, find_changes
from reefknot.lab.tasks import build_model, load_task, validate_experiment
from reefknot.lab.tasks.contract import Experiment

MODEL_SECTIONS = ("corpus", "vocabulary", "tables", "projections", "source", "input", "encoder", "output", "skip_gram")
"""Sections of an experiment that determine the number of parameters."""
MAX_LISTED_ROWS = 6
"""Error messages list the rows of a recipe only if there are at most this many."""
META_VOCAB_SIZE = 300_000
"""Vocabulary size of models that are built only to compare the shapes of their parameters."""
IGNORED_SETTINGS = ("training.seed", "training.log_every", "training.save_every", "training.keep")
"""Settings that can change without making the experiment a different one."""


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked, with the requested rows."""

    name: str
    """The folder name of its runs. If a recipe selects rows of another recipe, this is the name of the other recipe."""
    given_name: str
    """The name or path that the user gave."""
    title: str
    paper: str | None
    """The short name of the paper, such as press2017."""
    rows: tuple[Row, ...]
    experiments: Mapping[str, Experiment]
    """The experiment of every trained row, by name."""
    overrides: tuple[str, ...]
    """The overrides that the experiments include, as `key=value`."""
    changed: Mapping[str, list[Change]]
    """For each trained row, the settings that overrides changed, except those in `IGNORED_SETTINGS`."""

    def build(self, row: Row, vocabulary: Any) -> Any:
        """Build the model of a row.

        Args:
            row: A trained row.
            vocabulary: A vocabulary, the `VocabularyPair` of parallel text, or just the number of words.
        """
        with self.add_row_to_errors(row):
            return build_model(self.experiments[row.name], vocabulary)

    def experiment(self, row: Row, task: str, advice: str) -> Experiment:
        """Return the experiment of a row, or raise an error with advice if it belongs to another task.

        Args:
            row: A trained row.
            task: The required task, such as "language_model".
            advice: What the user can do instead, for the error message.
        """
        experiment = self.experiments[row.name]
        if experiment.task != task:
            trained_thing = load_task(experiment.task).noun  # such as "a translator"
            raise SettingsError(f'{self.given_name}, row "{row.name}" trains {trained_thing}; {advice}')
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
    recipe_file = read_recipe_file(path, name)
    overrides = tuple(overrides)
    rows = _select_rows(recipe_file, row, name, overrides, alone=alone)

    # Check the settings of all rows before an error is raised, so that it lists all mistakes.
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[Change]] = {}
    mistakes: list[Mistake] = []
    for index, selected_row in enumerate(rows):
        if not selected_row.trained:
            continue
        source = f'{name}, row "{selected_row.name}"'
        with reject_deep_nesting(source):
            row_settings = merge_settings(recipe_file.base, selected_row.set)
            settings = apply_overrides(row_settings, overrides)
            experiment = validate_experiment(settings, source)
            if isinstance(experiment, list):
                mistakes += experiment
                continue
            changes = _list_changes(row_settings, settings, experiment) if overrides else []
        experiments[selected_row.name] = experiment
        changed[selected_row.name] = changes
        if any(change.section in MODEL_SECTIONS for change in changes):
            # The paper's number of parameters may be wrong for the changed model, so it is not checked.
            rows[index] = selected_row.model_copy(update={"parameters": None})
    if mistakes:
        raise build_settings_error(mistakes)

    _check_starts(recipe_file, experiments, name)
    return Recipe(
        name=recipe_file.extends or recipe_name,
        given_name=name,
        title=recipe_file.title,
        paper=recipe_file.paper,
        rows=tuple(rows),
        experiments=experiments,
        overrides=overrides,
        changed=changed,
    )


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Return the default folder of a row's run. `root` is the folder of all runs of the recipe."""
    if root is None:
        root = Path("runs") / recipe.name
    return root / row.slug / f"seed{seed}"


# -- rows that start from another row ------------------------------------------------------------------------------


def _check_starts(recipe_file: RecipeFile, experiments: Mapping[str, Experiment], recipe_name: str) -> None:
    """Check rows that start from another row: that row is trained, the chain of rows ends, and the shapes agree."""
    start_by_row: dict[str, str | None] = {}  # for each trained row, the row that it starts from
    for row in recipe_file.rows:
        if row.trained:
            settings = merge_settings(recipe_file.base, row.set)
            start_by_row[row.name] = get_string(settings, "training", "start", "row")
    for row_name, experiment in experiments.items():
        start_by_row[row_name] = experiment.start

    messages = []
    for row_name in experiments:
        error = _find_start_error(row_name, start_by_row, experiments)
        if error:
            messages.append(f'{recipe_name}, row "{row_name}":\n  training.start.row: {error}')
    if messages:
        raise SettingsError("\n".join(messages))


def _find_start_error(
    row_name: str, start_by_row: Mapping[str, str | None], experiments: Mapping[str, Experiment]
) -> str | None:
    """Return what is wrong with the rows that a row starts from, or None.

    Args:
        row_name: The name of the row.
        start_by_row: For each trained row of the recipe, the row that it starts from, or None.
        experiments: The experiments of the rows that were selected.
    """
    start_name = start_by_row.get(row_name)
    if not start_name:
        return None
    if start_name not in start_by_row:
        trained_names = ", ".join(f'"{trained_name}"' for trained_name in start_by_row)
        return f'no trained row is called "{shorten(start_name)}"; there are: {trained_names}'

    # The chain of rows must end at a row that starts from random weights.
    chain = [row_name]
    next_name: str | None = start_name
    while next_name:
        if next_name in chain:
            cycle = " <- ".join(f'"{name}"' for name in (*chain, next_name))
            return f"a row cannot start from its own weights: {cycle}"
        chain.append(next_name)
        next_name = start_by_row.get(next_name)

    if start_name in experiments:
        mismatches = _list_mismatches(experiments[row_name], experiments[start_name])
        if mismatches:
            return f'row "{start_name}" has another model; these parameters differ: {", ".join(mismatches[:5])}'
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

    names_in_both = parameters.keys() & start_parameters.keys()
    names_in_one = parameters.keys() ^ start_parameters.keys()
    reshaped_names = [name for name in names_in_both if parameters[name].shape != start_parameters[name].shape]
    return sorted([*reshaped_names, *names_in_one])


# -- changed settings ----------------------------------------------------------------------------------------------


def _list_changes(row_settings: Mapping[str, Any], settings: Mapping[str, Any], experiment: Experiment) -> list[Change]:
    """Return the settings that overrides changed.

    Complete experiments with all defaults are compared. If the row is not valid without the overrides, the settings are
    compared as they are written.

    Args:
        row_settings: The settings of the row without overrides.
        settings: The settings of the row with overrides.
        experiment: The experiment that `settings` describe.
    """
    original_experiment = validate_experiment(row_settings, "")
    if isinstance(original_experiment, list):  # a list of mistakes
        changes = find_changes(_as_json(row_settings), _as_json(settings))
    else:
        changes = find_changes(original_experiment.model_dump(mode="json"), experiment.model_dump(mode="json"))
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


# -- selecting rows ------------------------------------------------------------------------------------------------


def _select_rows(
    recipe_file: RecipeFile,
    row_names: str | Collection[str] | None,
    recipe_name: str,
    overrides: tuple[str, ...],
    *,
    alone: bool,
) -> list[Row]:
    """Return all rows, the row with this name, or the rows that match a list of names; see `load_recipe`."""
    if row_names is None:
        return list(recipe_file.rows)
    if isinstance(row_names, str):
        return [_choose_row(recipe_file.rows, row_names, recipe_name)]
    rows = _match_rows(recipe_file.rows, row_names, recipe_name, only_trained=alone)
    if alone:
        return rows
    return _add_needed_rows(recipe_file, rows, overrides)


def _choose_row(rows: Sequence[Row], row_name: str | None, recipe_name: str) -> Row:
    """Return the trained row with this name, ignoring case; without a name, the only trained row."""
    trained_rows = [row for row in rows if row.trained]
    available_rows = _format_available(trained_rows, recipe_name)
    if row_name is None:
        if len(trained_rows) == 1:
            return trained_rows[0]
        raise SettingsError(f"{recipe_name}: choose a row with --row; {available_rows}")

    for row in rows:
        if row_name.lower() not in (row.name.lower(), row.slug):
            continue
        if row.of:
            raise SettingsError(
                f'{recipe_name}: row "{row.name}" evaluates the model of row "{row.of}"; train that row'
            )
        if not row.trained:
            raise SettingsError(
                f'{recipe_name}: row "{row.name}" is quoted from another paper: there is nothing to train'
            )
        return row

    name_by_lowercase = {row.name.lower(): row.name for row in trained_rows}
    similar_names = get_close_matches(row_name[:100].lower(), name_by_lowercase, n=1)
    hint = available_rows
    if similar_names:
        hint = f'did you mean "{name_by_lowercase[similar_names[0]]}"?'
    raise SettingsError(f'{recipe_name}: no row "{shorten(row_name)}"; {hint}')


def _format_available(rows: list[Row], recipe_name: str) -> str:
    """Return the part of an error message that names the rows, or the command that lists them."""
    if len(rows) > MAX_LISTED_ROWS:
        return f"`reefknot ls {recipe_name}` lists the {len(rows)} rows"
    return "there are: " + ", ".join(f'"{row.name}"' for row in rows)


def _match_rows(rows: Sequence[Row], patterns: Iterable[str], recipe_name: str, *, only_trained: bool) -> list[Row]:
    """Return the rows that match any pattern, in the order of the patterns. In a pattern, * matches anything."""
    row_by_name: dict[str, Row] = {}  # the rows that match
    trained_rows = [row for row in rows if row.trained]
    for pattern in patterns:
        if "*" not in pattern:
            row = _choose_row(rows, pattern, recipe_name)
            row_by_name[row.name] = row
            continue
        candidates = trained_rows if only_trained else rows
        expression = re.compile(re.escape(pattern.lower()).replace(r"\*", ".*"))
        matches = [row for row in candidates if expression.fullmatch(row.name.lower())]
        if all(row.quoted for row in matches):
            available_rows = _format_available(trained_rows, recipe_name)
            raise SettingsError(f'{recipe_name}: no row to train matches "{shorten(pattern)}"; {available_rows}')
        for row in matches:
            row_by_name[row.name] = row
    return list(row_by_name.values())


def _add_needed_rows(recipe_file: RecipeFile, selected_rows: Iterable[Row], overrides: tuple[str, ...]) -> list[Row]:
    """Return the selected rows and the rows whose weights they need, in the order of the recipe."""
    row_by_name = {row.name: row for row in recipe_file.rows}
    names = [row.name for row in selected_rows]
    for name in names:  # the loop appends to this list, so it also visits the rows that it adds
        row = row_by_name[name]
        needed_name = row.of
        if row.trained:
            settings = apply_overrides(merge_settings(recipe_file.base, row.set), overrides)
            needed_name = get_string(settings, "training", "start", "row")
        if needed_name in row_by_name and needed_name not in names:
            names.append(needed_name)
    return [row for row in recipe_file.rows if row.name in names]
