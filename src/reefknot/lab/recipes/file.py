"""Reads and checks recipe files. A recipe is a TOML file with the experiments of a paper's table.

    title = "A small and a large LSTM"

    [base.encoder]                  # the settings in `base` apply to all rows
    kind = "lstm"
    hidden_dim = 200

    [[rows]]                        # a row of the paper's table is one experiment
    name = "small"

    [[rows]]
    name = "large"
    set.encoder.hidden_dim = 1500   # `set` changes settings of the base

`find_recipe` finds the file of a recipe by name, and `read_recipe_file` reads it as a `RecipeFile`. `Row` describes
the kinds of rows. `recipe.py` turns the rows into experiments.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from reefknot.errors import SettingsError, find_similar_name, shorten
from reefknot.lab.config.settings import OneLine, Positive, Settings, check_settings
from reefknot.lab.config.upgrade import upgrade_settings, warn_renamed
from reefknot.lab.recipes.curves import CURVES_FILE, Curve, read_curves
from reefknot.lab.runs.folder import folder_name
from reefknot.lab.text.corpus import SPLITS

if TYPE_CHECKING:
    ScoreName = str
    EndName = str
else:
    EndName = Literal["input", "output", "tied"]
    ScoreName = Literal[(*SPLITS, "bleu_valid", "bleu_test", "seconds", "hours", "epochs")]


Correlation = Annotated[float, Field(ge=-1.0, le=1.0)]


def _check_mode_name(mode_name: str) -> str:
    """Check the name of an evaluation mode. The modes are imported here, because most recipes do not name any."""
    from reefknot.lab.runs.modes import check_mode

    return check_mode(mode_name)


class Row(Settings):
    """One row of a paper's table. There are three kinds of rows.

    * A trained row, which is the normal case. Its settings are the base settings with the changes in `set`.
    * A quoted row (`quoted = true`). The paper took its score from another paper.
    * A row that evaluates the model of another row (`of`) in another mode (`by`):

        [[rows]]
        name = "AWD-LSTM + dynamic evaluation"
        of = "AWD-LSTM"
        by = "dynamic"

    The scores of such a row come from the runs of the other row, where `reefknot evaluate RUN --dynamic --save` stores
    them. `by = "context-2560-stride-512"` stands for `reefknot evaluate RUN --context 2560 --stride 512 --save`.

    `paper` has the paper's scores, such as `paper = { valid = 120.7, test = 114.5 }`. `paper_similarity` has the
    correlations of its word vectors with human judgements, by end of the model (input or output):

        [rows.paper_similarity]
        input = { SimLex-999 = 0.30, MEN = 0.66 }
        output = { SimLex-999 = 0.29, MEN = 0.61 }

    If the authors trained for more epochs than the recipe, `paper` also has their number, such as `epochs = 1_000`.
    """

    name: Annotated[OneLine, Field(min_length=1, max_length=100, description="Name of the row in the paper.")]
    quoted: Annotated[bool, Field(description="The paper quotes this row from another paper. It is not trained.")] = (
        False
    )
    of: Annotated[OneLine | None, Field(description="Name of the trained row whose model this row evaluates.")] = None
    by: Annotated[
        Annotated[str, AfterValidator(_check_mode_name)] | None,
        Field(description="Mode of evaluation: dynamic, cache, mc, or windows such as context-2560-stride-512."),
    ] = None
    parameters: Annotated[
        int | None, Field(ge=1, le=10**12, description="Exact number of parameters. It is checked before training.")
    ] = None
    paper: dict[ScoreName, Positive] = Field(
        {},
        description="Scores in the paper: perplexity by split, BLEU, seconds per epoch, hours of training, epochs of "
        "training.",
    )
    paper_curve: Annotated[
        OneLine | None,
        Field(
            description="Column of curves.csv, a file next to the recipe, with the authors' validation perplexity "
            "after each epoch."
        ),
    ] = None
    paper_epoch: Annotated[
        Literal["best", "last"],
        Field(
            description="Epoch that the paper's scores are from: the best on the validation text, or the last. With "
            "last, the paper's training perplexity is the running perplexity of that epoch."
        ),
    ] = "best"
    paper_similarity: dict[EndName, dict[str, Correlation]] = Field(
        {}, description="Rank correlations with human judgements in the paper, by end and benchmark."
    )
    set: dict[str, Any] = Field({}, description="Settings that differ from the base.")
    _curve: Curve = PrivateAttr(())

    @field_validator("paper_similarity")
    @classmethod
    def _check_benchmarks(cls, similarity: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        from reefknot.lab.evaluation.benchmarks import BENCHMARKS

        known_benchmarks = ", ".join(BENCHMARKS)
        for correlations in similarity.values():
            for benchmark in correlations:
                if benchmark not in BENCHMARKS:
                    raise ValueError(f"unknown benchmark {shorten(benchmark)!r}; known benchmarks: {known_benchmarks}")
        return similarity

    @model_validator(mode="after")
    def _check_evaluated(self) -> Row:
        """Check that `of` and `by` are set together, and without settings of a trained row."""
        if (self.of is None) != (self.by is None):
            raise ValueError("set both of (the row whose model is evaluated) and by (the mode), or neither")
        if self.of is not None and (self.quoted or self.set or self.parameters is not None):
            raise ValueError("a row that evaluates another row's model has no settings; give it only of, by and paper")
        return self

    @property
    def curve(self) -> Curve:
        """The authors' validation perplexity after each epoch; empty if they published none."""
        return self._curve

    @property
    def trained(self) -> bool:
        """Whether this row is trained, rather than quoted or evaluated with another row's model."""
        return not self.quoted and self.of is None

    @property
    def slug(self) -> str:
        """The row's name as the name of a folder."""
        return folder_name(self.name)

    @property
    def start(self) -> str | None:
        """The name of the row to start from: training starts with its best weights."""
        return get_string(self.set, "training", "start", "row")

    @property
    def corpus(self) -> str | None:
        """The name of the row's corpus, if it differs from the base."""
        return get_string(self.set, "corpus", "name")


