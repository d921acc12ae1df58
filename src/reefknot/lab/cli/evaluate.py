"""`reefknot evaluate`: score a text with a trained model, and print the exact definition of the score.

This file only declares the options and collects them in an `EvaluationRequest`. `lab/tasks/evaluate_language_model.py`
and `evaluate_translation.py` do the work.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from reefknot.lab.cli.options import BEAM_HELP, LENGTH_PENALTY_HELP, AsJson, Data, Device, Run, emit, warn_if_unfinished
from reefknot.lab.cli.progress import live_progress

EXAMPLES = """\b
Examples:
  reefknot evaluate runs/demo/tied/seed0 --split valid --context 60 --stride 20
  reefknot evaluate RUN --cache --search --search-tokens 30000 --save --json
  reefknot evaluate RUN --dynamic --dynamic-rate 0.0001
  reefknot evaluate TRANSLATOR --beam 10 --length-penalty 0.6 --save
"""

TEXT = "Text"
WINDOWS = "Context windows (language models)"
DYNAMIC = "Dynamic evaluation (language models)"
CACHE = "Cache (language models)"
MONTE_CARLO = "Monte Carlo dropout (language models)"
SEARCH = "Tuning of --dynamic and --cache (language models)"
TRANSLATION = "Beam search (translators)"
OUTPUT = "Output"

Split = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT,
        help="Text to score: train, valid or test. [default: test; valid and test with --save]",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT,
        help="Score only the start of the text: this many tokens, or sentence pairs for a translator. [default: the "
        "whole text]",
    ),
]
Streams = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT,
        help="Cut the text into this many contiguous streams, and read each from an empty state. Only for models that "
        "carry a state, such as LSTMs. [default: 1]",
    ),
]
Protocol = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT,
        help="Also compute the perplexity exactly as the code of a paper does: zaremba or awd. The value `definition` "
        "turns this off. [default: the run's setting evaluation.protocol]",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=0,
        rich_help_panel=WINDOWS,
        help="Number of context tokens that a window reads before the tokens that it scores. [default: chosen so "
        "that windows are as long as in training]",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=WINDOWS,
        help="Number of tokens that a window scores. With a smaller stride, tokens have more context and scoring takes "
        "longer. [default: chosen so that windows are as long as in training]",
    ),
]
Windows = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WINDOWS,
        help="Use windows of whole lines instead of --context and --stride: `lines` scores every line on its own, and "
        "`complete-L`, such as complete-512, scores blocks of complete lines with at most L tokens. [default: the "
        "run's setting]",
    ),
]
Dynamic = Annotated[
    bool,
    typer.Option(
        "--dynamic",
        rich_help_panel=DYNAMIC,
        help="Adapt the weights while reading the text: each segment is scored, and then the model is trained on it.",
    ),
]
DynamicRate = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Learning rate (eta in the paper). [default: 5e-5, or 0.002 with --dynamic-scale sum; multiplied by the "
        "segment length / 5]",
    ),
]
DynamicDecay = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Rate at which the weights decay back to the trained weights (lambda in the paper). [default: 0.002, or "
        "0.02 with --dynamic-scale sum; multiplied by the segment length / 5]",
    ),
]
DynamicEpsilon = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Each update is divided by the root mean square of the gradients plus this constant. [default: 2e-5, or "
        "0.001 with --dynamic-scale sum]",
    ),
]
DynamicScale = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="How squared gradients are combined over batches: `mean`, or `sum` as in the paper. It sets the scale of "
        "rate, decay and epsilon. [default: mean]",
    ),
]
DynamicSegment = Annotated[
    int | None,
    typer.Option(rich_help_panel=DYNAMIC, help="Number of tokens in a segment. [default: 5]"),
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache",
        rich_help_panel=CACHE,
        help="Mix the model with a cache, which predicts the words that followed similar hidden states earlier.",
    ),
]
CacheWeight = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE, help="Weight of the cache in the mixture, from 0 to less than 1. [default: 0.1]"
    ),
]
CacheTheta = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE,
        help="Sharpness of the cache. With 0, all stored words count equally. [default: 1]",
    ),
]
CacheWindow = Annotated[
    int | None,
    typer.Option(rich_help_panel=CACHE, help="Number of tokens that the cache stores. [default: 500]"),
]
CacheFill = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=CACHE,
        help="When the cache is used: `partial` uses it from the start of the text, and `full` only once it is full, "
        "like the code of AWD-LSTM. [default: partial]",
    ),
]
MonteCarlo = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="PASSES",
        rich_help_panel=MONTE_CARLO,
        help="Score with dropout: average the probabilities of this many passes over the text.",
    ),
]
MonteCarloSeed = Annotated[
    int | None,
    typer.Option(min=0, rich_help_panel=MONTE_CARLO, help="Random seed of the dropout masks. [default: 0]"),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        rich_help_panel=SEARCH,
        help="Before scoring, tune the settings of --dynamic or --cache that you do not set, on the validation text.",
    ),
]
SearchTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=SEARCH,
        help="Tune on this many tokens from the start of the validation text. [default: all of it]",
    ),
]
Beam = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TRANSLATION,
        help=BEAM_HELP,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=TRANSLATION,
        help=LENGTH_PENALTY_HELP,
    ),
]
Save = Annotated[
    bool,
    typer.Option(
        "--save",
        rich_help_panel=OUTPUT,
        help="Save the scores in RUN/evaluations. `reefknot table` and `report` show them.",
    ),
]


def evaluate(
    run: Run,
    split: Split = None,
    limit: Limit = None,
    streams: Streams = None,
    protocol: Protocol = None,
    context: Context = None,
    stride: Stride = None,
    windows: Windows = None,
    dynamic: Dynamic = False,
    dynamic_rate: DynamicRate = None,
    dynamic_decay: DynamicDecay = None,
    dynamic_epsilon: DynamicEpsilon = None,
    dynamic_scale: DynamicScale = None,
    dynamic_segment: DynamicSegment = None,
    cache: Cache = False,
    cache_weight: CacheWeight = None,
    cache_theta: CacheTheta = None,
    cache_window: CacheWindow = None,
    cache_fill: CacheFill = None,
    monte_carlo: MonteCarlo = None,
    monte_carlo_seed: MonteCarloSeed = None,
    search: Search = False,
    search_tokens: SearchTokens = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    save: Save = False,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a text with the best weights of a run, and print the definition of the score.

    A language model is scored by perplexity. By default, its weights are used as they are; --dynamic, --cache and
    --monte-carlo choose another mode of evaluation. A translator is scored by BLEU, chrF and perplexity.
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
    folder = RunFolder.open(run)
    with live_progress() as progress:
        evaluation = evaluate_run(folder, request, notify=partial(typer.echo, err=True), progress=progress)
    warn_if_unfinished(folder)
    emit(evaluation.record(), evaluation.text(), as_json)
