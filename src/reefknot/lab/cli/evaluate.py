"""`reefknot evaluate`: score a text with a trained model, and print the exact definition of the score.

The task of the run evaluates it: `lab/tasks/evaluate_language_model.py` and `evaluate_translation.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, Run, emit, note_unfinished
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
SEARCH = "Search for settings (language models)"
TRANSLATION = "Translation"
OUTPUT = "Output"

Split = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT,
        help="Text to score: train, valid or test. The default is test, or with --save both valid and test.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT,
        help="Number of tokens to score from the start of the text, or of pairs of sentences for a translator. By "
        "default, the whole text is scored.",
    ),
]
Streams = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TEXT,
        help="Number of contiguous streams that the text is cut into. Each stream is read from an empty state. The "
        "default is 1. Only for models that carry a state.",
    ),
]
Protocol = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TEXT,
        help="Also compute the perplexity like the code of a paper: zaremba or awd. The value `definition` turns this "
        "off. By default, the setting evaluation.protocol of the run is used.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=0,
        rich_help_panel=WINDOWS,
        help="Number of tokens that a window reads before the tokens that it scores. By default, windows are as long "
        "as the run's windows.",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=WINDOWS,
        help="Number of tokens that a window scores. A smaller stride gives tokens more context and takes longer. By "
        "default, windows are as long as the run's windows.",
    ),
]
Windows = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WINDOWS,
        help="Other windows, instead of --context and --stride: `lines` scores every line on its own, and "
        "`complete-L` scores blocks of whole lines with at most L tokens. By default, the windows of the run are used.",
    ),
]
Dynamic = Annotated[
    bool,
    typer.Option(
        "--dynamic",
        rich_help_panel=DYNAMIC,
        help="Adapt the weights to the text: every segment is scored first, and then the model learns from it.",
    ),
]
DynamicRate = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Learning rate, eta in the paper. The default is 5e-5, or 0.002 with --dynamic-scale sum, times the "
        "length of a segment divided by 5.",
    ),
]
DynamicDecay = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Rate at which the weights return to the trained weights, lambda in the paper. The default is 0.002, or "
        "0.02 with --dynamic-scale sum, times the length of a segment divided by 5.",
    ),
]
DynamicEpsilon = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Constant added to the root mean square of the gradients, by which an update is divided. The default is "
        "2e-5, or 0.001 with --dynamic-scale sum.",
    ),
]
DynamicScale = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=DYNAMIC,
        help="Scale of rate, decay and epsilon: `mean` averages the squared gradients over batches, `sum` adds them up "
        "as in the paper. The default is mean.",
    ),
]
DynamicSegment = Annotated[
    int | None,
    typer.Option(rich_help_panel=DYNAMIC, help="Number of tokens in a segment. The default is 5."),
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache",
        rich_help_panel=CACHE,
        help="Mix the model with a cache, which predicts words that followed similar hidden states before.",
    ),
]
CacheWeight = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE, help="Weight of the cache in the mixture, from 0 to less than 1. The default is 0.1."
    ),
]
CacheTheta = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CACHE,
        help="Sharpness of the cache. With 0, all stored words count equally. The default is 1.",
    ),
]
CacheWindow = Annotated[
    int | None,
    typer.Option(rich_help_panel=CACHE, help="Number of tokens that the cache stores. The default is 500."),
]
CacheFill = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=CACHE,
        help="When the cache is used: from the start of the text (partial), or only after the cache is full (full, as "
        "in the code of AWD-LSTM). The default is partial.",
    ),
]
MonteCarlo = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="PASSES",
        rich_help_panel=MONTE_CARLO,
        help="Number of passes over the text with dropout, whose probabilities are averaged.",
    ),
]
MonteCarloSeed = Annotated[
    int | None,
    typer.Option(min=0, rich_help_panel=MONTE_CARLO, help="Random seed of the dropout masks. The default is 0."),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        rich_help_panel=SEARCH,
        help="Before scoring, tune the settings of --dynamic or --cache that you do not set, on the valid text.",
    ),
]
SearchTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=SEARCH,
        help="Number of tokens of the valid text to tune on. By default, the whole valid text is used.",
    ),
]
Beam = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=TRANSLATION,
        help="Number of hypotheses that beam search keeps open. By default, the setting of the run is used.",
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=TRANSLATION,
        help="Exponent of the length penalty: score = log-probability / length ^ penalty. By default, the setting of "
        "the run is used.",
    ),
]
Save = Annotated[
    bool,
    typer.Option(
        "--save",
        rich_help_panel=OUTPUT,
        help="Save the scores in RUN/evaluations, where tables and reports read them.",
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

    A language model is scored by perplexity. --dynamic, --cache and --monte-carlo choose a mode of evaluation; the
    default is plain evaluation. A translator is scored by BLEU, chrF and perplexity.
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
        answer = evaluate_run(folder, request, notify=partial(typer.echo, err=True), progress=progress)
    note_unfinished(folder)
    emit(answer.record(), answer.text(), as_json)