class RecipeFile(Settings):
    """The content of a recipe file."""

    title: OneLine
    paper: Annotated[OneLine | None, Field(description="Short name of the paper, such as press2017.")] = None
    base: dict[str, Any]
    rows: Annotated[list[Row], Field(min_length=1)]
    extends: OneLine | None = None


class Selection(Settings):
    """The content of a recipe file that selects rows of another recipe, for example the rows that a figure shows.

    The runs belong to the other recipe, so that no row is trained twice:

        extends = "inan2017/table1"
        rows = ["VD-LSTM large", "VD-LSTM+REAL large"]
    """

    title: OneLine
    paper: OneLine | None = None
    extends: Annotated[OneLine, Field(description="Recipe that has these rows and their runs.")]
    rows: Annotated[list[OneLine], Field(min_length=1)]


def read_recipe_file(path: Path, name: str) -> RecipeFile:
    """Read and check a recipe file. `name` is its name in error messages."""
    raw = _upgrade_names(_read_toml(path), name)
    if "extends" in raw:
        selection = check_settings(Selection, raw, name)
        recipe_file = _select_rows(selection, name)
    else:
        recipe_file = check_settings(RecipeFile, raw, name)
        _add_curves(recipe_file.rows, path.with_name(CURVES_FILE), name)
    _check_folders(recipe_file.rows, name)
    _check_evaluated_rows(recipe_file.rows, name)
    return recipe_file


def _select_rows(selection: Selection, name: str) -> RecipeFile:
    """Return the other recipe with only the selected rows, in the order of the selection. `name` is for messages."""
    path, extended_name = find_recipe(selection.extends)
    if "extends" in _read_toml(path):
        raise SettingsError(f"{name}: {extended_name} itself selects rows of another recipe; extend that recipe")
    extended_file = read_recipe_file(path, extended_name)

    row_by_name = {row.name: row for row in extended_file.rows}
    for row_name in selection.rows:
        if row_name not in row_by_name:
            known_names = ", ".join(f'"{known_name}"' for known_name in row_by_name)
            raise SettingsError(f'{name}: {extended_name} has no row "{shorten(row_name)}"; there are: {known_names}')

    rows = [row_by_name[row_name] for row_name in selection.rows]
    changes = {"title": selection.title, "paper": selection.paper, "rows": rows, "extends": extended_name}
    return extended_file.model_copy(update=changes)


def get_string(raw: Any, *keys: str) -> str | None:
    """Return a string inside nested settings that are not checked yet; None if it is missing or not a string.

    For example, `get_string(settings, "corpus", "name")` returns settings["corpus"]["name"].
    """
    value = raw
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value if isinstance(value, str) else None


def _check_folders(rows: Sequence[Row], recipe: str) -> None:
    """Reject two rows whose runs would be in the same folder."""
    name_by_slug: dict[str, str] = {}
    for row in rows:
        if row.slug in name_by_slug:
            other_name = name_by_slug[row.slug]
            raise SettingsError(f'{recipe}: rows "{other_name}" and "{row.name}" would share a folder; rename one')
        name_by_slug[row.slug] = row.name


