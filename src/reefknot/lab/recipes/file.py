"""What stands in a recipe's file: a title, a base of settings, and the rows of a paper's table with its figures.

A row is trained, quoted (the paper has its figure from others), or another row's model scored in another way:

    [[rows]]
    name = "AWD-LSTM + dynamic evaluation"
    of = "AWD-LSTM"
    by = "dynamic"

The figures of such a row are those that `reefknot evaluate RUN --dynamic --save` has left in the runs of the other;
of `by = "context-2560-stride-512"` those of `reefknot evaluate RUN --context 2560 --stride 512 --save`.

A paper's figures stand in `paper`, such as `paper = { valid = 120.7, test = 114.5 }`; those of its word vectors by end:

    [rows.paper_similarity]
    input = { SimLex-999 = 0.30, MEN = 0.66 }
    output = { SimLex-999 = 0.29, MEN = 0.61 }

A file may give rows of another recipe a name of their own, as for a figure that is drawn from them; their runs stay
that recipe's, so that nothing is trained twice:

    extends = "inan2017/table1"
    rows = ["VD-LSTM large", "VD-LSTM+REAL large"]
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from reefknot.errors import SettingsError, shortened
from reefknot.lab.config.settings import OneLine, Positive, Settings, check
from reefknot.lab.config.upgrade import upgrade_settings, warn_renamed
from reefknot.lab.runs.folder import folder_name
from reefknot.lab.text.corpus import SPLITS

if TYPE_CHECKING:
    FigureName = str
    EndName = str
else:
    EndName = Literal["input", "output", "tied"]
    FigureName = Literal[(*SPLITS, "bleu_valid", "bleu_test", "seconds", "hours")]


Correlation = Annotated[float, Field(ge=-1.0, le=1.0)]


def _known_mode(name: str) -> str:
    """Check the name of an evaluation mode. Most recipes name none, so the modes are imported here."""
    from reefknot.lab.runs.modes import known

    return known(name)


class Row(Settings):
    """One row of a paper's table."""

    name: Annotated[OneLine, Field(min_length=1, max_length=100, description="as the paper writes it")]
    quoted: Annotated[bool, Field(description="a figure the paper quotes from others; never trained here")] = False
    of: Annotated[OneLine | None, Field(description="the trained row whose model this row scores in another way")] = (
        None
    )
    by: Annotated[
        Annotated[str, AfterValidator(_known_mode)] | None,
        Field(description="that way: dynamic, cache, mc, or windows such as context-2560-stride-512"),
    ] = None
    parameters: Annotated[
        int | None, Field(ge=1, le=10**12, description="exact number of parameters, checked before training")
    ] = None
    paper: dict[FigureName, Positive] = Field(
        {}, description="the paper's figures: perplexities by split, BLEU, seconds per epoch, hours of training"
    )
    paper_similarity: dict[EndName, dict[str, Correlation]] = Field(
        {}, description="the paper's rank correlations with people's judgements, by end and benchmark"
    )
    set: dict[str, Any] = Field({}, description="what differs from the base")

    @field_validator("paper_similarity")
    @classmethod
    def _check_benchmarks(cls, similarity: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        from reefknot.lab.evaluation.benchmarks import BENCHMARKS

        for name in (name for scores in similarity.values() for name in scores):
            if name not in BENCHMARKS:
                raise ValueError(f"unknown benchmark {shortened(name)!r}; known benchmarks: {', '.join(BENCHMARKS)}")
        return similarity

    @model_validator(mode="after")
    def _check_kind(self) -> Row:
        if (self.of is None) != (self.by is None):
            raise ValueError("of and by go together: the row whose model is scored, and the way; set both or neither")
        if self.of is not None and (self.quoted or self.set or self.parameters is not None):
            raise ValueError("a row that scores another row's model has no settings; give it of, by and paper alone")
        return self

    @property
    def trained(self) -> bool:
        """Whether this row is a training of its own."""
        return not self.quoted and self.of is None

    @property
    def slug(self) -> str:
        """The row's name as a folder."""
        return folder_name(self.name)

    @property
    def start(self) -> str | None:
        """The row whose best weights this one begins with."""
        return setting(self.set, "training", "start", "row")

    @property
    def corpus(self) -> str | None:
        """Its text, where that is not the base's."""
        return setting(self.set, "corpus", "name")


class RecipeFile(Settings):
    """What stands in the file."""

    title: OneLine
    paper: Annotated[OneLine | None, Field(description="the paper's short name, such as press2017")] = None
    base: dict[str, Any]
    rows: Annotated[list[Row], Field(min_length=1)]
    extends: OneLine | None = None


class Selection(Settings):
    """What stands in the file where its rows are those of another recipe."""

    title: OneLine
    paper: OneLine | None = None
    extends: Annotated[OneLine, Field(description="the recipe whose rows these are; their runs are its runs")]
    rows: Annotated[list[OneLine], Field(min_length=1)]


def read_file(path: Path, name: str) -> RecipeFile:
    """A recipe's file with rows that can stand beside each other; complaints call it `name`."""
    raw = _with_todays_names(_read_toml(path), name)
    parsed = _selected(check(Selection, raw, name), name) if "extends" in raw else check(RecipeFile, raw, name)
    _refuse_twins(parsed.rows, name)
    _refuse_models_of_nothing(parsed.rows, name)
    return parsed


def _selected(selection: Selection, where: str) -> RecipeFile:
    """The rows of another recipe's file that a selection names, in its order."""
    path, known_as = find_recipe(selection.extends)
    if "extends" in _read_toml(path):
        raise SettingsError(f"{where}: {known_as} is itself a part of another recipe; extend that one")
    whole = read_file(path, known_as)
    by_name = {row.name: row for row in whole.rows}
    for row in selection.rows:
        if row not in by_name:
            there = ", ".join(f'"{name}"' for name in by_name)
            raise SettingsError(f'{where}: {known_as} has no row "{shortened(row)}"; there are: {there}')
    chosen = [by_name[row] for row in selection.rows]
    own = {"title": selection.title, "paper": selection.paper, "rows": chosen, "extends": known_as}
    return whole.model_copy(update=own)


def setting(raw: Any, *keys: str) -> str | None:
    """A text inside settings that may be wrong."""
    for key in keys:
        raw = raw.get(key) if isinstance(raw, Mapping) else None
    return raw if isinstance(raw, str) else None


def _refuse_twins(rows: Sequence[Row], where: str) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        if row.slug in seen:
            raise SettingsError(f'{where}: rows "{seen[row.slug]}" and "{row.name}" would share a folder; rename one')
        seen[row.slug] = row.name


def _refuse_models_of_nothing(rows: Sequence[Row], where: str) -> None:
    trained = [row.name for row in rows if row.trained]
    for row in rows:
        if row.of is not None and row.of not in trained:
            there = ", ".join(f'"{name}"' for name in trained) or "none"
            raise SettingsError(
                f'{where}, row "{row.name}":\n  of: no row "{shortened(row.of)}" is trained; there are: {there}'
            )


def _with_todays_names(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The content of a recipe file with old names of settings replaced, and a warning if there were any."""
    upgraded = dict(raw)
    if isinstance(base := raw.get("base"), Mapping):
        upgraded["base"] = upgrade_settings(base)
    if isinstance(rows := raw.get("rows"), list):
        upgraded["rows"] = [
            {**row, "set": upgrade_settings(row["set"])}
            if isinstance(row, Mapping) and isinstance(row.get("set"), Mapping)
            else row
            for row in rows
        ]
    if upgraded != raw:
        warn_renamed(where)
    return upgraded


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


class RecipeNotFound(SettingsError):
    """The name is neither that of a shipped recipe nor a file."""


def shipped() -> dict[str, str]:
    """Name and title of every shipped recipe."""
    paths = sorted(FOLDER.rglob("*.toml"))
    titles = [tomllib.loads(path.read_text(encoding="utf-8"))["title"] for path in paths]
    return {_name(path): title for path, title in zip(paths, titles, strict=True)}


def find_recipe(name: str) -> tuple[Path, str]:
    """The file of a recipe, and the name it goes by: a shipped one's name, or the stem of a path."""
    known = {_name(path): path for path in FOLDER.rglob("*.toml")}
    if name in known:
        return known[name], name
    path = Path(name)
    with suppress(OSError):  # a name that is too long to be a file's
        if path.is_file():
            return path, path.stem
    if "=" in name:
        setting = shlex.quote(name[:200])
        raise SettingsError(
            f"{setting} is no recipe; a setting comes after the recipe of `train`, `table` or `params`, and `validate` "
            f"takes none: to check a row with it, use `reefknot params RECIPE --row ROW {setting}`"
        )
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped are: {', '.join(sorted(known))}"
    raise RecipeNotFound(f"no recipe {name[:200]!r}: neither a shipped one nor a file; {hint}")


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()
