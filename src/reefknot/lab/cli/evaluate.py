"""`reefknot evaluate`: score a text with a trained model, and print the exact definition of the score.

This file only declares the options: a type for each option (`SplitOption` for `--split`), then `evaluate`, which
collects the values in an `EvaluationRequest`. `lab/tasks/evaluate_language_model.py` and
`lab/tasks/evaluate_translation.py` do the work.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    BEAM_HELP,
    LENGTH_PENALTY_HELP,
    CheckOption,
    DataOption,
    DeviceOption,
    JsonOption,
    OtherEncodingOption,
    OtherFieldOption,
    OtherTextOption,
    RunArgument,
    open_language_model,
    print_result,
    warn_if_unfinished,
)
from reefknot.lab.cli.progress import live_progress

if TYPE_CHECKING:
    from reefknot.lab.tasks.requests import EvaluationRequest

EXAMPLES = """\b
Examples:
  reefknot evaluate runs/demo/tied/seed0 --split valid --context 60 --stride 20
  reefknot evaluate RUN --text news.txt.gz                     # another text
  reefknot evaluate RUN --cache --search --search-tokens 30000 --save --json
  reefknot evaluate RUN --dynamic --dynamic-rate 0.0001
  reefknot evaluate TRANSLATOR --beam 10 --length-penalty 0.6 --save
  reefknot evaluate RUN --harness lambada_openai,hellaswag --limit 200
