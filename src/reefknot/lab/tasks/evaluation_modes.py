"""The modes in which a language model scores a text: plain, dynamic evaluation, a cache, Monte-Carlo dropout.

    plain         the probabilities of the model as it is
    dynamic       the weights follow the text: a gradient step after every segment (Krause et al.)
    cache         the model's probabilities mixed with a cache of recent words (Grave et al.)
    monte_carlo   the mean of several passes with dropout

Start with `build_mode`. It turns the options of `reefknot evaluate`, an `EvaluationRequest`, into an `EvaluationMode`:

    mode = build_mode(trained_run, dataset, request, progress)
    score = mode.score(dataset.splits["test"])

Before that, `check_modes` and `check_windows` reject contradictory options. A window is a part of the text that is
scored independently of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from reefknot.errors import SettingsError, describe_type
from reefknot.lab.config.settings import Settings, validate
from reefknot.lab.tasks.requests import EvaluationRequest, format_option
from reefknot.lab.text.encoding import shorten_split

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Grid
    from reefknot.lab.evaluation.perplexity import Score
    from reefknot.lab.evaluation.windows import Windows
    from reefknot.lab.tasks.language_model import LanguageModelExperiment, TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split
    from reefknot.storage.progress import ProgressCallback

SettingsT = TypeVar("SettingsT", bound=Settings)

MODES = ("dynamic", "cache", "monte_carlo")
"""Fields of a request that choose a mode other than the plain mode. The options of a mode start with its name."""
TUNED_OPTIONS = {
    "dynamic": ("dynamic_rate", "dynamic_decay"),
    "cache": ("cache_weight", "cache_theta", "cache_window"),
}
"""Options that `--search` tunes on the validation text, by mode. Options with a given value are not tuned."""
DYNAMIC_SYMBOLS = {"rate": "eta", "decay": "lambda"}
"""Options of dynamic evaluation whose settings are named after the paper's symbols, and these symbols."""


@dataclass(frozen=True)
class EvaluationMode:
    """A mode of evaluation with all its settings."""

    name: str
    """Name that the scores are saved under."""
    settings: dict[str, Any]
    """Settings that are saved with the scores."""
    score: Callable[[Split], Score]
    """Scores a text in this mode."""
    grid: Grid | None = None
    """The grid search that chose the settings; None if there was no search."""


# Checks of the options, before anything is opened


def requested_modes(request: EvaluationRequest) -> list[str]:
    """Return the modes that a request names; an empty list stands for the plain mode."""
    return [mode for mode in MODES if mode in request.given_options()]


def check_modes(request: EvaluationRequest) -> None:
    """Raise an error if the request names several modes, or options that have no effect in its mode."""
    modes = requested_modes(request)
    if len(modes) > 1:
        mode_options = " and ".join(format_option(mode) for mode in modes)
        raise SettingsError(f"{mode_options}: a text is scored in one mode at a time; choose one")

    mode = modes[0] if modes else None  # None is the plain mode
    for other_mode in MODES:
        if other_mode == mode:
            continue
        for name in request.given_options(f"{other_mode}_"):
            _raise_no_effect(name, format_option(other_mode))

    if mode and request.streams is not None:
        raise SettingsError(f"--streams: {format_option(mode)} reads the text in one stream; leave --streams out")
    _check_search(request, mode)


def _check_search(request: EvaluationRequest, mode: str | None) -> None:
    """Raise an error if `--search` or `--search-tokens` has no effect. A mode of None is the plain mode."""
    if not request.search:
        if request.search_tokens is not None:
            _raise_no_effect("search_tokens", "--search")
        return
    if mode not in TUNED_OPTIONS:
        needed_options = " or ".join(format_option(tuned_mode) for tuned_mode in TUNED_OPTIONS)
        _raise_no_effect("search", needed_options)

    tuned_names = TUNED_OPTIONS[mode]
    if set(tuned_names) <= set(request.given_options()):
        tuned_options = ", ".join(format_option(name) for name in tuned_names)
        raise SettingsError(
            f"--search has nothing to tune, because {tuned_options} are all given; leave one of them out"
        )


def check_windows(request: EvaluationRequest) -> None:
    """Raise an error if window options conflict with each other, or with options that carry a state."""
    given_names = [name for name in ("context", "stride", "windows") if name in request.given_options()]
    if not given_names:
        return
    window_option = format_option(given_names[0])
    if "windows" in given_names and len(given_names) > 1:
        raise SettingsError(f"{window_option} and --windows both set the windows of the text; choose one")

    stateful_option = None
    if request.dynamic:
        stateful_option = "--dynamic"
    elif request.streams is not None:
        stateful_option = "--streams"
    if stateful_option:
        raise SettingsError(
            f"{window_option}: {stateful_option} carries a state through the text, so it cannot be combined with "
            "windows; choose one"
        )


