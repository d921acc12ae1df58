"""The modes in which a language model scores a text: plain, dynamic evaluation, a cache, Monte-Carlo dropout.

`ModeChooser.choose` returns the `Mode` that an `EvaluationRequest` (the options of `reefknot evaluate`) asks for, with
a function that scores a text. `check_modes` and `check_windows` reject contradictory options first.

    plain         the probabilities of the model as it is
    dynamic       the weights follow the text: a gradient step after every segment (Krause et al.)
    cache         the model's probabilities mixed with a cache of recent words (Grave et al.)
    monte_carlo   the mean of several passes with dropout

With `--search`, the settings that are missing from the request are tuned on the validation text first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Settings, validate
from reefknot.lab.evaluation.grid import shorten_split
from reefknot.lab.tasks.requests import EvaluationRequest, format_option

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Grid, Progress
    from reefknot.lab.evaluation.perplexity import Score
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split

S = TypeVar("S", bound=Settings)

MODES = ("dynamic", "cache", "monte_carlo")
"""Fields of a request that choose a mode other than the plain mode. The options of a mode start with its name."""
TUNED_OPTIONS = {
    "dynamic": ("dynamic_rate", "dynamic_decay"),
    "cache": ("cache_weight", "cache_theta", "cache_window"),
}
"""Options that `--search` tunes, by mode."""
DYNAMIC_SYMBOLS = {"rate": "eta", "decay": "lambda"}
"""Options of dynamic evaluation whose settings are named after the paper's symbols."""


@dataclass(frozen=True)
class Mode:
    """A mode of evaluation with all its settings."""

    name: str
    """Name that the scores are saved under."""
    settings: dict[str, Any]
    """Settings that are saved with the scores."""
    score: Callable[[Split], Score]
    """Scores a text in this mode."""
    grid: Grid | None = None
    """The grid search that chose the settings; None if there was no search."""


def requested_modes(request: EvaluationRequest) -> list[str]:
    """Return the modes that a request names; an empty list stands for the plain mode."""
    return [mode for mode in MODES if mode in request.given_options()]


def check_modes(request: EvaluationRequest) -> None:
    """Raise an error if the request names several modes, or options of a mode that it does not name."""
    modes = requested_modes(request)
    if len(modes) > 1:
        raise SettingsError(
            f"{' and '.join(map(format_option, modes))}: a text is scored in one mode at a time; choose one"
        )
    for mode in MODES:
        for name in request.given_options(f"{mode}_"):
            if mode not in modes:
                _raise_no_effect(name, format_option(mode))
    if modes and request.streams is not None:
        raise SettingsError(f"--streams: {format_option(modes[0])} reads the text in one stream; leave --streams out")
    if request.search_tokens is not None and not request.search:
        _raise_no_effect("search_tokens", "--search")
    if request.search and not set(modes) & set(TUNED_OPTIONS):
        _raise_no_effect("search", " or ".join(map(format_option, TUNED_OPTIONS)))
    if request.search:
        for mode in modes:
            if set(TUNED_OPTIONS[mode]) <= set(request.given_options()):
                options = ", ".join(map(format_option, TUNED_OPTIONS[mode]))
                raise SettingsError(
                    f"--search has nothing to tune, because {options} are all given; leave one of them out"
                )


def check_windows(request: EvaluationRequest) -> None:
    """Raise an error if window options conflict with each other, or with options that carry a state."""
    window_options = [name for name in ("context", "stride", "windows") if name in request.given_options()]
    if not window_options:
        return
    option = format_option(window_options[0])
    if "windows" in window_options and len(window_options) > 1:
        raise SettingsError(f"{option} and --windows both set the windows of the text; choose one")
    stateful_option = None
    if request.dynamic:
        stateful_option = "--dynamic"
    elif request.streams is not None:
        stateful_option = "--streams"
    if stateful_option:
        raise SettingsError(
            f"{option}: {stateful_option} carries a state through the text, so it cannot be combined with windows; "
            "choose one"
        )


