"""Recipes: a base of settings and named rows that differ from it, read from TOML and checked strictly.

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

from reefknot.errors import SettingsError, shortened
from reefknot.lab.config.overrides import merge, override
from reefknot.lab.config.settings import Mistake, complaint, not_too_deep
from reefknot.lab.recipes.file import RecipeFile, find_recipe, read_file, setting
from reefknot.lab.recipes.file import Row as Row
from reefknot.lab.runs.changes import Change, find_changes
from reefknot.lab.tasks import build_model, load_task, validate_experiment
from reefknot.lab.tasks.contract import Experiment

MODEL = ("corpus", "vocabulary", "tables", "projections", "source", "input", "encoder", "output", "skip_gram")
"""Sections of an experiment that determine the number of parameters."""
ROWS_LISTED = 6
"""Error messages list the rows of a recipe if there are at most this many."""
WITHOUT_EFFECT = ("training.seed", "training.log_every", "training.save_every", "training.keep")
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
    """The settings of each row that overrides changed, except those in `WITHOUT_EFFECT`."""

    def build(self, row: Row, words: Any) -> Any:
        """Build the model of a row; see `tasks.build_model`."""
        with self.naming(row):
            return build_model(self.experiments[row.name], words)

    def experiment(self, row: Row, task: str, advice: str) -> Experiment:
        """Return the experiment of a row, or raise an error with advice if it belongs to another task."""
        experiment = self.experiments[row.name]
        if experiment.task != task:
            noun = load_task(experiment.task).noun
            raise SettingsError(f'{self.given_name}, row "{row.name}" trains {noun}; {advice}')
        return experiment

    @contextmanager
    def naming(self, row: Row) -> Iterator[None]:
        """Add the recipe and the row to the message of a `SettingsError` that building a model raises."""
        try:
            yield
        except SettingsError as error:
            raise SettingsError(f'{self.given_name}, row "{row.name}": {error}') from error

    def row(self, name: str | None) -> Row:
        """Return the trained row with this name, ignoring case; without a name, the only trained row."""
        return _choose(self.rows, name, self.given_name)


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
    path, known_as = find_recipe(name)
    file, overrides = read_file(path, name), tuple(overrides)
    if row is None:
        rows = list(file.rows)
    elif isinstance(row, str):
        rows = [_choose(file.rows, row, name)]
    else:
        rows = _matching(file.rows, row, name, trained=alone)
        rows = rows if alone else _with_needed(file, rows, overrides)
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[Change]] = {}
    mistakes: list[Mistake] = []
    for number, chosen in enumerate(rows):
        if not chosen.trained:
            continue
        where = f'{name}, row "{chosen.name}"'
        with not_too_deep(where):
            plain = merge(file.base, chosen.set)
            settings = override(plain, overrides)
            experiment = validate_experiment(settings, where)
            if isinstance(experiment, list):
                mistakes += experiment
                continue
            experiments[chosen.name] = experiment
            changed[chosen.name] = _changes(plain, settings, experiment) if overrides else []
        if any(change.section in MODEL for change in changed[chosen.name]):
            # The paper's number of parameters may be wrong for the changed model, so it is not checked.
            rows[number] = chosen.model_copy(update={"parameters": None})
    if mistakes:
        raise complaint(mistakes)
    _check_starts(file, experiments, name)
    owner = file.extends or known_as
    return Recipe(owner, name, file.title, file.paper, tuple(rows), experiments, overrides, changed)


def _check_starts(file: RecipeFile, experiments: Mapping[str, Experiment], where: str) -> None:
    """Check rows that start from another row: that row is trained, the chain of rows ends, and the shapes agree."""
    starts = {
        row.name: setting(merge(file.base, row.set), "training", "start", "row") for row in file.rows if row.trained
    }
    starts |= {name: experiment.start for name, experiment in experiments.items()}
    messages = []
    for name, experiment in experiments.items():
        chain = [name]
        while (start := starts.get(chain[-1])) and start not in chain:
            chain.append(start)
        if len(chain) > 1 and chain[1] not in starts:
            names = ", ".join(f'"{row}"' for row in starts)
            error = f'no trained row is called "{shortened(chain[1])}"; there are: {names}'
        elif start:
            error = "a row cannot start from its own weights: " + " <- ".join(f'"{row}"' for row in (*chain, start))
        elif (
            len(chain) > 1 and chain[1] in experiments and (differing := _mismatches(experiment, experiments[chain[1]]))
        ):
            error = f'row "{chain[1]}" has another model; these parameters differ: {", ".join(differing[:5])}'
        else:
            continue
        messages.append(f'{where}, row "{name}":\n  training.start.row: {error}')
    if messages:
        raise SettingsError("\n".join(messages))


def _mismatches(one: Experiment, other: Experiment) -> list[str]:
    """Return the names of parameters that differ in shape or that only one model has.

    The list is empty if a model cannot be built. Both models are built for the vocabulary of a large text, on the meta
    device, which needs no memory.
    """
    try:
        with torch.device("meta"):
            first, second = (dict(build_model(experiment, 300_000).named_parameters()) for experiment in (one, other))
    except SettingsError:
        return []  # this error is reported when the model is built for its vocabulary
    reshaped = [name for name in first.keys() & second.keys() if first[name].shape != second[name].shape]
    return sorted([*reshaped, *(first.keys() ^ second.keys())])


def _changes(plain: Mapping[str, Any], settings: Mapping[str, Any], after: Experiment) -> list[Change]:
    """Return the settings that overrides changed.

    Complete experiments with all defaults are compared. If the row is not valid without the overrides, the settings are
    compared as they are written.
    """
    before = validate_experiment(plain, "")
    if not isinstance(before, list):
        changes = find_changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    else:
        changes = find_changes(_as_json(plain), _as_json(settings))
    return [change for change in changes if change.key not in WITHOUT_EFFECT]


def _as_json(raw: Any) -> Any:
    """Return unchecked settings as JSON. TOML has values that JSON does not have, such as dates."""
    if isinstance(raw, Mapping):
        return {name: _as_json(value) for name, value in raw.items()}
    try:
        json.dumps(raw, allow_nan=False)
    except (TypeError, ValueError):
        return "not a valid value"
    return raw


def _choose(rows: Iterable[Row], name: str | None, recipe: str) -> Row:
    """Return the trained row with this name, ignoring case; without a name, the only trained row."""
    rows = list(rows)
    trained = [row for row in rows if row.trained]
    if name is None and len(trained) == 1:
        return trained[0]
    if name is None:
        raise SettingsError(f"{recipe}: choose a row with --row; {_available(trained, recipe)}")
    chosen = next((row for row in rows if name.lower() in (row.name.lower(), row.slug)), None)
    if chosen is None:
        names = {row.name.lower(): row.name for row in trained}
        near = get_close_matches(name[:100].lower(), names, n=1)
        hint = f'did you mean "{names[near[0]]}"?' if near else _available(trained, recipe)
        raise SettingsError(f'{recipe}: no row "{shortened(name)}"; {hint}')
    if not chosen.trained:
        evaluated = f'evaluates the model of row "{chosen.of}"; train that row'
        reason = evaluated if chosen.of else "is quoted from another paper: there is nothing to train"
        raise SettingsError(f'{recipe}: row "{chosen.name}" {reason}')
    return chosen


def _available(rows: list[Row], recipe: str) -> str:
    """Return the part of an error message that names the rows, or the command that lists them."""
    if len(rows) > ROWS_LISTED:
        return f"`reefknot ls {recipe}` lists the {len(rows)} rows"
    return "there are: " + ", ".join(f'"{row.name}"' for row in rows)


def _matching(rows: Sequence[Row], patterns: Iterable[str], recipe: str, trained: bool) -> list[Row]:
    """Return the rows that match any pattern, in the order of the patterns; only trained rows if `trained`."""
    chosen: dict[str, Row] = {}
    for pattern in patterns:
        expression = re.compile(re.escape(pattern.lower()).replace(r"\*", ".*"))
        matches = [row for row in rows if expression.fullmatch(row.name.lower()) and (row.trained or not trained)]
        if "*" not in pattern:
            matches = [_choose(rows, pattern, recipe)]
        elif all(row.quoted for row in matches):
            available = _available([row for row in rows if row.trained], recipe)
            raise SettingsError(f'{recipe}: no row to train matches "{shortened(pattern)}"; {available}')
        chosen |= {row.name: row for row in matches}
    return list(chosen.values())


def _with_needed(file: RecipeFile, chosen_rows: Iterable[Row], overrides: tuple[str, ...]) -> list[Row]:
    """Return the chosen rows and the rows whose weights they need, in the order of the recipe."""
    rows = {row.name: row for row in file.rows}
    chosen = [row.name for row in chosen_rows]
    for name in chosen:  # the loop appends to this list, so it also visits the rows that it adds
        settings = override(merge(file.base, rows[name].set), overrides) if rows[name].trained else {}
        needed = rows[name].of or setting(settings, "training", "start", "row")
        if needed in rows and needed not in chosen:
            chosen.append(needed)
    return [row for row in file.rows if row.name in chosen]


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Return the default folder of a row's run. `root` is the folder of all runs of the recipe."""
    return (root or Path("runs") / recipe.name) / row.slug / f"seed{seed}"
