"""`reefknot advise`: measure which ends (input embeddings and output classifier) suit a text and this machine.

`lab/bench/advise.py` builds and measures the models. `advise` measures every end in its own process, which runs
`reefknot advise CORPUS --end END --json`, or the same with `--text FILE`. Separate processes have two advantages: the
peak memory of an end is measured without the memory of other ends, and an end that is killed for lack of memory does
not stop the others. The ends take turns in two rounds, so that a machine that becomes slower affects all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import DataOption, DeviceOption, JsonOption, monolingual_corpus
from reefknot.lab.cli.own_text import PANEL as TEXT_PANEL
from reefknot.lab.cli.own_text import EncodingOption, FieldOption

if TYPE_CHECKING:
    from reefknot.lab.bench.advise import Body, Row
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.dataset import Dataset
    from reefknot.lab.text.vocabulary_settings import VocabularySettings

EXAMPLES = """\b
Examples:
  reefknot advise python-docs
  reefknot advise --text articles.jsonl.gz --field body
  reefknot advise wikitext-2 --data DIR --dim 1024 --layers 16 --heads 16 --ffn 4096
  reefknot advise ptb --data DIR --end ADP-T --end BPE-T --json
"""

MODEL_PANEL = "Transformer between the ends"


def advise(
    ctx: typer.Context,
    corpus: Annotated[
        str | None,
        typer.Argument(help="A corpus (see `reefknot ls corpora`), or a folder of train, valid and test text."),
    ] = None,
    end: Annotated[
        list[str] | None,
        typer.Option(
            help="Pair of input and output ends to measure, named as in the paper: SM, SM-T, BPE, BPE-T, ASM, CNN, ADP "
            "or ADP-T. Can be repeated. [default: all]"
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(min=16, help="Hidden dimension. [default: 512; 128 on a CPU]", rich_help_panel=MODEL_PANEL),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers. [default: 6; 2 on a CPU]", rich_help_panel=MODEL_PANEL)
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Number of attention heads. [default: 8; 4 on a CPU]", rich_help_panel=MODEL_PANEL),
    ] = None,
    ffn: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of feed-forward units. [default: 2048; 512 on a CPU]", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens per training step. [default: 4096; 512 on a CPU]",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Approximate number of seconds to time each end for.")] = 1.0,
    data: DataOption = None,
    device: DeviceOption = "auto",
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE_OR_FOLDER",
            help="Your own text in place of a corpus: any file, folder or pattern that `reefknot train --text` reads.",
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    field: FieldOption = "text",
    encoding: EncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out which input and output ends suit your text and this machine.

    The eight pairs of ends of Baevski & Auli (2019) are compared by parameters, memory and training speed.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.advise import BODIES, ENDS, choose_bands, give_advice
    from reefknot.lab.cli.options import reject_options
    from reefknot.lab.runs.environment import capture_environment
    from reefknot.lab.text.vocabulary_settings import VocabularySettings
    from reefknot.lab.training.distributed import choose_device

    # Check the options.
    for name in end or []:
        if name not in ENDS:
            raise SettingsError(f"--end {name}: must be one of {', '.join(ENDS)}")
    ends = list(dict.fromkeys(end or ENDS))
    chosen_device = choose_device(device)
    if text is not None:
        reject_options(ctx, ("corpus", "data"), "with --text, which gives the text; leave {option} out")
        settings = _choose_text_settings(text, field, encoding)
    else:
        reject_options(ctx, ("field", "encoding"), "without --text; add --text, or leave {option} out")
        settings = _choose_corpus_settings(corpus, data)
    size_options = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn, "tokens": tokens}
    chosen_sizes = {name: size for name, size in size_options.items() if size is not None}
    body = replace(BODIES[chosen_device], **chosen_sizes)

    # Open the text, and choose the sizes that depend on it.
    request = _Request(settings, body, chosen_device, seconds, data)
    dataset = request.open_text(VocabularySettings())
    num_words = len(dataset.vocabulary)
    request = replace(request, body=body.fit_to_text(dataset.splits["train"].tokens))
    band_sizes, bands_description = choose_bands(dataset.vocabulary)

    # Measure every end.
    rows = [request.measure(name, num_words, band_sizes, in_this_process=len(ends) == 1) for name in ends]
    if len(ends) > 1:
        rows = [request.measure_again(row) for row in rows]

    # Print the results.
    environment = capture_environment()
    device_name = environment["gpus"][0] if chosen_device == "cuda" else environment["cpu"]
    if as_json:
        record = {
            "corpus": dataset.summary,
            "device": device_name,
            "body": asdict(request.body),
            "bands": band_sizes,
            "rows": [row.record() for row in rows],
            "words": num_words,
            "advice": give_advice(rows, num_words),
        }
        typer.echo(json.dumps(record, indent=2))
        return
    typer.echo(dataset.summary)
    typer.echo(bands_description)
    typer.echo(f"{request.body}; {device_name}")
    _print_table(rows)
    typer.echo(give_advice(rows, num_words))


def _choose_corpus_settings(corpus: str | None, data: Path | None) -> CorpusSettings:
    """Return the settings of a named corpus or a folder; raise an error that names --text for a file."""
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.options import check_data

    if corpus is None:
        raise SettingsError("advise needs a text: reefknot advise CORPUS, or reefknot advise --text FILE_OR_FOLDER")
    if Path(corpus).expanduser().is_file():
        raise SettingsError(f"{corpus} is a file, not a corpus or a folder; use `reefknot advise --text {corpus}`")
    settings = monolingual_corpus(corpus)
    check_data(data, [settings], "this command")
    return settings


def _choose_text_settings(text: str, field: str, encoding: str | None) -> CorpusSettings:
    """Return the settings with which `reefknot train --text` reads and splits a text."""
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.from_text import choose_corpus, examine_text
    from reefknot.lab.text.sources import STANDARD_INPUT

    if text == STANDARD_INPUT:
        raise SettingsError("--text -: advise reads the text once per end, but standard input only once; use a file")
    summary = examine_text(text, field=field, encoding=encoding, notify=partial(typer.echo, err=True))
    return choose_corpus(summary, field=field, encoding=encoding)


@dataclass(frozen=True)
class _Request:
    """The settings that all measurements share."""

    corpus: CorpusSettings
    body: Body
    """The Transformer between the ends."""
    device: str
    seconds: float
    """Duration of the timing, per end."""
    data: Path | None
    """The value of `--data`."""

    def open_text(self, vocabulary: VocabularySettings) -> Dataset:
        """Return the text, split into the words or sub-words of a vocabulary."""
        from reefknot.lab.text.dataset import open_dataset

        notify = partial(typer.echo, err=True)
        return open_dataset(self.corpus, vocabulary, data=self.data, notify=notify)

    def measure(self, end: str, num_words: int, band_sizes: tuple[int, ...], in_this_process: bool) -> Row:
        """Count the parameters of an end, and measure its memory and speed.

        Args:
            end: Name of the end.
            num_words: Number of distinct words in the text.
            band_sizes: Sizes of all bands (groups of words of similar frequency) but the last, for adaptive ends.
            in_this_process: Measure in this process instead of a new one.
        """
        from reefknot.errors import ReefknotError
        from reefknot.lab.bench.advise import (
            ENDS,
            Row,
            build_experiment,
            choose_vocabulary,
            count_parameters,
            measure_training,
        )

        vocabulary_settings = choose_vocabulary(end, num_words)
        experiment = build_experiment(end, self.corpus.name, self.body, vocabulary_settings, band_sizes, self.device)
        try:
            dataset = self.open_text(vocabulary_settings)
        except ReefknotError as error:  # the package that learns sub-words may not be installed
            return Row(end, note=str(error))
        row = count_parameters(Row(end), experiment, len(dataset.vocabulary))
        if in_this_process:
            return measure_training(row, experiment, dataset, self.device, self.seconds)
        typer.echo(f"{end}: {ENDS[end]}", err=True)
        return _measure_in_new_process(row, self.command(end))

    def measure_again(self, row: Row) -> Row:
        """Measure an end in a second round, and return the row of both rounds. A failed end is not measured again."""
        from reefknot.lab.bench.advise import combine_rounds

        if row.words_per_second is None:
            return row
        typer.echo(f"{row.end}: second round", err=True)
        return combine_rounds(row, _measure_in_new_process(row, self.command(row.end)))

    def command(self, end: str) -> list[str]:
        """Return the arguments of `reefknot` that measure one end in one of two rounds, as a user would type them."""
        from reefknot.lab.text.sources import DEFAULT_FIELD

        text = self.corpus.text
        arguments = ["advise", self.corpus.name] if text is None else ["advise", "--text", self.corpus.name]
        if text is not None and text.field != DEFAULT_FIELD:
            arguments += ["--field", text.field]
        if text is not None and text.encoding is not None:
            arguments += ["--encoding", text.encoding]
        arguments += ["--end", end, "--seconds", str(self.seconds / 2), "--device", self.device]
        for name, size in asdict(self.body).items():
            arguments += [f"--{name}", str(size)]
        if self.data and text is None:
            arguments += ["--data", str(self.data)]
        return [*arguments, "--json"]


def _measure_in_new_process(row: Row, arguments: list[str]) -> Row:
    """Return the row with the measurements of a new process, or with a note if that process failed."""
    from reefknot.lab.bench.measure import OUT_OF_MEMORY

    process = subprocess.run([sys.executable, "-m", "reefknot", *arguments], capture_output=True, text=True)
    if process.returncode == 0:
        measurements: dict[str, Any] = json.loads(process.stdout)["rows"][0]
        return replace(row, **measurements)
    if process.returncode < 0:
        # The system kills a process that uses too much memory, without a message.
        return replace(row, note=f"killed, perhaps {OUT_OF_MEMORY}")
    last_line = process.stderr.strip().splitlines()[-1:]
    return replace(row, note=" ".join(last_line))


def _print_table(rows: list[Row]) -> None:
    from reefknot.lab.cli.bench.printing import print_table

    titles = ["end", "parameters of ends", "of the model", "MiB", "tokens/s", "words + line ends/s", "range"]
    lines = []
    for row in rows:
        memory_mib = None if row.memory_bytes is None else row.memory_bytes / 2**20
        values = (row.ends_parameters, row.parameters, memory_mib, row.tokens_per_second, row.words_per_second)
        cells = ["-" if value is None else f"{value:,.0f}" for value in values]
        if row.min_words_per_second is None or row.max_words_per_second is None:
            speed_range = "-"
        else:
            speed_range = f"{row.min_words_per_second:,.0f} to {row.max_words_per_second:,.0f}"
        lines.append([row.end, *cells, speed_range])
    notes = [(row.end, row.note) for row in rows]
    print_table(titles, lines, notes)