def _raise_no_effect(name: str, needed_option: str) -> None:
    """Raise the error for an option that has no effect without another option."""
    option = format_option(name)
    raise SettingsError(f"{option} has no effect without {needed_option}; add {needed_option} or leave {option} out")


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
        if self.request.monte_carlo is not None:
            return self._monte_carlo(self.request.monte_carlo)
        return self._plain()

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
            if request.context is None:
                assert request.stride is not None
                return Sliding(max(length - request.stride, 0), request.stride)
            if request.stride is None:
                return Sliding(request.context, max(length - request.context, 1))
            return Sliding(request.context, request.stride)
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

        model, vocabulary = self.trained.model, self.trained.vocabulary
        windows, precision = self.windows, self._precision
        streams = self.request.streams or 1
        return Mode(
            windows.name if windows else "plain",
            _window_setting(windows) or {"streams": streams},
            lambda text: score(model, text, vocabulary, streams=streams, windows=windows, precision=precision),
        )

    def _dynamic(self) -> Mode:
        from reefknot.lab.evaluation.dynamic import DynamicSettings, dynamic_score, gradient_statistics, search_rates

        settings = _read_mode_settings(DynamicSettings, self.request, "dynamic", DYNAMIC_SYMBOLS)
        model, vocabulary, options = self.trained.model, self.trained.vocabulary, self._score_options
        statistics = gradient_statistics(model, self.dataset.splits["train"], **options)
        grid = None
        if self.request.search:
            settings, grid = search_rates(model, self._search_text, vocabulary, statistics, settings, **options)
        rates = settings.rates()
        saved_settings = {
            "scale": rates.scale,
            "eta": rates.eta,
            "lambda": rates.decay,
            "epsilon": rates.epsilon,
            "segment": settings.segment,
        }
        return Mode(
            "dynamic",
            saved_settings,
            lambda text: dynamic_score(model, text, vocabulary, statistics, settings, **options),
            grid,
        )

    def _cache(self) -> Mode:
        from reefknot.lab.evaluation.cache import CacheSettings, cache_score, search_cache

        settings = _read_mode_settings(CacheSettings, self.request, "cache", {})
        model, vocabulary, windows = self.trained.model, self.trained.vocabulary, self.windows
        options = self._score_options | {"windows": windows}
        grid = None
        if self.request.search:
            settings, grid = search_cache(model, self._search_text, vocabulary, settings, **options)
        saved_settings = settings.model_dump() | _window_setting(windows)
        return Mode(
            "cache",
            saved_settings,
            lambda text: cache_score(model, text, vocabulary, settings, **options),
            grid,
        )

    def _monte_carlo(self, passes: int) -> Mode:
        from reefknot.lab.evaluation.monte_carlo import monte_carlo_score

        model, vocabulary, options = self.trained.model, self.trained.vocabulary, self._score_options
        steps, windows, seed = self.trained.experiment.training.steps, self.windows, self.request.monte_carlo_seed or 0
        # Without windows, dropout masks are drawn as often as in training: every `training.steps` tokens.
        window = windows or steps
        return Mode(
            "mc",
            {"passes": passes, **(_window_setting(windows) or {"window": steps}), "seed": seed},
            lambda text: monte_carlo_score(model, text, vocabulary, passes=passes, window=window, seed=seed, **options),
        )

    @property
    def _search_text(self) -> Split:
        """The text on which settings are tuned."""
        return shorten_split(self.dataset.splits["valid"], self.request.search_tokens, self.trained.vocabulary)

    @property
    def _precision(self) -> str:
        return self.trained.experiment.training.precision

    @property
    def _score_options(self) -> dict[str, Any]:
        return {"precision": self._precision, "progress": self.progress}


def _read_mode_settings(
    settings_class: type[S], request: EvaluationRequest, mode: str, symbols: Mapping[str, str]
) -> S:
    """Return the settings of a mode; raise an error that names the options whose values are wrong.

    Args:
        settings_class: The class of the mode's settings.
        request: The request with the options.
        mode: The name of the mode. The options of the mode start with it.
        symbols: For options whose setting has another name, the name of the setting.
    """
    raw = {symbols.get(name, name): value for name, value in request.values(f"{mode}_").items()}
    settings = validate(settings_class, raw, format_option(mode))
    if isinstance(settings, list):
        option_names = {symbol: name for name, symbol in symbols.items()}
        messages = []
        for mistake in settings:
            setting, _, problem = mistake.message().partition(": ")
            option = format_option(f"{mode}_{option_names.get(setting, setting)}")
            messages.append(f"{option}: {problem}")
        raise SettingsError("\n".join(messages))
    return settings


def _window_setting(windows: Windows | None) -> dict[str, str]:
    """Return the windows as a setting of a saved evaluation; nothing if the text is read with a state."""
    return {"windows": windows.name} if windows else {}
