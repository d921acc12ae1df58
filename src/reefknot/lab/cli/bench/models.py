"""`reefknot bench models`: measure training steps of Hugging Face models with reefknot's loss and with other losses.

This subcommand parses the options and prints the results; `lab/bench/models.py` does the measuring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.errors import SettingsError
from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFileOption, SecondsOption, check_memory, check_names, open_record
from reefknot.lab.cli.options import DeviceOption

if TYPE_CHECKING:
    from reefknot.lab.bench.models import Row

EXAMPLES = """\b
Examples:
  reefknot bench models --largest 256 --json models.json
  reefknot bench models --model qwen2.5-0.5b --competitor reefknot --memory 256 --competitor liger-loss
  reefknot bench models --model tiny --batch 2 --length 64 --device cpu
"""


def models(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model to measure, with random weights: qwen2.5-0.5b, gemma-2-2b or tiny. Can be repeated. "
            "[default: both large models on a GPU, tiny on a CPU]"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers. [default: all layers of the model]", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Number of tokens of a sequence.")] = 2048,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Implementation of attention, for all competitors: eager, sdpa or flex_attention. "
            "[default: the default of transformers for the model]"
        ),
    ] = None,
    competitor: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to measure: transformers, reefknot, liger-loss, liger or trl. Can be repeated. "
            "[default: all]"
        ),
    ] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(
            help="Also measure reefknot with this working memory, in MiB. Can be repeated. [default: only reefknot's "
            "default]"
        ),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also search for the largest batch that fits in memory, up to this number. Needs a GPU.",
            show_default=False,
        ),
    ] = None,
    seconds: SecondsOption = 5.0,
    json: RecordFileOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure Hugging Face models with several losses: tokens per second, memory, and gradient error.

    A step is a forward pass with the loss and a backward pass, without an optimiser. Every competitor runs in its own
    process.
    """
    from reefknot.extras import require_extra
    from reefknot.lab.bench.models import (
        DEFAULT_MODELS,
        FAMILIES,
        PRESETS,
        Bench,
        Competitor,
        describe_machine,
        measure_model,
    )

    # Check the options.
    check_names("--model", model or [], tuple(PRESETS))
    check_names("--competitor", competitor or [], tuple(FAMILIES))
    check_names("--attention", [attention] if attention else [], ("eager", "sdpa", "flex_attention"))
    require_extra("hf", "reefknot bench models")
    families = competitor or list(FAMILIES)
    check_memory(memory or [], families)
    record = open_record("models", device, json)
    if largest and record.device == "cpu":
        raise SettingsError("--largest needs a GPU, but this benchmark runs on a CPU; leave --largest out or use a GPU")

    # Print the header. If the benchmark is stopped, its record says which models were not reached.
    names = model or DEFAULT_MODELS[record.device]
    unmeasured = dict.fromkeys(names, "not reached")
    machine = describe_machine(record.device)
    notes = [f"{package} {machine[package] or 'absent'}" for package in ("transformers", "liger_kernel", "trl")]
    record.print_header(machine, [*notes, machine["dtype"]], not_measured=unmeasured)
    record.print("a step is a forward and a backward pass, without optimiser and without gradient checkpointing")

    # Measure every model, record each row at once, and print one table per model.
    settings = Bench(record.device, batch, length, layers, attention, largest, seconds)
    competitors = []
    for family in families:
        competitors.append(Competitor(family))
        if family == "reefknot":
            competitors += [Competitor(family, budget) for budget in memory or []]
    for name in names:
        del unmeasured[name]
        rows = []
        for row in measure_model(settings, name, competitors, record.print_progress):
            rows.append(row)
            record.add([row.record()])
        record.print_table(_format_heading(rows), rows, _format_cells, hide_empty=True)


def _format_heading(rows: list[Row]) -> str:
    """Return the line above a table: the model, its size and the batch."""
    details = [rows[0].model]
    built_row = next((row for row in rows if row.parameters is not None), None)
    if built_row is not None:
        layers = "1 layer" if built_row.layers == 1 else f"{built_row.layers} layers"
        details += [layers, f"{built_row.parameters:,} parameters", f"{built_row.attention} attention"]
    return f"{', '.join(details)}: {rows[0].batch:,} x {rows[0].length:,} tokens"


def _format_cells(row: Row) -> dict[str, str]:
    """Return the cells by column title."""
    return {
        "competitor": row.competitor,
        "ms": printing.format_number(row.ms),
        "tokens/s": printing.format_integer(row.tokens_per_second),
        "x transformers": printing.format_number(row.over_baseline),
        "peak MiB": printing.format_integer(row.peak_mib),
        "over MiB": printing.format_number(row.over_mib),
        "largest batch": printing.format_integer(row.largest_batch),
        "loss": "" if row.loss is None else f"{row.loss:.4f}",
        "loss error": printing.format_error(row.loss_error),
        "gradient error": printing.format_error(row.worst_error),
    }
