"""`reefknot advise`: which ends suit a text and a machine, by a short measurement of each.

Each end is measured in a process of its own, as `reefknot advise CORPUS --end END` measures it: its memory is its own,
and so is its death.
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


def advise(
    corpus: Annotated[str, typer.Argument(help="A corpus by its name, or a folder of train, valid and test text.")],
    end: Annotated[list[str] | None, typer.Option(help="SM, SM-T, BPE, BPE-T, ASM, CNN, ADP or ADP-T.")] = None,
    dim: Annotated[int | None, typer.Option(min=16, help="Width; else 512, on a CPU 128.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; else 6, on a CPU 2.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; else 8, on a CPU 4.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Feed-forward units; else 2048, on a CPU 512.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens per update; else 4096, on a CPU 512.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing per end.")] = 1.0,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare the ends of Baevski & Auli (2019) for a text, on this machine: parameters, memory, speed."""
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.advise import BODIES, ENDS, advice, choose_bands
    from reefknot.lab.runs.environment import capture
    from reefknot.lab.text.vocabulary import VocabularySettings
    from reefknot.lab.training.distributed import choose_device

    for name in end or []:
        if name not in ENDS:
            raise SettingsError(f"--end {name}: must be one of {', '.join(ENDS)}")
    place = choose_device(device)
    given = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn, "tokens": tokens}
    body = replace(BODIES[place], **{name: size for name, size in given.items() if size is not None})
    asked = _Asked(corpus, body, place, seconds, data)
    words = asked.open(VocabularySettings())
    asked = replace(asked, body=body.within(words.splits["train"].tokens))
    sizes, bands = choose_bands(words.vocabulary)
    chosen = list(dict.fromkeys(end or ENDS))
    rows = [asked.row(name, len(words.vocabulary), sizes, here=len(chosen) == 1) for name in chosen]
    machine = capture()
    name = machine["gpus"][0] if place == "cuda" else machine["cpu"]
    if as_json:
        found = {"corpus": words.summary, "device": name, "body": asdict(asked.body), "bands": sizes}
        typer.echo(json.dumps(found | {"rows": [row.record() for row in rows], "advice": advice(rows)}, indent=2))
        return
    for line in (words.summary, bands, f"{asked.body}; {name}"):
        typer.echo(line)
    _print(rows)
    typer.echo(advice(rows))


@dataclass(frozen=True)
class _Asked:
    """What is to be measured, on what."""

    corpus: str
    body: Body
    place: str
    seconds: float
    data: Path | None

    def open(self, vocabulary: VocabularySettings) -> Dataset:
        """The text, in words or in pieces of them."""
        from reefknot.lab.text.dataset import open_dataset

        def say(text: str) -> None:
            typer.echo(text, err=True)

        return open_dataset(plain_corpus(self.corpus), vocabulary, data=self.data, say=say)

    def row(self, end: str, types: int, sizes: tuple[int, ...], here: bool) -> Row:
        """One end: counted here, measured here or in a process of its own."""
        from reefknot.errors import ReefknotError
        from reefknot.lab.bench.advise import ENDS, Row, count, experiment, measure, vocabulary_of

        vocabulary = vocabulary_of(end, types)
        settings = experiment(end, self.corpus, self.body, vocabulary, sizes, self.place)
        try:
            dataset = self.open(vocabulary)
        except ReefknotError as error:  # what cuts words into pieces may not be installed
            return Row(end, note=str(error))
        row = count(Row(end), settings, len(dataset.vocabulary))
        if here:
            return measure(row, settings, dataset, self.place, self.seconds)
        typer.echo(f"{end}: {ENDS[end]}", err=True)
        return _measured_apart(row, self.command(end))

    def command(self, end: str) -> list[str]:
        """What measures one end, as a user would type it."""
        words = ["advise", self.corpus, "--end", end, "--seconds", str(self.seconds), "--device", self.place]
        words += [word for name, size in asdict(self.body).items() for word in (f"--{name}", str(size))]
        return [*words, *(["--data", str(self.data)] if self.data else []), "--json"]


def _measured_apart(row: Row, command: list[str]) -> Row:
    """The row as another process finds it, or why that one found nothing."""
    from reefknot.lab.bench.measure import OUT_OF_MEMORY

    done = subprocess.run([sys.executable, "-m", "reefknot", *command], capture_output=True, text=True)
    if done.returncode == 0:
        measured: dict[str, Any] = json.loads(done.stdout)["rows"][0]
        return replace(row, **measured)
    # The system kills what takes too much of its memory, and lets it say nothing.
    killed = done.returncode < 0
    last = done.stderr.strip().splitlines()[-1:]
    return replace(row, note=f"killed, perhaps {OUT_OF_MEMORY}" if killed else " ".join(last))


def _print(rows: list[Row]) -> None:
    from reefknot.lab.cli.bench import print_figures

    lines = []
    for row in rows:
        memory = None if row.memory_bytes is None else row.memory_bytes / 2**20
        figures = (row.ends_parameters, row.parameters, memory, row.tokens_per_second, row.words_per_second)
        lines.append([row.end, *("-" if figure is None else f"{figure:,.0f}" for figure in figures)])
    titles = ["end", "parameters of ends", "of all", "MiB", "tokens/s", "words + line ends/s"]
    print_figures(titles, lines, [(row.end, row.note) for row in rows])
