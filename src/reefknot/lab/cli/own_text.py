"""Options and functions of `reefknot train --text` and `reefknot new --text`: a recipe for any text of the user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

_MAX_LISTED_KEYS = 4  # in an error message
PANEL = "Your own text"
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="FILE_OR_FOLDER",
        help="Text to train on, without a recipe: plain text, JSON lines or Parquet, compressed or not; a "
        "folder or a pattern of such files; or - for standard input.",
        rich_help_panel=PANEL,
    ),
]
FieldOption = Annotated[
    str,
    typer.Option(help="Field of JSON lines, or column of Parquet, that holds the text.", rich_help_panel=PANEL),
]
EncodingOption = Annotated[
    str | None,
    typer.Option(
        help="Encoding of the text, such as cp1252. Of several files, those that are valid UTF-8 are read as UTF-8. "
        "[default: UTF-8, UTF-16 and UTF-32 are recognised]",
        rich_help_panel=PANEL,
    ),
]
TokensOption = Annotated[
    Literal["bpe", "words"],
    typer.Option(
        help="Split words into sub-words (bpe), or take the words of a text that is already tokenised (words).",
        rich_help_panel=PANEL,
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Number of processes that prepare the text. [default: the number of cores]"),
]


def write_recipe(
    text: str,
    recipe_path: Path,
    *,
    field: str,
    encoding: str | None,
    tokens: Literal["bpe", "words"],
    device: str,
    print_line: Callable[[str], None],
) -> None:
    """Choose a recipe for a text, print what was chosen and why, and write it to a file.

    Args:
        text: A file, a folder, a pattern, or - for standard input, which is saved next to the recipe.
        recipe_path: The file to write. An existing file is not overwritten.
        field: Field of JSON lines, or column of Parquet, that holds the text.
        encoding: Encoding of the text.
        tokens: The kind of tokens.
        device: The device to train on, "auto", "cpu" or "cuda".
        print_line: Called with each line to print.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.from_text import choose_recipe, examine_text
    from reefknot.lab.text.sources import STANDARD_INPUT
    from reefknot.lab.training.distributed import choose_device
    from reefknot.storage import files as durable

    chosen_device = choose_device(device)
    if text == STANDARD_INPUT:
        text = str(_save_standard_input(recipe_path))
        print_line(f"standard input is saved as {text}")
    summary = examine_text(text, field=field, encoding=encoding, notify=print_line)
    print_line(summary.describe())
    recipe = choose_recipe(summary, tokens=tokens, device=chosen_device, field=field, encoding=encoding)
    for reason in recipe.reasons:
        print_line(f"  {reason}")

    content = recipe.toml.encode()
    if recipe_path.exists() and recipe_path.read_bytes() != content:
        raise SettingsError(
            f"{recipe_path} exists and is another recipe: {_explain_difference(recipe_path, content)}; train it with "
            f"`reefknot train {recipe_path}`, or use another --out"
        )
    with durable.writing(recipe_path):
        recipe_path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_bytes(recipe_path, content)
    print_line(f"recipe: {recipe_path}")


def _explain_difference(recipe_path: Path, content: bytes) -> str:
    """Return how an existing recipe differs from the one that would be written: another text, a change, or settings."""
    import tomllib

    from reefknot.lab.runs.loading import flatten

    new_content = content.decode()
    try:
        old_content = recipe_path.read_text(encoding="utf-8")
        old, new = (flatten(tomllib.loads(recipe)) for recipe in (old_content, new_content))
    except (OSError, ValueError):
        return "it cannot be read as TOML"
    if old.get("base.corpus.name") != new["base.corpus.name"]:
        return f"it is for another text, {old.get('base.corpus.name')}"
    old_size, new_size = (recipe.splitlines()[1:2] for recipe in (old_content, new_content))
    if old_size and old_size != new_size and old_size[0].startswith("#   "):
        was, now = (size[0].removeprefix("#   ") for size in (old_size, new_size))
        return f"the text has changed (it was {was}; it is {now})"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    settings = ", ".join(keys[:_MAX_LISTED_KEYS]) + (" and others" if len(keys) > _MAX_LISTED_KEYS else "")
    return (
        f"it was edited, or written with other options or for another device, and differs in {settings or 'comments'}"
    )


@contextmanager
def remove_new_recipe_on_error(recipe_path: Path | None) -> Iterator[None]:
    """Remove a recipe, and its folder if it is empty, if the code below `with` creates them and then fails."""
    from reefknot.storage import files as durable

    if recipe_path is None or recipe_path.exists():
        yield
        return
    is_new_folder = not recipe_path.parent.exists()
    try:
        yield
    except BaseException:
        durable.remove(recipe_path)
        if is_new_folder:
            with suppress(OSError):  # it holds the text of standard input
                recipe_path.parent.rmdir()
        raise


def recipe_path_for(text: str, out: Path | None) -> Path:
    """Return the file of the recipe that `train --text` writes: OUT.toml, or runs/NAME.toml for a text called NAME."""
    from reefknot.lab.runs.folder import folder_name
    from reefknot.lab.text.sources import COMPRESSED_ENDINGS, STANDARD_INPUT

    if out is not None:
        return out.with_name(f"{out.name}.toml")
    name = "stdin" if text == STANDARD_INPUT else Path(text).expanduser().absolute().name
    for ending in COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    return Path("runs") / f"{folder_name(Path(name).stem)}.toml"


def is_first_process() -> bool:
    """Return whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _save_standard_input(recipe_path: Path) -> Path:
    """Save standard input next to a recipe, as .jsonl if its first line is a JSON object, and as .txt otherwise."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.lab.cli.options import open_standard_input
    from reefknot.lab.text.sources import open_text
    from reefknot.storage import files as durable

    temporary = durable.temporary_path(recipe_path)
    try:
        with durable.writing(temporary):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                shutil.copyfileobj(open_standard_input(), file, 1 << 20)
        if not temporary.stat().st_size:
            raise DataError("standard input is empty; pipe a text into the command, or name a file")
        is_json_lines = open_text(temporary).files[0].kind == "jsonl"
        path = recipe_path.with_suffix(".jsonl" if is_json_lines else ".txt")
        if path.exists() and not _equal_files(path, temporary):
            raise SettingsError(f"{path} exists and is another text; use another --out, or remove the file")
        temporary.replace(path)
    finally:
        durable.remove(temporary)
    return path


def _equal_files(path: Path, other_path: Path) -> bool:
    import filecmp

    return filecmp.cmp(path, other_path, shallow=False)
