"""Arguments, options and functions that several subcommands (verbs) share.

The types at the top are the annotations of a verb's arguments. They hold the help text:

    def score(run: RunArgument, device: DeviceOption = "auto", as_json: JsonOption = False) -> None: ...

Below them are functions that open runs (folders of trained models), print warnings and reject options without effect.
`print_result` prints the result of a verb.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable
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
    from reefknot.lab.text.dataset import Split
    from reefknot.lab.text.vocabulary import Vocabulary
    from reefknot.vectors.word_vectors import WordVectors

RECIPE_HELP = "Name of a built-in recipe (`reefknot ls recipes` lists them), or path of a TOML file."
RecipeArgument = Annotated[str, typer.Argument(help=RECIPE_HELP)]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Settings to change in the recipe, as key=value, such as training.epochs=3.")
]
RowOption = Annotated[
    str | None, typer.Option(help="Row (experiment of the recipe) to train. Required if there are several.")
]
StartOption = Annotated[
    Path | None,
    typer.Option(
        help="Finished run to start from, if the row sets training.start. With --seeds, the folder that holds one run "
        "per seed. [default: the run of the row that training.start names]"
    ),
]
JobsOption = Annotated[int, typer.Option(min=1, max=64, help="Number of runs to train at the same time.")]
RunArgument = Annotated[Path, typer.Argument(help="A run folder, as `reefknot train` writes it.")]
VectorSourceArgument = Annotated[
    Path, typer.Argument(metavar="RUN|FILE", help="A run folder, or a file of word vectors.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with one subfolder per corpus, or the folder of a single corpus. [default: the environment "
        "variable REEFKNOT_DATA]",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Device to compute on: auto, cpu or cuda.")]
OtherTextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="FILE_OR_FOLDER",
        help="Another text, instead of a split of the run's corpus: plain text, JSON lines (.jsonl) or Parquet, "
        "compressed or not; a folder or a pattern of such files; or, except for `compare`, - for standard input.",
        rich_help_panel="Another text",
    ),
]
OtherFieldOption = Annotated[
    str | None,
    typer.Option(
        "--field",
        help="Field of JSON lines, or column of Parquet, that holds the text of --text. [default: text]",
        rich_help_panel="Another text",
    ),
]
OtherEncodingOption = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        help="Encoding of --text, such as cp1252. [default: UTF-8, UTF-16 and UTF-32 are recognised]",
        rich_help_panel="Another text",
    ),
]
BEAM_HELP = "Beam size: number of hypotheses that beam search keeps. [default: the run's setting]"
LENGTH_PENALTY_HELP = (
    "Length penalty: the exponent in score = log-probability / length ^ penalty. [default: the run's setting]"
)
TOP_K_HELP = "Sample only from the k most probable words."
TOP_P_HELP = "Sample only from the most probable words, as many as are needed for a total probability of p."
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Also write the metrics to this tracker: tensorboard, wandb (offline unless you have an API key) or "
        "trackio. Can be repeated. [default: none]"
    ),
]


def _check_files(requested: bool) -> None:
    if requested:
        from reefknot.storage.cache import check_files

        check_files()


CheckOption = Annotated[
    bool,
    typer.Option(
        "--check",
        callback=_check_files,
        help="Read the files of the corpus again, even if their size and times are unchanged since they were encoded.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def open_trained(run: Path) -> TrainedRun[Any, Any, Any]:
    """Open a run of any task on the CPU, and print a warning if its training is not finished."""
    from reefknot.lab.tasks import open_run

    trained = open_run(run)
    warn_if_unfinished(trained.run)
    return trained


def open_language_model(run: Path, device: str = "cpu") -> TrainedLanguageModel:
    """Open the run of a language model, and print a warning if its training is not finished."""
    from reefknot.lab.tasks.language_model import open_language_model
    from reefknot.lab.training.generators import set_determinism

    trained = open_language_model(run, device)
    set_determinism(trained.experiment.training.determinism)
    warn_if_unfinished(trained.run)
    return trained


def open_translator(run: Path, device: str = "cpu") -> TrainedTranslator:
    """Open the run of a translator, and print a warning if its training is not finished."""
    from reefknot.lab.tasks.translation import open_translator
    from reefknot.lab.training.generators import set_determinism

    trained = open_translator(run, device)
    set_determinism(trained.experiment.training.determinism)
    warn_if_unfinished(trained.run)
    return trained


def open_tables(source: Path) -> dict[str, WordVectors]:
    """Return the word vectors of a run or of a file, by the name of their table.

    An untied run gives {"input": ..., "output": ...}, a tied run {"tied": ...} and a file {"vectors": ...}. Warnings
    about an unfinished run, or about unusual lines of a file, are printed on stderr.
    """
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.word_vectors import open_vectors

    tables = open_vectors(source, notify=partial(typer.echo, err=True))
    if is_run_folder(source):
        warn_if_unfinished(RunFolder.open(source))
    return tables


def is_run_folder(source: Path) -> bool:
    """Return whether a path is a run folder, and not a file of vectors or a folder of the TensorBoard projector."""
    return (source / "config.json").is_file()


def warn_if_unfinished(run: RunFolder) -> None:
    """Print a warning on stderr if the training of a run is not finished."""
    if run.result is None and not run.imported:
        typer.echo(f"{run.path}: training is not finished; these are its best weights so far", err=True)


def monolingual_corpus(name: str) -> CorpusSettings:
    """Return the settings of a corpus for a language model; raise an error if it is parallel text."""
    from reefknot.errors import SettingsError
    from reefknot.lab.text.corpora import known_corpus
    from reefknot.lab.text.corpus import CorpusSettings

    corpus = known_corpus(name)
    if corpus is not None and corpus.languages:
        raise SettingsError(f"{name} is parallel text, for translation; use a monolingual corpus")
    return CorpusSettings(name=name)


def warn_about_unknown_words(words: Iterable[str], vocabulary: Vocabulary) -> None:
    """Print the words that the model reads as <unk>, on stderr, if there are any."""
    unknown_words = dict.fromkeys(word for word in words if not vocabulary.can_read(word))
    if unknown_words:
        typer.echo(f"not in the vocabulary, read as <unk>: {', '.join(unknown_words)}", err=True)


def open_split(trained: TrainedLanguageModel, split: str, data: Path | None) -> Split:
    """Return one split of the text that a language model was trained on; raise an error if there is no such split."""
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import check_data_option, create_task

    check_data_option(data, [create_task(trained.experiment)])
    splits = trained.dataset(data).splits
    if split not in splits:
        raise SettingsError(f"--split {split}: must be one of {', '.join(splits)}")
    return splits[split]


def open_standard_input() -> BinaryIO:
    """Return standard input as a binary stream; raise an error if it is closed."""
    from reefknot.errors import DataError

    if sys.stdin is None:
        raise DataError("standard input is closed; give the lines as `< FILE`, or on the command line")
    return sys.stdin.buffer


def user_options(ctx: typer.Context) -> dict[str, str]:
    """Return the options that the user has set on the command line: {"top_k": "--top-k"} for `--top-k 3`.

    An option that is set to its default value is included.
    """
    options = {}
    for parameter in ctx.command.params:
        python_name = str(parameter.name)
        source = ctx.get_parameter_source(python_name)
        is_empty = ctx.params.get(python_name) in ([], ())  # some versions of typer call it set by the user
        if source is not None and source.name == "COMMANDLINE" and not is_empty:
            options[python_name] = parameter.opts[0]
    return options


def reject_options(ctx: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise an error if the user has set one of the named options.

    Args:
        ctx: Typer's context of the current command.
        names: Python names of the options, such as "top_k".
        reason: Ends the message "--top-k has no effect ...". It may contain `{option}` for the name of the option.
    """
    from reefknot.errors import SettingsError

    for name, option in user_options(ctx).items():
        if name in names:
            raise SettingsError(f"{option} has no effect {reason.format(option=option)}")


