"""Recipes: a base of settings and named rows that differ from it, read from TOML and checked strictly.

    reefknot validate RECIPE        check one without running it
    reefknot ls                     the recipes that are shipped

An experiment is one row with the base and any `key=value` overrides merged in: everything that a run depends on. What a
row or an override sets is laid over the base. A table that states its `kind` replaces the one of that name, because its
settings are other settings; the value "default" takes a setting of the base away. An override that names a kind alone,
encoder.kind=gru, keeps those settings of the old part that the new one has too (see `lab/config/overrides.py`).
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
from reefknot.lab.runs.changes import Change, differences
from reefknot.lab.tasks import build_model, load_task, validate_experiment
from reefknot.lab.tasks.contract import Experiment

MODEL = ("corpus", "vocabulary", "tables", "projections", "source", "input", "encoder", "output", "skip_gram")
"""Sections of an experiment that decide how many parameters there are."""
ROWS_LISTED = 6
"""Rows that a sentence names; of more, it says where they are listed."""
WITHOUT_EFFECT = ("training.seed", "training.log_every", "training.save_every", "training.keep")
"""Settings that make no experiment another one."""


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked: each of these rows can be built."""

    name: str
    """Under which its runs lie: that of another recipe where it is a part of one."""
    asked: str
    """What the user called it: its name, or the path of its file."""
    title: str
    paper: str | None
    rows: tuple[Row, ...]
    experiments: Mapping[str, Experiment]
    """One per row that can be trained."""
    overrides: tuple[str, ...]
    changed: Mapping[str, list[Change]]
    """What the overrides changed in each row, but for settings without effect on its figures."""

    def build(self, row: Row, words: Any) -> Any:
        """Build the model of a row; see `tasks.build_model`."""
        with self.naming(row):
            return build_model(self.experiments[row.name], words)

    def experiment(self, row: Row, task: str, advice: str) -> Experiment:
        """Return the experiment of a row, or raise an error with advice if it belongs to another task."""
        experiment = self.experiments[row.name]
        if experiment.task != task:
            noun = load_task(experiment.task).noun
            raise SettingsError(f'{self.asked}, row "{row.name}" trains {noun}; {advice}')
        return experiment

    @contextmanager
    def naming(self, row: Row) -> Iterator[None]:
        """A mistake that only building finds says which row it is in."""
        try:
            yield
        except SettingsError as error:
            raise SettingsError(f'{self.asked}, row "{row.name}": {error}') from error

    def row(self, name: str | None) -> Row:
        """The row called `name`, in any case; without a name, the only one there is."""
        return _choose(self.rows, name, self.asked)


def load_recipe(
    name: str, overrides: Iterable[str] = (), row: str | Collection[str] | None = None, *, alone: bool = False
) -> Recipe:
    """Read a recipe by its shipped name or its path, with `key=value` overrides.

    Only the chosen rows are checked, because an override may suit one row and not another.

    Args:
        name: name of a shipped recipe, or the path of a TOML file.
        overrides: settings to change, as `key=value`.
        row: the name of one row, or several names in which * stands for anything; by default all rows.
        alone: with several names, return the trained rows in the order of the names, without the rows that they start
            from.
    """
    path, known_as = find_recipe(name)
    parsed, changes = read_file(path, name), tuple(overrides)
    if row is None:
        rows = list(parsed.rows)
    elif isinstance(row, str):
        rows = [_choose(parsed.rows, row, name)]
    else:
        rows = _fitting(parsed.rows, row, name, trained=alone)
        rows = rows if alone else _with_needed(parsed, rows, changes)
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[Change]] = {}
    mistakes: list[Mistake] = []
    for number, each in enumerate(rows):
        if not each.trained:
            continue
        where = f'{name}, row "{each.name}"'
        with not_too_deep(where):
            plain = merge(parsed.base, each.set)
            wanted = override(plain, changes)
            found = validate_experiment(wanted, where)
            if isinstance(found, list):
                mistakes += found
                continue
            experiments[each.name] = found
            changed[each.name] = _changes(plain, wanted, found) if changes else []
        if any(change.section in MODEL for change in changed[each.name]):
            # The paper's number may not hold any more.
            rows[number] = each.model_copy(update={"parameters": None})
    if mistakes:
        raise complaint(mistakes)
    _check_starts(parsed, experiments, name)
    belongs_to = parsed.extends or known_as
    return Recipe(belongs_to, name, parsed.title, parsed.paper, tuple(rows), experiments, changes, changed)


