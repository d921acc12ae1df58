"""The modes in which a language model scores a text: plain, dynamic evaluation, a cache, Monte-Carlo dropout.

A mode gets its settings from an `EvaluationRequest`. With `--search`, the settings that are missing from the request
are tuned on the validation text first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Settings, validate
from reefknot.lab.evaluation.grid import shorten_split
from reefknot.lab.tasks.requests import EvaluationRequest, option

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Grid, Progress
    from reefknot.lab.evaluation.perplexity import Score
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split

S = TypeVar("S", bound=Settings)

MODES = ("dynamic", "cache", "monte_carlo")
"""Fields of a request that choose a mode other than the plain mode. The options of a mode start with its name."""
SEARCHED = {
    "dynamic": ("dynamic_rate", "dynamic_decay"),
    "cache": ("cache_weight", "cache_theta", "cache_window"),
}
"""Options that `--search` tunes, by mode."""
DYNAMIC_SETTINGS = {"rate": "eta", "decay": "lambda"}
"""Options of dynamic evaluation whose settings are named after the paper's symbols."""


@dataclass(frozen=True)
class Mode:
    """A mode of evaluation with all its settings."""

    kind: str
    """Name that the scores are saved under."""
    settings: dict[str, Any]
    """Settings that are saved with the scores."""
    score: Callable[[Split], Score]
    grid: Grid | None = None
    """The grid search that chose the settings; None if there was no search."""


def requested_modes(request: EvaluationRequest) -> list[str]:
    """Return the modes that a request names; an empty list stands for the plain mode."""
    return [mode for mode in MODES if mode in request.given_options()]


def check_modes(request: EvaluationRequest) -> None:
    """Raise an error if the request names several modes, or options of a mode that it does not name."""
    modes = requested_modes(request)
    if len(modes) > 1:
        raise SettingsError(f"{' and '.join(map(option, modes))}: a text is scored in one mode at a time; choose one")
    for mode in MODES:
        for name in request.given_options(f"{mode}_"):
            if mode not in modes:
                _raise_without(name, option(mode))
    if modes and request.streams is not None:
        raise SettingsError(f"--streams: {option(modes[0])} reads the text in one stream; leave --streams out")
    if request.search_tokens is not None and not request.search:
        _raise_without("search_tokens", "--search")
    if request.search and not set(modes) & set(SEARCHED):
        _raise_without("search", " or ".join(map(option, SEARCHED)))
    for mode in modes if request.search else ():
        if set(SEARCHED[mode]) <= set(request.given_options()):
            fixed = ", ".join(map(option, SEARCHED[mode]))
            raise SettingsError(f"--search has nothing to tune, because {fixed} are all given; leave one of them out")


def check_windows(request: EvaluationRequest) -> None:
    """Raise an error if window options conflict with each other, or with options that carry a state."""
    names = [name for name in ("context", "stride", "windows") if name in request.given_options()]
    if "windows" in names and len(names) > 1:
        raise SettingsError(f"{option(names[0])} and --windows both set the windows of the text; choose one")
    stateful = "--dynamic" if request.dynamic else "--streams" if request.streams is not None else None
    if names and stateful:
        raise SettingsError(
            f"{option(names[0])}: {stateful} carries a state through the text, so it cannot be combined with windows; "
            "choose one"
        )


def _raise_without(name: str, needed: str) -> None:
    raise SettingsError(f"{option(name)} has no effect without {needed}; add {needed} or leave {option(name)} out")