def _raise_no_effect(name: str, needed_option: str) -> NoReturn:
    """Raise the error for an option that has no effect without another option."""
    option = format_option(name)
    raise SettingsError(f"{option} has no effect without {needed_option}; add {needed_option} or leave {option} out")


# The windows of the text


def choose_windows(trained_run: TrainedLanguageModel, request: EvaluationRequest) -> Windows | None:
    """Return the windows in which the text is read; None if the state is carried through the text.

    Options of windows come first, then `--streams` (no windows), then the settings of the run.
    """
    from reefknot.lab.evaluation.windows import parse_windows

    if request.windows is not None:
        return parse_windows(request.windows)
    if request.context is not None or request.stride is not None:
        return _build_sliding_windows(trained_run.experiment, request.context, request.stride)
    if request.streams is not None:
        _check_carries_state(trained_run)
        return None
    return trained_run.experiment.windows


def _build_sliding_windows(experiment: LanguageModelExperiment, context: int | None, stride: int | None) -> Windows:
    """Return windows that read `context` tokens and score the next `stride` tokens.

    If one of the two is None, it is chosen so that windows are as long as the windows that the model was trained on.
    For example, after training on windows of 70 tokens, stride = 20 gives context = 50.
    """
    from reefknot.lab.evaluation.windows import Sliding

    run_windows = experiment.windows
    if isinstance(run_windows, Sliding):
        window_length = run_windows.context + run_windows.stride
    else:
        window_length = experiment.training.steps

    if stride is None:
        assert context is not None  # at least one of the two options was given
        stride = max(window_length - context, 1)
    if context is None:
        context = max(window_length - stride, 0)
    return Sliding(context, stride)


def _check_carries_state(trained_run: TrainedLanguageModel) -> None:
    """Raise an error for `--streams` if the encoder has no recurrent state to carry through a stream."""
    encoder = trained_run.model.encoder
    if not encoder.carries_state:
        raise SettingsError(
            f"--streams: {describe_type(encoder)} carries no state from window to window; use --context and --stride"
        )


# The modes


def needs_dataset(request: EvaluationRequest) -> bool:
    """Return whether a mode reads a text of the run, even if another text is scored.

    Dynamic evaluation reads the training text for its statistics, and a search reads the validation text.
    """
    return request.dynamic or request.search


def build_mode(
    trained_run: TrainedLanguageModel, dataset: Dataset | None, request: EvaluationRequest, progress: ProgressCallback
) -> EvaluationMode:
    """Return the mode that the request names. With `--search`, first search for its settings.

    The dataset may be None if `needs_dataset` returns False for the request.
    """
    if request.dynamic:
        return _build_dynamic_mode(trained_run, dataset, request, progress)
    if request.cache:
        return _build_cache_mode(trained_run, dataset, request, progress)
    if request.monte_carlo is not None:
        return _build_monte_carlo_mode(trained_run, request, request.monte_carlo, progress)
    return _build_plain_mode(trained_run, request)


def _build_plain_mode(trained_run: TrainedLanguageModel, request: EvaluationRequest) -> EvaluationMode:
    from reefknot.lab.evaluation.perplexity import score

    model = trained_run.model
    vocabulary = trained_run.vocabulary
    precision = trained_run.experiment.training.precision
    windows = choose_windows(trained_run, request)
    streams = request.streams or 1

    def score_text(text: Split) -> Score:
        return score(model, text, vocabulary, streams=streams, windows=windows, precision=precision)

    if windows:
        return EvaluationMode(name=windows.name, settings={"windows": windows.name}, score=score_text)
    return EvaluationMode(name="plain", settings={"streams": streams}, score=score_text)


