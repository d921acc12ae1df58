"""Arguments and options that several verbs share, so that they read and behave alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

if TYPE_CHECKING:
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.contract import TrainedRun
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.tasks.translation import TrainedTranslator
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary import Vocabulary
    from reefknot.vectors.word_vectors import WordVectors

Recipe = Annotated[str, typer.Argument(help="A shipped recipe (see `reefknot ls`) or the path of a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, spelled as in the recipe: training.epochs=3")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
VectorSource = Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder, or a file of word vectors.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of corpora or text; else REEFKNOT_DATA.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def open_trained(run: Path, device: str = "cpu") -> TrainedRun[Any, Any, Any]:
    """Open a run of any task; says so if its training is not finished."""
    from reefknot.lab.tasks import open_run

    trained = open_run(run, device)
    _tell_unfinished(trained.run)
    return trained


def open_language_model(run: Path, device: str = "cpu") -> TrainedLanguageModel:
    """Open the run of a language model; says so if its training is not finished."""
    from reefknot.lab.tasks.language_model import open_language_model
    from reefknot.lab.training.generators import set_determinism

    trained = open_language_model(run, device)
    set_determinism(trained.experiment.training.determinism)
    _tell_unfinished(trained.run)
    return trained


def open_translator(run: Path, device: str = "cpu") -> TrainedTranslator:
    """Open the run of a translator; says so if its training is not finished."""
    from reefknot.lab.tasks.translation import open_translator
    from reefknot.lab.training.generators import set_determinism

    trained = open_translator(run, device)
    set_determinism(trained.experiment.training.determinism)
    _tell_unfinished(trained.run)
    return trained


def open_tables(source: Path) -> dict[str, WordVectors]:
    """The word vectors of a run or of a file by the names of its tables; says so when a run is not finished, and what
    is odd about a file."""
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.word_vectors import open_vectors

    tables = open_vectors(source, say=partial(typer.echo, err=True))
    if is_run(source):
        _tell_unfinished(RunFolder.open(source))
    return tables


def is_run(source: Path) -> bool:
    """Whether it is a run, not vectors in a file or in the folder of a projector."""
    return (source / "config.json").is_file()


def _tell_unfinished(run: RunFolder) -> None:
    if run.result is None and not run.imported:
        typer.echo(f"{run.path}: training is not finished; these are its best weights so far", err=True)


def given(invocation: typer.Context) -> Iterator[tuple[str, str]]:
    """The parameters that stand on the command line: the name of each, and how it is spelled there."""
    for parameter in invocation.command.params:
        source = invocation.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            yield str(parameter.name), parameter.opts[0]


def plain_corpus(name: str) -> CorpusSettings:
    """A corpus that the user names for a language model: parallel text is refused."""
    from reefknot.errors import SettingsError
    from reefknot.lab.text.corpora import known_corpus
    from reefknot.lab.text.corpus import CorpusSettings

    known = known_corpus(name)
    if known is not None and known.languages:
        raise SettingsError(f"{name} is parallel text, for translation; name a text of one language")
    return CorpusSettings(name=name)


def tell_unknown(words: Iterable[str], vocabulary: Vocabulary) -> None:
    """Name the words of a prompt that the model cannot tell from <unk>."""
    strange = dict.fromkeys(word for word in words if not vocabulary.reads(word))
    if strange:
        typer.echo(f"not in the vocabulary, read as <unk>: {', '.join(strange)}", err=True)


def standard_input() -> BinaryIO:
    """What is read where no file is named."""
    from reefknot.errors import DataError

    if sys.stdin is None:
        raise DataError("standard input is closed; give the lines as `< FILE`, or on the command line")
    return sys.stdin.buffer


def emit(value: Any, text: str, as_json: bool) -> None:
    """What a reading verb says: for a person, or for a program."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else text)
