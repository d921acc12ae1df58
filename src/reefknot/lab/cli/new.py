"""`reefknot new`: write a recipe for a text of the user, with comments that say why each setting was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import DeviceOption, JsonOption, JsonOutput
from reefknot.lab.cli.own_text import EncodingOption, FieldOption, TextOption, TokensOption

EXAMPLES = """\b
Examples:
  reefknot new --text docs/                        # writes docs.toml
  reefknot new --text articles.jsonl.gz --field body --out articles.toml
  reefknot new --text tokenised.txt --tokens words
"""


def new(
    text: TextOption = None,
    out: Annotated[Path | None, typer.Option(help="Recipe to write. [default: NAME.toml]")] = None,
    field: FieldOption = "text",
    encoding: EncodingOption = None,
    tokens: TokensOption = "bpe",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a recipe for a text, to edit and train.

    The recipe is the one that `reefknot train --text` trains. Its comments say why each setting was chosen.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.own_text import recipe_path_for, write_recipe

    output = JsonOutput(as_json)
    if text is None:
        raise SettingsError("new needs a text: reefknot new --text FILE_OR_FOLDER")
    recipe_path = out or Path(recipe_path_for(text, None).name)
    write_recipe(text, recipe_path, field=field, encoding=encoding, tokens=tokens, device=device, print_line=typer.echo)
    output.print(lambda: {"recipe": str(recipe_path)})