def _build_dynamic_mode(
    trained_run: TrainedLanguageModel, dataset: Dataset | None, request: EvaluationRequest, progress: ProgressCallback
) -> EvaluationMode:
    from reefknot.lab.evaluation.dynamic import DynamicSettings, dynamic_score, gradient_statistics, search_rates

    settings = _read_mode_settings(DynamicSettings, request, "dynamic", DYNAMIC_SYMBOLS)
    model = trained_run.model
    vocabulary = trained_run.vocabulary
    options = _score_options(trained_run, progress)
    assert dataset is not None  # see `needs_dataset`
    statistics = gradient_statistics(model, dataset.splits["train"], **options)

    grid = None
    if request.search:
        search_text = _shorten_search_text(trained_run, dataset, request)
        settings, grid = search_rates(model, search_text, vocabulary, statistics, settings, **options)

    def score_text(text: Split) -> Score:
        return dynamic_score(model, text, vocabulary, statistics, settings, **options)

    rates = settings.rates()
    saved_settings = {
        "scale": rates.scale,
        "eta": rates.eta,
        "lambda": rates.decay,
        "epsilon": rates.epsilon,
        "segment": settings.segment,
    }
    return EvaluationMode(name="dynamic", settings=saved_settings, score=score_text, grid=grid)


def _build_cache_mode(
    trained_run: TrainedLanguageModel, dataset: Dataset | None, request: EvaluationRequest, progress: ProgressCallback
) -> EvaluationMode:
    from reefknot.lab.evaluation.cache import CacheSettings, cache_score, search_cache

    settings = _read_mode_settings(CacheSettings, request, "cache", {})
    model = trained_run.model
    vocabulary = trained_run.vocabulary
    windows = choose_windows(trained_run, request)
    options = _score_options(trained_run, progress) | {"windows": windows}

    grid = None
    if request.search:
        search_text = _shorten_search_text(trained_run, dataset, request)
        settings, grid = search_cache(model, search_text, vocabulary, settings, **options)

    def score_text(text: Split) -> Score:
        return cache_score(model, text, vocabulary, settings, **options)

    saved_settings = settings.model_dump()
    if windows:
        saved_settings["windows"] = windows.name
    return EvaluationMode(name="cache", settings=saved_settings, score=score_text, grid=grid)


def _build_monte_carlo_mode(
    trained_run: TrainedLanguageModel, request: EvaluationRequest, passes: int, progress: ProgressCallback
) -> EvaluationMode:
    from reefknot.lab.evaluation.monte_carlo import monte_carlo_score

    model = trained_run.model
    vocabulary = trained_run.vocabulary
    options = _score_options(trained_run, progress)
    windows = choose_windows(trained_run, request)
    seed = request.monte_carlo_seed or 0
    # Without windows, dropout masks are drawn as often as in training: every `training.steps` tokens.
    steps = trained_run.experiment.training.steps
    window = windows or steps

    def score_text(text: Split) -> Score:
        return monte_carlo_score(model, text, vocabulary, passes=passes, window=window, seed=seed, **options)

    saved_settings: dict[str, Any] = {"passes": passes}
    if windows:
        saved_settings["windows"] = windows.name
    else:
        saved_settings["window"] = steps
    saved_settings["seed"] = seed
    return EvaluationMode(name="mc", settings=saved_settings, score=score_text)


def _shorten_search_text(
    trained_run: TrainedLanguageModel, dataset: Dataset | None, request: EvaluationRequest
) -> Split:
    """Return the text on which settings are tuned: the start of the validation text, or all of it."""
    assert dataset is not None  # see `needs_dataset`
    return shorten_split(dataset.splits["valid"], request.search_tokens, trained_run.vocabulary)


def _score_options(trained_run: TrainedLanguageModel, progress: ProgressCallback) -> dict[str, Any]:
    """Return the keyword arguments that the functions of all modes other than plain have in common."""
    return {"precision": trained_run.experiment.training.precision, "progress": progress}


def _read_mode_settings(
    settings_class: type[SettingsT], request: EvaluationRequest, mode: str, symbols: Mapping[str, str]
) -> SettingsT:
    """Return the settings of a mode; raise an error that names the options whose values are wrong.

    For example, `--dynamic-rate 0.1` is the option `rate` of the mode `dynamic`, and its setting is `eta`.

    Args:
        settings_class: The class of the mode's settings.
        request: The request with the options.
        mode: The name of the mode. The options of the mode start with it.
        symbols: For options whose setting has another name, the name of the setting.
    """
    given_values = request.given_values(f"{mode}_")
    raw_settings = {symbols.get(name, name): value for name, value in given_values.items()}
    settings_or_mistakes = validate(settings_class, raw_settings, format_option(mode))
    if not isinstance(settings_or_mistakes, list):
        return settings_or_mistakes

    option_names = {symbol: name for name, symbol in symbols.items()}
    messages = []
    for mistake in settings_or_mistakes:
        option_name = option_names.get(mistake.key, mistake.key)
        option = format_option(f"{mode}_{option_name}")
        messages.append(mistake.message(option))
    raise SettingsError("\n".join(messages))
