"""The recipes that come with the package: found by name without reading or checking them."""

from __future__ import annotations

import shlex
import tomllib
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from reefknot.errors import SettingsError

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
