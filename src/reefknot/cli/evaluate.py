"""`reefknot evaluate`: perplexity with its definition; also of a model that learns, remembers or drops as it reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.cli.options import AsJson, Data, Device, Run, emit, open_trained

if TYPE_CHECKING:
    from reefknot.evaluation.grid import Grid, Progress
    from reefknot.evaluation.perplexity import Score
    from reefknot.experiments import TrainedRun
    from reefknot.text.dataset import Dataset, Split

EXAMPLES = """\b
Examples:
  reefknot evaluate runs/demo/tied/seed0 --split valid --streams 20 --json
  reefknot evaluate RUN --dynamic --search --search-tokens 30000
  reefknot evaluate RUN --cache --search --window 500
"""

Given = Mapping[str, Any]
"""Options of one way to score, by their names; None where left out."""

SEARCHED = {"--dynamic": ("eta", "lambda"), "--cache": ("weight", "theta", "window")}


def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    streams: Annotated[int | None, typer.Option(min=1, help="Parts side by side, each from an empty state.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first so many tokens only.")] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Learn from every segment once it is scored.")] = False,
    eta: Annotated[float | None, typer.Option(help="Dynamic: rate of learning (5e-5).")] = None,
    decay: Annotated[float | None, typer.Option("--lambda", help="Dynamic: pull back (0.002).")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Dynamic: least gradient (2e-5).")] = None,
    scale: Annotated[str | None, typer.Option(help="Dynamic: of these, mean or sum (mean).")] = None,
    segment: Annotated[int | None, typer.Option(help="Dynamic: tokens of a segment (5).")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in words that followed similar states.")] = False,
    weight: Annotated[float | None, typer.Option(help="Cache: its share (0.1).")] = None,
    theta: Annotated[float | None, typer.Option(help="Cache: its sharpness (1.0).")] = None,
    window: Annotated[int | None, typer.Option(help="Cache: how far it looks back (500).")] = None,
    fill: Annotated[str | None, typer.Option(help="Cache: used partial or full (partial).")] = None,
    mc: Annotated[int | None, typer.Option(min=1, help="Average so many passes with dropout.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="MC: of the masks (0).")] = None,
    search: Annotated[bool, typer.Option("--search", help="First tune what is not given, on valid.")] = False,
    search_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of valid for that (all).")] = None,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a text with a run's best weights and say exactly what the figure means."""
    from reefknot.errors import SettingsError
    from reefknot.evaluation.grid import beginning

    given: dict[str, Given] = {
        "--dynamic": {"eta": eta, "lambda": decay, "epsilon": epsilon, "scale": scale, "segment": segment},
        "--cache": {"weight": weight, "theta": theta, "window": window, "fill": fill},
        "--mc": {"seed": seed},
    }
    ways = [way for way, asked in zip(given, (dynamic, cache, mc is not None), strict=True) if asked]
    _check(ways, given, streams=streams, search=search, search_tokens=search_tokens)
    trained = open_trained(run, device)
    dataset = trained.dataset(data)
    if split not in dataset.splits:
        raise SettingsError(f"--split {split}: must be one of {', '.join(dataset.splits)}")
    text = beginning(dataset.splits[split], limit, trained.vocabulary)
    searched = beginning(dataset.splits["valid"], search_tokens, trained.vocabulary) if search else None
    grid = None
    with _progress() as progress:
        scoring = _Scoring(trained, dataset, text, searched, progress)
        if dynamic:
            score, grid = scoring.dynamic(given["--dynamic"])
        elif cache:
            score, grid = scoring.cache(given["--cache"])
        else:
            score = scoring.plain(streams or 1) if mc is None else scoring.monte_carlo(mc, seed or 0)
    _tell({"run": str(run), "split": split}, scoring, score, grid, as_json)


def _tell(about: dict[str, Any], scoring: _Scoring, score: Score, grid: Grid | None, as_json: bool) -> None:
    """The figures, what they mean, and what belongs to them."""
    from reefknot.evaluation.search import tails_opened

    figures = score.summary()
    lines = [
        f"{about['split']} perplexity {figures['perplexity']:.2f}  word perplexity {figures['word_perplexity']:.2f}  "
        f"bits per byte {figures['bits_per_byte']:.4f}",
        score.definition,
    ]
    tokens, whole = scoring.text.tokens, scoring.dataset.splits[about["split"]].tokens
    if tokens < whole:
        figures["limit"] = tokens
        lines.append(f"limit: the first {tokens:,} of {whole:,} tokens only; bytes are in proportion")
    if grid is not None:
        figures["search"] = grid.record()
        lines = [grid.table(), *lines]
    opened = tails_opened(scoring.trained.model, scoring.text)
    if opened is not None:
        figures["tails_opened"] = asdict(opened)
        lines.append(str(opened))
    emit(about | figures, "\n".join(lines), as_json)


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


@contextmanager
def _progress() -> Iterator[Progress]:
    """How far things are, on stderr: stdout is the result's."""
    from reefknot.training.display import open_display, progress_line

    began: dict[str, float] = {}
    with redirect_stdout(sys.stderr):
        display = open_display()

        def tell(what: str, done: float) -> None:
            now = time.monotonic()
            passed = now - began.setdefault(what, now)
            if done > 0:
                display.update(progress_line(what, {}, done, passed * (1 - done) / done))

        try:
            yield tell
        finally:
            display.close()


@dataclass(frozen=True)
class _Scoring:
    """One text to score, in one of several ways."""

    trained: TrainedRun
    dataset: Dataset
    text: Split
    searched: Split | None
    """What to tune settings on, if they are to be tuned."""
    progress: Progress

    def plain(self, streams: int) -> Score:
        from reefknot.evaluation.perplexity import score

        trained = self.trained
        return score(trained.model, self.text, trained.vocabulary, streams=streams, precision=self.precision)

    def dynamic(self, given: Given) -> tuple[Score, Grid | None]:
        from reefknot.evaluation.dynamic import DynamicSettings, dynamic_score, gradient_statistics, search_rates
        from reefknot.settings import check

        settings = check(DynamicSettings, _said(given), "evaluate --dynamic")
        model, words, how = self.trained.model, self.trained.vocabulary, self.how
        statistics = gradient_statistics(model, self.dataset.splits["train"], **how)
        grid = None
        if self.searched is not None:
            settings, grid = search_rates(model, self.searched, words, statistics, settings, **how)
        return dynamic_score(model, self.text, words, statistics, settings, **how), grid

    def cache(self, given: Given) -> tuple[Score, Grid | None]:
        from reefknot.evaluation.cache import CacheSettings, cache_score, search_cache
        from reefknot.settings import check

        settings = check(CacheSettings, _said(given), "evaluate --cache")
        model, words, how = self.trained.model, self.trained.vocabulary, self.how
        grid = None
        if self.searched is not None:
            settings, grid = search_cache(model, self.searched, words, settings, **how)
        return cache_score(model, self.text, words, settings, **how), grid

    def monte_carlo(self, passes: int, seed: int) -> Score:
        from reefknot.evaluation.monte_carlo import monte_carlo_score

        trained = self.trained
        steps = trained.experiment.training.steps
        return monte_carlo_score(
            trained.model, self.text, trained.vocabulary, passes=passes, window=steps, seed=seed, **self.how
        )

    @property
    def precision(self) -> str:
        return self.trained.experiment.training.precision

    @property
    def how(self) -> dict[str, Any]:
        return {"precision": self.precision, "progress": self.progress}


def _said(given: Given) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
