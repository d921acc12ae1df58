"""`reefknot evaluate`: perplexity with its definition; also with more context, and of a model that learns, remembers or
drops as it reads. Runs of translation are evaluated by `evaluate_translation.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from reefknot.lab.cli.evaluate_translation import evaluate_translator
from reefknot.lab.cli.options import AsJson, Data, Device, emit, given, open_language_model
from reefknot.lab.cli.progress import live_progress

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Grid, Progress
    from reefknot.lab.evaluation.perplexity import Score
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.runs.result import ProtocolName
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split

EXAMPLES = """\b
Examples:
  reefknot evaluate runs/demo/tied/seed0 --split valid --context 60 --stride 20
  reefknot evaluate RUN --cache --search --search-tokens 30000 --save --json
  reefknot evaluate TRANSLATOR --beam 10 --length-penalty 0.6 --save
"""

Given = Mapping[str, Any]
"""Options of one way to score, by their names; None where left out."""

ALWAYS = ("run", "split", "limit", "save", "data", "device", "as_json")
"""Arguments that have a meaning for every run."""
TRANSLATION = ("beam", "length_penalty")
"""Options for translators; all others are for language models."""
SEARCHED = {"--dynamic": ("eta", "lambda"), "--cache": ("weight", "theta", "window")}


def evaluate(
    invocation: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run folder.", hidden=True)],  # named above: a screen has no line more
    split: Annotated[str | None, typer.Option(help="train, valid or test (test; --save: last two).")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Parts, each from an empty state (1).")] = None,
    context: Annotated[int | None, typer.Option(min=0, help="Tokens read before the scored.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens scored per window (rest).")] = None,
    windows: Annotated[str | None, typer.Option(help="Or cut into complete-L or lines (the run's).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First so many tokens, or pairs, only.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Count as zaremba, awd, definition (the run's).")] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Learn from every segment once it is scored.")] = False,
    eta: Annotated[float | None, typer.Option(help="Dynamic: rate (5e-5; sum 0.002; x segment / 5).")] = None,
    decay: Annotated[
        float | None, typer.Option("--lambda", help="Dynamic: pull (0.002; sum 0.02; x segment / 5).")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Dynamic: least gradient (2e-5; sum 0.001).")] = None,
    scale: Annotated[str | None, typer.Option(help="Dynamic: of these, mean or sum (mean).")] = None,
    segment: Annotated[int | None, typer.Option(help="Dynamic: tokens of a segment (5).")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in words that followed similar states.")] = False,
    weight: Annotated[float | None, typer.Option(help="Cache: its share (0.1).")] = None,
    theta: Annotated[float | None, typer.Option(help="Cache: its sharpness (1.0).")] = None,
    window: Annotated[int | None, typer.Option(help="Cache: how far it looks back (500).")] = None,
    fill: Annotated[str | None, typer.Option(help="Cache: partial (at once), full (once filled).")] = None,
    mc: Annotated[int | None, typer.Option(min=1, help="Average so many passes with dropout.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="MC: of the masks (0).")] = None,
    search: Annotated[bool, typer.Option("--search", help="First tune what is not given, on valid.")] = False,
    search_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of valid for that (all).")] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Translation: hypotheses (the run's).")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Translation: of scores (the run's).")] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep these figures in RUN/evaluations.")] = False,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a text with a run's best weights, and say what the figure means."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.grid import beginning
    from reefknot.lab.evaluation.saved import save as keep
    from reefknot.lab.runs.folder import RunFolder

    task = RunFolder.open(run).task
    _check_options(invocation, run, task)
    if task == "translation":
        evaluate_translator(run, split, limit, beam, length_penalty, save, data, device, as_json)
        return
    options: dict[str, Given] = {
        "--dynamic": {"eta": eta, "lambda": decay, "epsilon": epsilon, "scale": scale, "segment": segment},
        "--cache": {"weight": weight, "theta": theta, "window": window, "fill": fill},
        "--mc": {"seed": seed},
    }
    cut: Given = {"context": context, "stride": stride, "windows": windows}
    ways = [way for way, asked in zip(options, (dynamic, cache, mc is not None), strict=True) if asked]
    _check(ways, options, streams=streams, search=search, search_tokens=search_tokens)
    _check_windows(cut, ways, streams)
    if protocol is not None:
        _check_protocol(protocol, ways, split, limit)
    trained = open_language_model(run, device)
    if save:
        _check_save(ways or [*_said(cut)], split, limit, trained)
    dataset = trained.dataset(data)
    if split is not None and split not in dataset.splits:
        raise SettingsError(f"--split {split}: must be one of {', '.join(dataset.splits)}")
    names = [split] if split else ["valid", "test"] if save else ["test"]
    texts = {name: beginning(dataset.splits[name], limit, trained.vocabulary) for name in names}
    _check_streams(streams, texts)
    searched = beginning(dataset.splits["valid"], search_tokens, trained.vocabulary) if search else None
    with live_progress() as progress:
        scoring = _Scoring(trained, dataset, searched, progress, _chosen(trained, cut, streams))
        if dynamic or cache:
            way = scoring.dynamic(options["--dynamic"]) if dynamic else scoring.cache(options["--cache"])
        else:
            way = scoring.plain(streams or 1) if mc is None else scoring.monte_carlo(mc, seed or 0)
        scores = {name: way.score(text) for name, text in texts.items()}
    told = [_figures(scoring, name, texts[name], score) for name, score in scores.items()]
    if not ways and limit is None:
        for name, found in zip(names, told, strict=True):
            _add(found, _as_the_paper_counts(trained, dataset, name, cast("ProtocolName | None", protocol)))
            _add(found, _as_training_recorded(scoring, name, streams or 1))
    if save:
        typer.echo(keep(trained.run, way.kind, way.settings, way.grid, scores), err=True)
    _tell(str(run), way, told, as_json)


def _check_options(invocation: typer.Context, run: Path, task: str) -> None:
    """Reject options that have no meaning for a run of this task."""
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import load_task

    for name, option in given(invocation):
        of = "translation" if name in TRANSLATION else "language_model"
        if name not in ALWAYS and of != task:
            nouns = load_task(of).noun, load_task(task).noun
            raise SettingsError(f"{option} is for {nouns[0]}, and {run} is {nouns[1]}; leave {option} out")


Told = tuple[dict[str, Any], list[str]]
"""Something found out: for programs, and in lines."""


def _tell(run: str, way: _Way, told: Sequence[Told], as_json: bool) -> None:
    """The figures of each text, after what was tried."""
    searched = {} if way.grid is None else {"search": way.grid.summary().record()}
    found = [{"run": run, **figures, **searched} for figures, _ in told]
    tried = [] if way.grid is None else [way.grid.table()]
    lines = [*tried, *(line for _, said in told for line in said)]
    emit(found[0] if len(found) == 1 else found, "\n".join(lines), as_json)


def _figures(scoring: _Scoring, split: str, text: Split, score: Score) -> Told:
    """The figures of a text, what they mean, and what belongs to them."""
    from reefknot.lab.evaluation.search import tails_opened
    from reefknot.lab.runs.definition import shown

    summary = score.summary()
    figures = {"split": split, **summary.record()}
    lines = [
        f"{split} perplexity {shown(summary.perplexity)}  word perplexity {shown(summary.per_word)}  "
        f"bits per byte {summary.bits_per_byte:.4f}",
        summary.definition,
    ]
    tokens, whole = text.tokens, scoring.dataset.splits[split].tokens
    if tokens < whole:
        figures["limit"] = tokens
        lines.append(f"limit: the first {tokens:,} of {whole:,} tokens only; bytes are in proportion")
    opened = tails_opened(scoring.trained.model, text, scoring.trained.vocabulary, scoring.windows)
    if opened is not None:
        figures["tails_opened"] = opened.record()
        lines.append(str(opened))
    return figures, lines


def _as_the_paper_counts(
    trained: TrainedLanguageModel, dataset: Dataset, split: str, asked: ProtocolName | None
) -> Told:
    """The figure as a paper's program counts it, where the run's settings or the user name one."""
    from reefknot.lab.evaluation.protocols import protocol, score_by_protocol
    from reefknot.lab.runs.definition import shown

    settings = trained.experiment
    name = asked or settings.evaluation.protocol
    countings = protocol(name, settings.training.batch, settings.training.steps) or {}
    if split not in countings:
        return {}, []
    counted = {split: countings[split]}
    found = score_by_protocol(name, trained.model, dataset.splits, counted, settings.training.precision)
    figure = found.valid if split == "valid" else found.test
    assert figure is not None
    return {"protocol": found.record()}, [
        f"counted as {name}: {split} perplexity {shown(figure.perplexity)}",
        found.definition,
    ]


def _add(told: Told, more: Told) -> None:
    told[0].update(more[0])
    told[1].extend(more[1])


def _as_training_recorded(scoring: _Scoring, split: str, streams: int) -> Told:
    """The figure in result.json, where it is another one because the text was cut in another way."""
    from reefknot.lab.runs.definition import shown
    from reefknot.lab.runs.modes import windows_in_full

    result, windows = scoring.trained.run.result, scoring.windows.name if scoring.windows else None
    recorded = result.score(split) if result else None
    if recorded is None or (recorded.windows, recorded.streams) == (windows, streams):
        return {}, []
    then = recorded.streams
    parts = "1 stream" if then == 1 else f"{then} streams, each of which begins without context"
    how = windows_in_full(recorded.windows) if recorded.windows else parts
    figures = recorded.model_dump(include={"perplexity", "streams", "windows"})
    return {"recorded": figures}, [f"training recorded {shown(recorded.perplexity)}, in {how}"]


def _check(
    ways: Sequence[str],
    given: Mapping[str, Given],
    *,
    streams: int | None,
    search: bool,
    search_tokens: int | None,
) -> None:
    """Refuse options that do not go together, before anything is opened."""
    from reefknot.errors import SettingsError

    if len(ways) > 1:
        raise SettingsError(f"{' and '.join(ways)}: a text is scored in one of these ways at a time; choose one")
    for way, options in given.items():
        for name, value in options.items():
            if value is not None and way not in ways:
                raise SettingsError(f"--{name} goes with {way}; add that or leave --{name} out")
    if ways and streams is not None:
        raise SettingsError(f"--streams: {ways[0]} reads the text in one stream; leave --streams out")
    if search_tokens is not None and not search:
        raise SettingsError("--search-tokens goes with --search; add that or leave --search-tokens out")
    if search and not set(ways) & set(SEARCHED):
        raise SettingsError(f"--search goes with {' or '.join(SEARCHED)}; add one of them or leave --search out")
    for way in ways if search else ():
        if all(given[way][name] is not None for name in SEARCHED[way]):
            fixed = ", ".join(f"--{name}" for name in SEARCHED[way])
            raise SettingsError(f"--search has nothing to look for: {fixed} are all given; leave one out")


def _check_windows(cut: Given, ways: Sequence[str], streams: int | None) -> None:
    """Refuse options of windows that contradict each other, or the others."""
    from reefknot.errors import SettingsError

    given = [f"--{name}" for name in _said(cut)]
    if "--windows" in given and len(given) > 1:
        raise SettingsError(f"{given[0]} and --windows: a text is cut in one way at a time; choose one")
    through = "--dynamic" if "--dynamic" in ways else "--streams" if streams is not None else None
    if given and through:
        raise SettingsError(f"{given[0]}: {through} reads a text through, with a state; leave one of both out")


def _check_streams(streams: int | None, texts: Mapping[str, Split]) -> None:
    from reefknot.errors import SettingsError

    for name, text in texts.items():
        if streams is not None and streams > text.tokens:
            raise SettingsError(
                f"--streams {streams:,}: the {name} text has {text.tokens:,} tokens; ask for so many at most"
            )


def _check_protocol(name: str, ways: Sequence[str], split: str | None, limit: int | None) -> None:
    from reefknot.errors import SettingsError
    from reefknot.lab.runs.result import ProtocolName

    known = get_args(ProtocolName)
    if name not in known:
        raise SettingsError(f"--protocol {name}: must be one of {', '.join(known)}")
    if ways or limit is not None or split == "train":
        option = ways[0] if ways else "--limit" if limit is not None else "--split train"
        raise SettingsError(
            f"--protocol: papers' programs score the whole valid or test text as it is; leave {option} out"
        )


def _check_save(ways: Sequence[str], split: str | None, limit: int | None, trained: TrainedLanguageModel) -> None:
    from reefknot.errors import SettingsError

    if not ways:
        raise SettingsError(
            "--save goes with --dynamic, --cache, --mc, --context, --stride or --windows: training has saved the plain "
            "figures"
        )
    if split == "train" or limit is not None:
        option = "--limit" if limit is not None else "--split train"
        raise SettingsError(f"--save keeps figures of the whole valid and test texts; leave {option} out")
    if trained.run.result is None:
        why = "this one was imported" if trained.run.imported else "train this one to its end first"
        raise SettingsError(f"--save keeps figures beside those of a run's training; {why}")


@dataclass(frozen=True)
class _Way:
    """One way to score a text, its settings chosen."""

    kind: str
    settings: dict[str, Any]
    score: Callable[[Split], Score]
    grid: Grid | None = None
    """Where the settings were found."""


@dataclass(frozen=True)
class _Scoring:
    """A model to score texts with, in one of several ways."""

    trained: TrainedLanguageModel
    dataset: Dataset
    searched: Split | None
    """What to tune settings on, if they are to be tuned."""
    progress: Progress
    windows: Windows | None
    """The pieces of a text that are computed afresh; None: it is read through."""

    def plain(self, streams: int) -> _Way:
        from reefknot.lab.evaluation.perplexity import score

        model, words, windows, precision = self.trained.model, self.trained.vocabulary, self.windows, self.precision
        return _Way(
            windows.name if windows else "plain",
            _named(windows) or {"streams": streams},
            lambda text: score(model, text, words, streams=streams, windows=windows, precision=precision),
        )

    def dynamic(self, given: Given) -> _Way:
        from reefknot.lab.config.settings import check
        from reefknot.lab.evaluation.dynamic import DynamicSettings, dynamic_score, gradient_statistics, search_rates

        settings = check(DynamicSettings, _said(given), "evaluate --dynamic")
        model, words, how = self.trained.model, self.trained.vocabulary, self.how
        statistics = gradient_statistics(model, self.dataset.splits["train"], **how)
        grid = None
        if self.searched is not None:
            settings, grid = search_rates(model, self.searched, words, statistics, settings, **how)
        rates = settings.rates()
        used = {"scale": rates.scale, "eta": rates.eta, "lambda": rates.decay, "epsilon": rates.epsilon}
        return _Way(
            "dynamic",
            used | {"segment": settings.segment},
            lambda text: dynamic_score(model, text, words, statistics, settings, **how),
            grid,
        )

    def cache(self, given: Given) -> _Way:
        from reefknot.lab.config.settings import check
        from reefknot.lab.evaluation.cache import CacheSettings, cache_score, search_cache

        settings = check(CacheSettings, _said(given), "evaluate --cache")
        model, words, how = self.trained.model, self.trained.vocabulary, self.how | {"windows": self.windows}
        grid = None
        if self.searched is not None:
            settings, grid = search_cache(model, self.searched, words, settings, **how)
        used = settings.model_dump() | _named(self.windows)
        return _Way("cache", used, lambda text: cache_score(model, text, words, settings, **how), grid)

    def monte_carlo(self, passes: int, seed: int) -> _Way:
        from reefknot.lab.evaluation.monte_carlo import monte_carlo_score

        model, words, how = self.trained.model, self.trained.vocabulary, self.how
        steps = self.trained.experiment.training.steps
        window = self.windows or steps
        return _Way(
            "mc",
            {"passes": passes, **(_named(self.windows) or {"window": steps}), "seed": seed},
            lambda text: monte_carlo_score(model, text, words, passes=passes, window=window, seed=seed, **how),
        )

    @property
    def precision(self) -> str:
        return self.trained.experiment.training.precision

    @property
    def how(self) -> dict[str, Any]:
        return {"precision": self.precision, "progress": self.progress}


def _chosen(trained: TrainedLanguageModel, given: Given, streams: int | None) -> Windows | None:
    """The windows that the options name, with what they leave out as the run has it; or else the run's own, but for
    streams that were asked for."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.windows import Sliding, named

    own, encoder = trained.experiment.windows, trained.model.encoder
    if given["windows"] is not None:
        return named(given["windows"])
    if said := _said(given):
        # What is left out fills the windows up to what the model has learned to read.
        length = own.context + own.stride if isinstance(own, Sliding) else trained.experiment.training.steps
        context = said.get("context", max(length - said.get("stride", length), 0))
        return Sliding(context, said.get("stride", max(length - context, 1)))
    if streams is None:
        return own
    if not encoder.carries:
        name = type(encoder).__name__
        raise SettingsError(f"--streams: a {name} carries no state from window to window; use --context and --stride")
    return None


def _named(windows: Windows | None) -> dict[str, str]:
    """Windows as settings and figures name them: not at all where there are none."""
    return {"windows": windows.name} if windows else {}


def _said(given: Given) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
