"""Arguments, options and functions that several verbs share."""

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
    from reefknot.lab.tasks.contract import Experiment, TrainedRun
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.tasks.translation import TrainedTranslator
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary import Vocabulary
    from reefknot.vectors.word_vectors import WordVectors

Recipe = Annotated[
    str, typer.Argument(help="The name of a shipped recipe (`reefknot ls` lists them), or the path of a TOML file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, as key=value, such as training.epochs=3.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
VectorSource = Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder, or a file of word vectors.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds the corpora, or the files of one corpus. The default is the environment variable "
        "REEFKNOT_DATA.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="Device to compute on: auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def open_trained(run: Path, device: str = "cpu") -> TrainedRun[Any, Any, Any]:
    """Open a run of any task, and print a note if its training is not finished."""
    from reefknot.lab.tasks import open_run

    trained = open_run(run, device)
    note_unfinished(trained.run)
    return trained


def open_language_model(run: Path, device: str = "cpu") -> TrainedLanguageModel:
    """Open the run of a language model, and print a note if its training is not finished."""
    from reefknot.lab.tasks.language_model import open_language_model
    from reefknot.lab.training.generators import set_determinism

    trained = open_language_model(run, device)
    set_determinism(trained.experiment.training.determinism)
    note_unfinished(trained.run)
    return trained


def open_translator(run: Path, device: str = "cpu") -> TrainedTranslator:
    """Open the run of a translator, and print a note if its training is not finished."""
    from reefknot.lab.tasks.translation import open_translator
    from reefknot.lab.training.generators import set_determinism

    trained = open_translator(run, device)
    set_determinism(trained.experiment.training.determinism)
    note_unfinished(trained.run)
    return trained


def open_tables(source: Path) -> dict[str, WordVectors]:
    """Return the word vectors of a run or of a file, by the names of their tables.

    Notes on an unfinished run, or on unusual lines of a file, are printed on stderr.
    """
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.word_vectors import open_vectors

    tables = open_vectors(source, notify=partial(typer.echo, err=True))
    if is_run(source):
        note_unfinished(RunFolder.open(source))
    return tables


def is_run(source: Path) -> bool:
    """Return whether a path is a run folder, and not a file of vectors or a folder of the TensorBoard projector."""
    return (source / "config.json").is_file()


def note_unfinished(run: RunFolder) -> None:
    """Print a note if the training of a run is not finished."""
    if run.result is None and not run.imported:
        typer.echo(f"{run.path}: training is not finished; these are its best weights so far", err=True)


def given_options(invocation: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield the parameters that the user has set: the name in Python, and the option on the command line."""
    for parameter in invocation.command.params:
        source = invocation.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            yield str(parameter.name), parameter.opts[0]


def plain_corpus(name: str) -> CorpusSettings:
    """Return the settings of a corpus for a language model; raise an error if it is parallel text."""
    from reefknot.errors import SettingsError
    from reefknot.lab.text.corpora import known_corpus
    from reefknot.lab.text.corpus import CorpusSettings

    known = known_corpus(name)
    if known is not None and known.languages:
        raise SettingsError(f"{name} is parallel text, for translation; name a text of one language")
    return CorpusSettings(name=name)


def note_unknown_words(words: Iterable[str], vocabulary: Vocabulary) -> None:
    """Print the words of a prompt that are not in the vocabulary, if there are any."""
    unknown = dict.fromkeys(word for word in words if not vocabulary.can_read(word))
    if unknown:
        typer.echo(f"not in the vocabulary, read as <unk>: {', '.join(unknown)}", err=True)


def standard_input() -> BinaryIO:
    """Return standard input as a binary stream; raise an error if it is closed."""
    from reefknot.errors import DataError

    if sys.stdin is None:
        raise DataError("standard input is closed; give the lines as `< FILE`, or on the command line")
    return sys.stdin.buffer


# -- `--data DIR`. It is an error if nothing is read from the folder, because the user expects otherwise.


def check_data(data: Path | None, corpora: Iterable[str], reader: str) -> None:
    """Raise an error if `data` is set but none of the corpora is read from it.

    Args:
        data: The value of `--data`.
        corpora: Names of the corpora.
        reader: What reads the corpora, for the message.
    """
    from reefknot.errors import SettingsError

    names = list(dict.fromkeys(corpora))
    if data is not None and names and not any(map(is_downloaded, names)):
        raise SettingsError(f"--data has no effect: {reader} reads {', '.join(names)}, not a data folder; leave it out")


def is_downloaded(corpus: str) -> bool:
    """Return whether a corpus is read from the data folder: not a folder of text, and not part of Python."""
    from reefknot.lab.text.corpora import known_corpus

    known = known_corpus(corpus)
    return known is not None and known.needs_data


def check_training_data(data: Path | None, experiments: Iterable[Experiment], reader: str) -> None:
    """Raise an error if `data` is set, but training these experiments reads nothing from it."""
    experiments = list(experiments)
    if not any(experiment.evaluates_similarity for experiment in experiments):
        check_data(data, (experiment.corpus.name for experiment in experiments), reader)


def data_for(experiment: Experiment, data: Path | None) -> Path | None:
    """Return the data folder if training the experiment reads from it, and None otherwise."""
    return data if experiment.evaluates_similarity or is_downloaded(experiment.corpus.name) else None


def emit(value: Any, text: str, as_json: bool) -> None:
    """Print the result of a verb: the value as JSON for programs, or the text for people."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else text)