@dataclass(frozen=True)
class ModeChooser:
    """Chooses the mode that a request asks for, for one trained model."""

    trained: TrainedLanguageModel
    dataset: Dataset
    request: EvaluationRequest
    progress: Progress

    def choose(self) -> Mode:
        """Return the mode that the request names. With `--search`, first search for its settings."""
        if self.request.dynamic:
            return self._dynamic()
        if self.request.cache:
            return self._cache()
        return self._plain() if self.request.monte_carlo is None else self._monte_carlo(self.request.monte_carlo)

    @property
    def windows(self) -> Windows | None:
        """The windows in which the text is read; None if the state is carried through the text.

        If `--context` or `--stride` is missing, its value follows from the run. If all options of windows are missing,
        the windows of the run are used.
        """
        from reefknot.lab.evaluation.windows import Sliding, parse_windows

        request, run_windows = self.request, self.trained.experiment.windows
        if request.windows is not None:
            return parse_windows(request.windows)
        if request.context is not None or request.stride is not None:
            # The missing value is chosen so that windows are as long as those that the model was trained on.
            if isinstance(run_windows, Sliding):
                length = run_windows.context + run_windows.stride
            else:
                length = self.trained.experiment.training.steps
            context, stride = request.context, request.stride
            if context is None:
                context = max(length - (length if stride is None else stride), 0)
            return Sliding(context, max(length - context, 1) if stride is None else stride)
        if request.streams is None:
            return run_windows
        encoder = self.trained.model.encoder
        if not encoder.carries_state:
            raise SettingsError(
                f"--streams: a {type(encoder).__name__} carries no state from window to window; use --context and "
                "--stride"
            )
        return None

    def _plain(self) -> Mode:
        from reefknot.lab.evaluation.perplexity import score

        model, words, windows, precision = self.trained.model, self.trained.vocabulary, self.windows, self._precision
        streams = self.request.streams or 1
        return Mode(
            windows.name if windows else "plain",
            _window_setting(windows) or {"streams": streams},
            lambda text: score(model, text, words, streams=streams, windows=windows, precision=precision),
        )

    def _dynamic(self) -> Mode:
        from reefknot.lab.evaluation.dynamic import DynamicSettings, dynamic_score, gradient_statistics, search_rates

        settings = _checked(DynamicSettings, self.request, "dynamic", DYNAMIC_SETTINGS)
        model, words, options = self.trained.model, self.trained.vocabulary, self._options
        statistics = gradient_statistics(model, self.dataset.splits["train"], **options)
        grid = None
        if self.request.search:
            settings, grid = search_rates(model, self._search_text, words, statistics, settings, **options)
        rates = settings.rates()
        used = {"scale": rates.scale, "eta": rates.eta, "lambda": rates.decay, "epsilon": rates.epsilon}
        return Mode(
            "dynamic",
            used | {"segment": settings.segment},
            lambda text: dynamic_score(model, text, words, statistics, settings, **options),
            grid,
        )

    def _cache(self) -> Mode:
        from reefknot.lab.evaluation.cache import CacheSettings, cache_score, search_cache

        settings = _checked(CacheSettings, self.request, "cache", {})
        model, words, windows = self.trained.model, self.trained.vocabulary, self.windows
        options = self._options | {"windows": windows}
        grid = None
        if self.request.search:
            settings, grid = search_cache(model, self._search_text, words, settings, **options)
        used = settings.model_dump() | _window_setting(windows)
        return Mode("cache", used, lambda text: cache_score(model, text, words, settings, **options), grid)

    def _monte_carlo(self, passes: int) -> Mode:
        from reefknot.lab.evaluation.monte_carlo import monte_carlo_score

        model, words, options = self.trained.model, self.trained.vocabulary, self._options
        steps, windows, seed = self.trained.experiment.training.steps, self.windows, self.request.monte_carlo_seed or 0
        # Without windows, dropout masks are drawn as often as in training: every `training.steps` tokens.
        window = windows or steps
        return Mode(
            "mc",
            {"passes": passes, **(_window_setting(windows) or {"window": steps}), "seed": seed},
            lambda text: monte_carlo_score(model, text, words, passes=passes, window=window, seed=seed, **options),
        )

    @property
    def _search_text(self) -> Split:
        """The text on which settings are tuned."""
        return shorten_split(self.dataset.splits["valid"], self.request.search_tokens, self.trained.vocabulary)

    @property
    def _precision(self) -> str:
        return self.trained.experiment.training.precision

    @property
    def _options(self) -> dict[str, Any]:
        return {"precision": self._precision, "progress": self.progress}


def _checked(kind: type[S], request: EvaluationRequest, mode: str, renamed: Mapping[str, str]) -> S:
    """Return the settings of a mode; raise an error that names the options whose values are wrong."""
    raw = {renamed.get(name, name): value for name, value in request.values(f"{mode}_").items()}
    settings = validate(kind, raw, option(mode))
    if isinstance(settings, list):
        names = {setting: name for name, setting in renamed.items()}
        messages = []
        for mistake in settings:
            setting, _, problem = mistake.message().partition(": ")
            messages.append(f"{option(f'{mode}_{names.get(setting, setting)}')}: {problem}")
        raise SettingsError("\n".join(messages))
    return settings


def _window_setting(windows: Windows | None) -> dict[str, str]:
    """Return the windows as a setting of a saved evaluation; nothing if the text is read with a state."""
    return {"windows": windows.name} if windows else {}