def _check_starts(file: RecipeFile, experiments: Mapping[str, Experiment], where: str) -> None:
    """Check rows that start from another row: that row is trained, the chain of rows ends, and the shapes agree."""
    starts = {
        row.name: setting(merge(file.base, row.set), "training", "start", "row") for row in file.rows if row.trained
    }
    starts |= {name: each.start for name, each in experiments.items()}
    wrong = []
    for name, experiment in experiments.items():
        way = [name]
        while (start := starts.get(way[-1])) and start not in way:
            way.append(start)
        if len(way) > 1 and way[1] not in starts:
            fault = f'no row "{shortened(way[1])}" can be trained; there are: ' + ", ".join(
                f'"{row}"' for row in starts
            )
        elif start:
            fault = "no row can begin with its own weights: " + " <- ".join(f'"{row}"' for row in (*way, start))
        elif len(way) > 1 and way[1] in experiments and (odd := _misfits(experiment, experiments[way[1]])):
            fault = f'row "{way[1]}" has another model: {", ".join(odd[:5])} do not fit'
        else:
            continue
        wrong.append(f'{where}, row "{name}":\n  training.start.row: {fault}')
    if wrong:
        raise SettingsError("\n".join(wrong))


def _misfits(one: Experiment, other: Experiment) -> list[str]:
    """Parameters that two models do not share, with as many words as a large text; none where one cannot be built."""
    try:
        with torch.device("meta"):
            first, second = (dict(build_model(each, 300_000).named_parameters()) for each in (one, other))
    except SettingsError:
        return []  # told where the model is built for its own words
    odd = [name for name in first.keys() & second.keys() if first[name].shape != second[name].shape]
    return sorted([*odd, *(first.keys() ^ second.keys())])


def _changes(plain: Mapping[str, Any], wanted: Mapping[str, Any], after: Experiment) -> list[Change]:
    """What overrides have changed: of the experiment, or, where there is none without them, of what the recipe says."""
    before = validate_experiment(plain, "")
    if not isinstance(before, list):
        found = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    else:
        found = differences(_as_json(plain), _as_json(wanted))
    return [change for change in found if change.key not in WITHOUT_EFFECT]


def _as_json(raw: Any) -> Any:
    """Settings that may be wrong; TOML has values that JSON has not."""
    if isinstance(raw, Mapping):
        return {name: _as_json(value) for name, value in raw.items()}
    try:
        json.dumps(raw, allow_nan=False)
    except (TypeError, ValueError):
        return "no value of a setting"
    return raw


def _choose(rows: Iterable[Row], name: str | None, recipe: str) -> Row:
    """The trained row called `name`, in any case; without a name, the only one there is."""
    rows = list(rows)
    trained = [row for row in rows if row.trained]
    if name is None and len(trained) == 1:
        return trained[0]
    if name is None:
        raise SettingsError(f"{recipe}: say which row with --row; {_there_are(trained, recipe)}")
    found = next((row for row in rows if name.lower() in (row.name.lower(), row.slug)), None)
    if found is None:
        names = {row.name.lower(): row.name for row in trained}
        near = get_close_matches(name[:100].lower(), names, n=1)
        hint = f'did you mean "{names[near[0]]}"?' if near else _there_are(trained, recipe)
        raise SettingsError(f'{recipe}: no row "{shortened(name)}"; {hint}')
    if not found.trained:
        why = (
            f'scores the model of row "{found.of}"; train that' if found.of else "is quoted: there is nothing to train"
        )
        raise SettingsError(f'{recipe}: row "{found.name}" {why}')
    return found


def _there_are(rows: list[Row], recipe: str) -> str:
    if len(rows) > ROWS_LISTED:
        return f"`reefknot ls {recipe}` lists the {len(rows)} that there are"
    return "there are: " + ", ".join(f'"{row.name}"' for row in rows)


def _fitting(rows: Sequence[Row], patterns: Iterable[str], recipe: str, trained: bool) -> list[Row]:
    """The rows that any pattern fits, or only the trained ones, in the order of the patterns."""
    chosen: dict[str, Row] = {}
    for pattern in patterns:
        fits = re.compile(re.escape(pattern.lower()).replace(r"\*", ".*"))
        found = [row for row in rows if fits.fullmatch(row.name.lower()) and (row.trained or not trained)]
        if "*" not in pattern:
            found = [_choose(rows, pattern, recipe)]
        elif all(row.quoted for row in found):
            there = _there_are([row for row in rows if row.trained], recipe)
            raise SettingsError(f'{recipe}: no row to train fits "{shortened(pattern)}"; {there}')
        chosen |= {row.name: row for row in found}
    return list(chosen.values())


def _with_needed(file: RecipeFile, some: Iterable[Row], overrides: tuple[str, ...]) -> list[Row]:
    """Some rows and those whose weights they need, in the recipe's order."""
    rows = {row.name: row for row in file.rows}
    chosen = [row.name for row in some]
    for name in chosen:  # which grows meanwhile
        settings = override(merge(file.base, rows[name].set), overrides) if rows[name].trained else {}
        needed = rows[name].of or setting(settings, "training", "start", "row")
        if needed in rows and needed not in chosen:
            chosen.append(needed)
    return [row for row in file.rows if row.name in chosen]


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Return the default folder of a row's run. `root` is the folder of all runs of the recipe."""
    return (root or Path("runs") / recipe.name) / row.slug / f"seed{seed}"