"""

TEXT_PANEL = "Text"
WINDOWS_PANEL = "Context windows (language models)"
DYNAMIC_PANEL = "Dynamic evaluation (language models)"
CACHE_PANEL = "Cache (language models)"
MONTE_CARLO_PANEL = "Monte Carlo dropout (language models)"
SEARCH_PANEL = "Tuning of --dynamic and --cache (language models)"
TRANSLATION_PANEL = "Beam search (translators)"
HARNESS_PANEL = "Tasks of lm-eval (language models)"
OUTPUT_PANEL = "Output"
"""Headings of the help page. Every option is listed under one of these panels."""

SplitOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT_PANEL,
        help="Text to score: train, valid or test. [default: test; valid and test with --save]",
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT_PANEL,
        help="Score only the start of the text: this many tokens, sentence pairs for a translator, or documents with "
        "--harness. [default: the whole text]",
    ),
]
StreamsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT_PANEL,
        help="Cut the text into this many contiguous streams, and read each from an empty state. Only for models that "
        "carry a state, such as LSTMs. [default: 1]",
    ),
]
ProtocolOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT_PANEL,
        help="Also compute the perplexity exactly as the code of a paper does: zaremba or awd. The value `definition` "
        "turns this off. [default: the run's setting evaluation.protocol]",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        rich_help_panel=WINDOWS_PANEL,
        help="Number of context tokens that a window reads before the tokens that it scores. [default: chosen so "
        "that windows are as long as in training]",
    ),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=WINDOWS_PANEL,
        help="Number of tokens that a window scores. With a smaller stride, tokens have more context and scoring takes "
        "longer. [default: chosen so that windows are as long as in training]",
    ),
]
WindowsOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WINDOWS_PANEL,
        help="Use windows of whole lines instead of --context and --stride: `lines` scores every line on its own, and "
        "`complete-L`, such as complete-512, scores blocks of complete lines with at most L tokens. "
        "`context-C-complete-L` scores such blocks after C tokens of context. [default: the run's setting]",
    ),
]
DynamicOption = Annotated[
    bool,
    typer.Option(
        "--dynamic",
        rich_help_panel=DYNAMIC_PANEL,
        help="Adapt the weights while reading the text: each segment is scored, and then the model is trained on it.",
    ),
]
DynamicRateOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC_PANEL,
        help="Learning rate (eta in the paper). [default: 5e-5, or 0.002 with --dynamic-scale sum; multiplied by the "
        "segment length / 5]",
    ),
]
DynamicDecayOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC_PANEL,
        help="Rate at which the weights decay back to the trained weights (lambda in the paper). [default: 0.002, or "
        "0.02 with --dynamic-scale sum; multiplied by the segment length / 5]",
    ),
]
DynamicEpsilonOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC_PANEL,
        help="Each update is divided by the root mean square of the gradients plus this constant. [default: 2e-5, or "
        "0.001 with --dynamic-scale sum]",
    ),
]
DynamicScaleOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=DYNAMIC_PANEL,
        help="How squared gradients are combined over batches: `mean`, or `sum` as in the paper. It sets the scale of "
        "rate, decay and epsilon. [default: mean]",
    ),
]
DynamicSegmentOption = Annotated[
    int | None,
    typer.Option(rich_help_panel=DYNAMIC_PANEL, help="Number of tokens in a segment. [default: 5]"),
]
CacheOption = Annotated[
    bool,
    typer.Option(
        "--cache",
        rich_help_panel=CACHE_PANEL,
        help="Mix the model with a cache, which predicts the words that followed similar hidden states earlier.",
    ),
]
CacheWeightOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE_PANEL, help="Weight of the cache in the mixture, from 0 to less than 1. [default: 0.1]"
    ),
]
CacheThetaOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE_PANEL,
        help="Sharpness of the cache. With 0, all stored words count equally. [default: 1]",
    ),
]
CacheWindowOption = Annotated[
    int | None,
    typer.Option(rich_help_panel=CACHE_PANEL, help="Number of tokens that the cache stores. [default: 500]"),
]
CacheFillOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=CACHE_PANEL,
        help="When the cache is used: `partial` uses it from the start of the text, and `full` only once it is full, "
        "like the code of AWD-LSTM. [default: partial]",
    ),
]
MonteCarloOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="PASSES",
        rich_help_panel=MONTE_CARLO_PANEL,
        help="Score with dropout: average the probabilities of this many passes over the text.",
    ),
]
MonteCarloSeedOption = Annotated[
    int | None,
    typer.Option(min=0, rich_help_panel=MONTE_CARLO_PANEL, help="Random seed of the dropout masks. [default: 0]"),
]
SearchOption = Annotated[
    bool,
    typer.Option(
        "--search",
        rich_help_panel=SEARCH_PANEL,
        help="Before scoring, tune the settings of --dynamic or --cache that you do not set, on the validation text.",
    ),
]
SearchTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=SEARCH_PANEL,
        help="Tune on this many tokens from the start of the validation text. [default: all of it]",
    ),
]
BeamOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TRANSLATION_PANEL,
        help=BEAM_HELP,
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=TRANSLATION_PANEL,
        help=LENGTH_PENALTY_HELP,
    ),
]
HarnessOption = Annotated[
    str | None,
    typer.Option(
        metavar="TASKS",
        rich_help_panel=HARNESS_PANEL,
        help="Evaluate on tasks of the Language Model Evaluation Harness (lm-eval), separated by commas, instead of a "
        "split.",
    ),
]
IncludePathOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", rich_help_panel=HARNESS_PANEL, help="Folder with YAML files of your own tasks."),
]
SaveOption = Annotated[
    bool,
    typer.Option(
        "--save",
        rich_help_panel=OUTPUT_PANEL,
        help="Save the scores in RUN/evaluations, where `reefknot table` and `report` show them, or in RUN/texts with "
        "--text.",
    ),
]


def evaluate(
    run: RunArgument,
    split: SplitOption = None,
    limit: LimitOption = None,
    streams: StreamsOption = None,
    protocol: ProtocolOption = None,
    context: ContextOption = None,
    stride: StrideOption = None,
    windows: WindowsOption = None,
    dynamic: DynamicOption = False,
    dynamic_rate: DynamicRateOption = None,
    dynamic_decay: DynamicDecayOption = None,
    dynamic_epsilon: DynamicEpsilonOption = None,
    dynamic_scale: DynamicScaleOption = None,
    dynamic_segment: DynamicSegmentOption = None,
    cache: CacheOption = False,
    cache_weight: CacheWeightOption = None,
    cache_theta: CacheThetaOption = None,
    cache_window: CacheWindowOption = None,
    cache_fill: CacheFillOption = None,
    monte_carlo: MonteCarloOption = None,
    monte_carlo_seed: MonteCarloSeedOption = None,
    search: SearchOption = False,
    search_tokens: SearchTokensOption = None,
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    harness: HarnessOption = None,
    include_path: IncludePathOption = None,
    save: SaveOption = False,
    text: OtherTextOption = None,
    field: OtherFieldOption = None,
    encoding: OtherEncodingOption = None,
    data: DataOption = None,
    check: CheckOption = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Score a text with the best weights of a run, and print the definition of the score.

    A language model is scored by perplexity. By default, its weights are used as they are; --dynamic, --cache and
    --monte-carlo choose another mode of evaluation. A translator is scored by BLEU, chrF and perplexity. --harness
    evaluates a language model on tasks of lm-eval.
    """
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks import evaluate_run
    from reefknot.lab.tasks.requests import EvaluationRequest

    request = EvaluationRequest(
        split=split,
        limit=limit,
        save=save,
        data=data,
        device=device,
        text=text,
        field=field,
        encoding=encoding,
        context=context,
        stride=stride,
        windows=windows,
        streams=streams,
        protocol=protocol,
        dynamic=dynamic,
        dynamic_rate=dynamic_rate,
        dynamic_decay=dynamic_decay,
        dynamic_epsilon=dynamic_epsilon,
        dynamic_scale=dynamic_scale,
        dynamic_segment=dynamic_segment,
        cache=cache,
        cache_weight=cache_weight,
        cache_theta=cache_theta,
        cache_window=cache_window,
        cache_fill=cache_fill,
        monte_carlo=monte_carlo,
        monte_carlo_seed=monte_carlo_seed,
        search=search,
        search_tokens=search_tokens,
        beam=beam,
        length_penalty=length_penalty,
    )
    if harness is not None or include_path is not None:
        _evaluate_harness(run, harness, include_path, request, as_json)
        return
    run_folder = RunFolder.open(run)
    with live_progress() as progress:
        evaluation = evaluate_run(run_folder, request, notify=partial(typer.echo, err=True), progress=progress)
    warn_if_unfinished(run_folder)
    print_result(evaluation.record(), evaluation.text(), as_json)


def _evaluate_harness(
    run: Path, tasks: str | None, include_path: Path | None, request: EvaluationRequest, as_json: bool
) -> None:
    """Evaluate a language model on tasks of lm-eval, and print the scores."""
    from reefknot.errors import SettingsError
    from reefknot.extras import require_extra

    if tasks is None:
        raise SettingsError("--include-path has no effect without --harness; add --harness or leave --include-path out")
    request.reject_unused({"limit", "device"}, "tasks of the harness", for_all_tasks=False)
    require_extra("harness", "--harness")
    trained = open_language_model(run, request.device)
    from reefknot.lab.interop.harness import evaluate_harness

    evaluation = evaluate_harness(trained, tasks, include_path, request.limit)
    print_result(evaluation.record(), evaluation.text(), as_json)