# The functions below check `--data DIR`. They raise an error if the user passes a folder from which nothing would be
# read.


def check_data(data: Path | None, corpora: Iterable[CorpusSettings], reader: str) -> None:
    """Raise an error if `data` is set but none of the corpora is read from it.

    Args:
        data: The value of `--data`.
        corpora: The corpora. A corpus that does not exist raises an error when it is opened, but not here.
        reader: What reads the corpora, for the message.
    """
    from reefknot.errors import SettingsError

    if data is None:
        return
    corpus_by_name = {corpus.name: corpus for corpus in corpora}
    if corpus_by_name and not any(corpus.reads_data_folder for corpus in corpus_by_name.values()):
        raise SettingsError(
            f"--data has no effect: {reader} reads {', '.join(corpus_by_name)}, not a data folder; leave --data out"
        )


def check_training_data(data: Path | None, experiments: Iterable[Experiment], reader: str) -> None:
    """Raise an error if `data` is set, but training these experiments reads nothing from it.

    Experiments that evaluate word similarity read the benchmarks from the data folder.
    """
    experiments = list(experiments)
    if not any(experiment.evaluates_similarity for experiment in experiments):
        corpora = [experiment.corpus for experiment in experiments]
        check_data(data, corpora, reader)


def check_tracker_options(track: Iterable[str] | None) -> None:
    """Raise an error if a tracker is unknown or not installed, before any text is read."""
    from reefknot.lab.training.trackers import check_trackers

    check_trackers(list(track or []))


def data_folder_for(experiment: Experiment, data: Path | None) -> Path | None:
    """Return the data folder if training the experiment reads from it, and None otherwise."""
    if experiment.evaluates_similarity or experiment.corpus.reads_data_folder:
        return data
    return None


class JsonOutput:
    """The output of a verb that trains: with `--json`, progress goes to stderr and only the result to stdout.

    Create it before anything is printed, and call `print` at the end.
    """

    def __init__(self, as_json: bool) -> None:
        self._stdout = sys.stdout if as_json else None
        if as_json:
            sys.stdout = sys.stderr

    def print(self, compute_result: Callable[[], Any]) -> None:
        """Print the result of the verb, if it is wanted as JSON. Otherwise the result is not computed."""
        if self._stdout is not None:
            sys.stdout = self._stdout
            print_result(compute_result(), "", as_json=True)


def describe_runs(folders: Iterable[Path], *, withhold_test: bool = False) -> list[dict[str, Any]]:
    """Return the folder and the result of runs as JSON values. The result of an unfinished run is None.

    Args:
        folders: The run folders.
        withhold_test: Leave out everything that comes from the test text.
    """
    from reefknot.lab.runs.folder import RunFolder

    test_fields = {"test", "protocol", "translation", "frequency"} if withhold_test else set()
    runs = []
    for folder in folders:
        result = RunFolder.open(folder).result
        fields = None
        if result is not None:
            fields = {name: value for name, value in result.record().items() if name not in test_fields}
        runs.append({"run": str(folder), "result": fields})
    return runs


def print_result(value: Any, text: str, as_json: bool) -> None:
    """Print the result of a verb: `value` as JSON with `--json`, and `text` without it."""
    if as_json:
        typer.echo(json.dumps(value, ensure_ascii=False, indent=2))
    else:
        typer.echo(text)
