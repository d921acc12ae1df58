"""`reefknot advise`: measure which ends suit a text and this machine.

Every end is measured in its own process, by `reefknot advise CORPUS --end END --json`. So the memory of an end is
measured without the memory of other ends, and an end that is killed for lack of memory does not stop the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, plain_corpus

if TYPE_CHECKING:
    from reefknot.lab.bench.advise import Body, Row
    from reefknot.lab.text.dataset import Dataset
    from reefknot.lab.text.vocabulary import VocabularySettings

EXAMPLES = """\b
Examples:
  reefknot advise python-docs
  reefknot advise wikitext-2 --data DIR --dim 1024 --layers 16 --heads 16 --ffn 4096
  reefknot advise ptb --data DIR --end ADP-T --end BPE-T --json
"""

MODEL = "Model between the ends"


def advise(
    corpus: Annotated[
        str, typer.Argument(help="A corpus (see `reefknot ls corpora`), or a folder of train, valid and test text.")
    ],
    end: Annotated[
        list[str] | None,
        typer.Option(
            help="End to measure: SM, SM-T, BPE, BPE-T, ASM, CNN, ADP or ADP-T. Can be repeated. [default: all]"
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(min=16, help="Dimension of the model. [default: 512; 128 on a CPU]", rich_help_panel=MODEL),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers. [default: 6; 2 on a CPU]", rich_help_panel=MODEL)
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Number of attention heads. [default: 8; 4 on a CPU]", rich_help_panel=MODEL),
    ] = None,
    ffn: Annotated[
        int | None,
        typer.Option(min=1, help="Number of feed-forward units. [default: 2048; 512 on a CPU]", rich_help_panel=MODEL),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of tokens per update. [default: 4096; 512 on a CPU]", rich_help_panel=MODEL
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Approximate number of seconds for which every end is timed.")
    ] = 1.0,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare the ends of Baevski & Auli (2019) for a text on this machine: parameters, memory and speed."""
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.advise import BODIES, ENDS, advice, choose_bands
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.runs.environment import capture_environment
    from reefknot.lab.text.vocabulary import VocabularySettings
    from reefknot.lab.training.distributed import choose_device

    for name in end or []:
        if name not in ENDS:
            raise SettingsError(f"--end {name}: must be one of {', '.join(ENDS)}")
    check_data(data, [corpus], "this command")
    chosen_device = choose_device(device)
    sizes = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn, "tokens": tokens}
    body = replace(BODIES[chosen_device], **{name: size for name, size in sizes.items() if size is not None})
    request = _Request(corpus, body, chosen_device, seconds, data)
    words = request.open(VocabularySettings())
    request = replace(request, body=body.within(words.splits["train"].tokens))
    bands, description = choose_bands(words.vocabulary)
    ends = list(dict.fromkeys(end or ENDS))
    rows = [request.measure(name, len(words.vocabulary), bands, in_this_process=len(ends) == 1) for name in ends]
    machine = capture_environment()
    device_name = machine["gpus"][0] if chosen_device == "cuda" else machine["cpu"]
    if as_json:
        record = {"corpus": words.summary, "device": device_name, "body": asdict(request.body), "bands": bands}
        typer.echo(json.dumps(record | {"rows": [row.record() for row in rows], "advice": advice(rows)}, indent=2))
        return
    for line in (words.summary, description, f"{request.body}; {device_name}"):
        typer.echo(line)
    _print(rows)
    typer.echo(advice(rows))


@dataclass(frozen=True)
class _Request:
    """A request to measure ends: the text, the model between the ends, and the device."""

    corpus: str
    body: Body
    device: str
    seconds: float
    data: Path | None

    def open(self, vocabulary: VocabularySettings) -> Dataset:
        """Return the text, split into the words or sub-words of a vocabulary."""
        from reefknot.lab.text.dataset import open_dataset

        def notify(text: str) -> None:
            typer.echo(text, err=True)

        return open_dataset(plain_corpus(self.corpus), vocabulary, data=self.data, notify=notify)

    def measure(self, end: str, types: int, bands: tuple[int, ...], in_this_process: bool) -> Row:
        """Count the parameters of an end, and measure it in this process or in a new one."""
        from reefknot.errors import ReefknotError
        from reefknot.lab.bench.advise import ENDS, Row, count, experiment, measure, vocabulary_of

        vocabulary = vocabulary_of(end, types)
        settings = experiment(end, self.corpus, self.body, vocabulary, bands, self.device)
        try:
            dataset = self.open(vocabulary)
        except ReefknotError as error:  # the package that learns sub-words may not be installed
            return Row(end, note=str(error))
        row = count(Row(end), settings, len(dataset.vocabulary))
        if in_this_process:
            return measure(row, settings, dataset, self.device, self.seconds)
        typer.echo(f"{end}: {ENDS[end]}", err=True)
        return _measure_in_new_process(row, self.command(end))

    def command(self, end: str) -> list[str]:
        """Return the command that measures one end, as a user would type it."""
        words = ["advise", self.corpus, "--end", end, "--seconds", str(self.seconds), "--device", self.device]
        words += [word for name, size in asdict(self.body).items() for word in (f"--{name}", str(size))]
        return [*words, *(["--data", str(self.data)] if self.data else []), "--json"]


def _measure_in_new_process(row: Row, command: list[str]) -> Row:
    """Return the row with the measurements of another process, or with a note if that process failed."""
    from reefknot.lab.bench.measure import OUT_OF_MEMORY

    done = subprocess.run([sys.executable, "-m", "reefknot", *command], capture_output=True, text=True)
    if done.returncode == 0:
        measured: dict[str, Any] = json.loads(done.stdout)["rows"][0]
        return replace(row, **measured)
    # The system kills a process that uses too much memory, without a message.
    killed = done.returncode < 0
    last_line = done.stderr.strip().splitlines()[-1:]
    return replace(row, note=f"killed, perhaps {OUT_OF_MEMORY}" if killed else " ".join(last_line))


def _print(rows: list[Row]) -> None:
    from reefknot.lab.cli.bench.printing import print_numbers

    lines = []
    for row in rows:
        memory = None if row.memory_bytes is None else row.memory_bytes / 2**20
        numbers = (row.ends_parameters, row.parameters, memory, row.tokens_per_second, row.words_per_second)
        lines.append([row.end, *("-" if number is None else f"{number:,.0f}" for number in numbers)])
    titles = ["end", "parameters of ends", "of the model", "MiB", "tokens/s", "words + line ends/s"]
    print_numbers(titles, lines, [(row.end, row.note) for row in rows])