def _add_curves(rows: Sequence[Row], curves_path: Path, recipe: str) -> None:
    """Read the authors' curves that the rows name. `recipe` is the name of the recipe in error messages."""
    if not any(row.paper_curve for row in rows):
        return
    curves = read_curves(curves_path)
    for row in rows:
        if row.paper_curve is None:
            continue
        if row.paper_curve not in curves:
            raise SettingsError(
                f'{recipe}, row "{row.name}":\n  paper_curve: {curves_path.name} has no column '
                f"{shorten(row.paper_curve)!r}; there are: {', '.join(curves)}"
            )
        row._curve = curves[row.paper_curve]


def _check_evaluated_rows(rows: Sequence[Row], recipe: str) -> None:
    """Reject rows that evaluate the model of a row that is missing or not trained."""
    trained_names = [row.name for row in rows if row.trained]
    for row in rows:
        if row.of is not None and row.of not in trained_names:
            names = ", ".join(f'"{name}"' for name in trained_names) or "none"
            raise SettingsError(
                f'{recipe}, row "{row.name}":\n  of: no trained row is called "{shorten(row.of)}"; there are: {names}'
            )


def _upgrade_names(raw: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Return the content of a recipe file with old names of settings replaced. Warn if there are old names."""
    upgraded = dict(raw)
    base = raw.get("base")
    if isinstance(base, Mapping):
        upgraded["base"] = upgrade_settings(base)
    rows = raw.get("rows")
    if isinstance(rows, list):
        upgraded["rows"] = [_upgrade_row(row) for row in rows]
    if upgraded != raw:
        warn_renamed(recipe)
    return upgraded


def _upgrade_row(row: Any) -> Any:
    """Return a row that is not checked yet with the current names of its settings."""
    if isinstance(row, Mapping) and isinstance(row.get("set"), Mapping):
        return {**row, "set": upgrade_settings(row["set"])}
    return row


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (OSError, RecursionError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


# -- the recipes that come with the package ------------------------------------------------------------------------

FOLDER = Path(__file__).parent
"""The folder of the shipped recipes."""


class RecipeNotFound(SettingsError):
    """The name is neither a shipped recipe nor a file."""


def list_shipped_recipes() -> dict[str, str]:
    """Return the title of every shipped recipe, by name."""
    title_by_name: dict[str, str] = {}
    for path in sorted(FOLDER.rglob("*.toml")):
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        title_by_name[_recipe_name(path)] = raw["title"]
    return title_by_name


def find_recipe(name: str) -> tuple[Path, str]:
    """Find a recipe by the name of a shipped recipe or by the path of a file.

    Returns:
        The path of the file, and the name of the recipe: the name of a shipped recipe, or the stem of the path.
    """
    path_by_name = {_recipe_name(path): path for path in FOLDER.rglob("*.toml")}
    if name in path_by_name:
        return path_by_name[name], name
    path = Path(name)
    with suppress(OSError):  # the name is too long for a file
        if path.is_file():
            return path, path.stem

    if "=" in name:
        setting = shlex.quote(name[:200])
        raise SettingsError(
            f"{setting} is a setting, not a recipe; `train`, `table` and `params` take settings after the recipe, and "
            f"`validate` takes none: to check a row with a setting, use `reefknot params RECIPE --row ROW {setting}`"
        )
    with suppress(OSError):  # the name is too long for a folder
        if path.is_dir():
            raise RecipeNotFound(_explain_folder(path))
    similar_name = find_similar_name(name, path_by_name)
    hint = f"did you mean {similar_name}?" if similar_name else "`reefknot ls recipes` lists the shipped recipes"
    raise RecipeNotFound(f"no recipe {name[:200]!r}: it is neither a shipped recipe nor a file; {hint}")


def _explain_folder(path: Path) -> str:
    """Explain why a folder is not a recipe, and what to do with it."""
    from reefknot.lab.runs.folder import find_run_inside

    run = find_run_inside(path)
    if run is not None:
        return (
            f"{path} is not a recipe: it is a folder that contains runs such as {run}; to train a run longer, name its "
            "own folder"
        )
    return f"{path} is not a recipe: it is a folder; `reefknot train --text {path}` trains on the texts in a folder"


def _recipe_name(path: Path) -> str:
    """Return the name of a shipped recipe, such as "press2017/table6"."""
    return path.relative_to(FOLDER).with_suffix("").as_posix()
