"""Evaluate a language model with the Language Model Evaluation Harness (lm-eval).

    reefknot evaluate RUN --harness TASKS --include-path DIR

Start with `evaluate_harness`. `ReefknotLM` is the model that the harness calls. Importing this module registers it, so
that the harness's own command line can use it:

    import reefknot.lab.interop.harness
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()                                # --model reefknot --model_args run=RUN --tasks ...

A run has a vocabulary, which may not have all words of a task. So every score comes with the number of unknown words,
the context and the number of line ends (`TaskCounts`). Words are separated by whitespace, a line break is the token
<eos>, and <eos> precedes every text. Nothing is added at the end of a text.

This module needs lm-eval, so it is imported only when it is used.

Shapes: B texts of a batch, T tokens, M scored tokens, D dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from reefknot.errors import DataError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.generation import banned_ids, generate
from reefknot.lab.evaluation.perplexity import ROWS_AT_ONCE
from reefknot.lab.tasks.language_model import TrainedLanguageModel, open_language_model
from reefknot.lab.text.samples import pack_windows
from reefknot.nn.models.language_model import evaluating
from reefknot.storage.lines import words_in

MAX_GENERATED_TOKENS = 256
"""Number of tokens that a generation task may generate, unless the task sets it."""


@dataclass
class TaskCounts:
    """What the scores of a task depend on, apart from the model."""

    scored_tokens: int = 0
    scored_unknown: int = 0
    """Number of scored tokens that are <unk>."""
    context_tokens: int = 0
    """Number of tokens that precede the scored tokens, without the <eos> before the text."""
    context_unknown: int = 0
    line_ends: int = 0
    """Number of scored tokens that are <eos>."""


@dataclass(frozen=True)
class HarnessEvaluation:
    """The scores of the tasks, and what they depend on."""

    run: Path
    context: str
    """Human-readable description of the context."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By task: its scores, their standard errors and the fields of `TaskCounts`."""

    def record(self) -> dict[str, Any]:
        """Return the evaluation for programs, as JSON values."""
        return {"run": str(self.run), "context": self.context, "tasks": self.tasks}

    def text(self) -> str:
        """Return the evaluation as readable text."""
        lines = []
        for name, task in self.tasks.items():
            lines.append(name)
            for metric, value in task["scores"].items():
                error = task["standard_errors"].get(metric)
                lines.append(f"  {metric:<20} {value:>12.4f}" + (f"  ± {error:.4f}" if error is not None else ""))
            counts = TaskCounts(**task["counts"])
            lines += [f"  {line}" for line in _describe_counts(counts, self.context)]
        return "\n".join(lines)


def evaluate_harness(
    trained: TrainedLanguageModel, tasks: str, include_path: Path | None = None, limit: int | None = None
) -> HarnessEvaluation:
    """Evaluate a language model on tasks of the harness.

    Args:
        trained: The opened run.
        tasks: Names of tasks, separated by commas.
        include_path: Folder with YAML files of other tasks.
        limit: Number of documents of each task. By default all.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise SettingsError("--harness: no task is named; pass the names of tasks, separated by commas")
    if include_path is not None and not include_path.is_dir():
        raise SettingsError(f"--include-path {include_path}: is not a folder; pass the folder of the tasks' YAML files")
    manager = _open_tasks(names, include_path)
    model = ReefknotLM(trained)
    try:
        results = simple_evaluate(model, tasks=names, task_manager=manager, limit=limit, log_samples=False)
    except (ConnectionError, OSError) as error:
        raise DataError(f"the data of the tasks cannot be read: {str(error).splitlines()[0]}") from error
    assert results is not None  # only other processes return None
    evaluation = HarnessEvaluation(trained.run.path, model.context)
    for name, values in results["results"].items():
        scores, standard_errors = _split_errors(values)
        evaluation.tasks[name] = {
            "scores": scores,
            "standard_errors": standard_errors,
            "counts": asdict(model.counts[name]),
        }
    return evaluation


def _open_tasks(names: Sequence[str], include_path: Path | None) -> Any:
    """Return a task manager that knows the named tasks. Raise an error if there is no such task."""
    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    # Reading the list of the harness's own tasks takes many seconds, so it is read only if it is needed.
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown_names = [name for name in names if name not in manager.all_tasks]
    if unknown_names:
        raise SettingsError(
            f"--harness: unknown task: {', '.join(unknown_names)}; `lm_eval ls tasks` lists the tasks of the harness, "
            "and --include-path DIR adds your own"
        )
    return manager


@register_model("reefknot")
class ReefknotLM(TemplateLM):  # type: ignore[misc]
    """A language model of Reefknot for the harness.

    Args:
        run: The run folder, or an opened run.
        device: `cpu`, or any other value for a GPU if there is one.
        batch_size: Not used. Batches are made by their number of tokens.
        max_batch_size: Not used.
    """

    def __init__(
        self,
        run: TrainedLanguageModel | str,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        # The harness passes cuda:0 by default, even on a machine without GPU.
        device = "cpu" if device == "cpu" else "auto"
        self._trained = open_language_model(run, device) if isinstance(run, str) else run
        self.counts: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)
        """What the scores of each task depend on."""
        eos = self._trained.vocabulary.eos
        if eos is None:
            raise SettingsError(
                f"{self._trained.run.path}: its vocabulary has no <eos>, which the harness needs before the first word "
                "of a text; train with vocabulary.end_of_line = true"
            )
        self._eos: int = eos
        carries_state = self._trained.model.encoder.carries_state
        self._window: int | None = None if carries_state else self._trained.experiment.training.steps

    @property
    def context(self) -> str:
        """Human-readable description of the context of a scored token."""
        if self._window is None:
            return "all tokens before, in the recurrent state"
        return f"at most {self._window:,} tokens, as in training; longer texts are cut into windows"

    @property
    def eot_token_id(self) -> int:
        """The id of <eos>, which precedes every text."""
        return self._eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the input ids of a text. A line break is <eos>.

        Args:
            string: The text.
            add_special_tokens: Not used. <eos> is added before a text where the text is scored.
            kwargs: Not used.
        """
        vocabulary = self._trained.vocabulary
        ids: list[int] = []
        for index, line in enumerate(string.split("\n")):
            if index > 0:
                ids.append(self._eos)
            ids += vocabulary.encode_inputs(words_in(line, "a text of the harness"))
        return ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the most probable one.

        Context and continuation are encoded separately, because a word never extends over both.

        Args:
            requests: Requests of the harness.
            disable_tqdm: Whether to hide the progress bar.
        """
        self._learn_spellings(chain.from_iterable(request.args for request in requests))
        encoded = []
        for request in requests:
            context, continuation = request.args
            context_ids = [self._eos, *self.tok_encode(context)]
            continuation_ids = self.tok_encode(continuation)
            if not continuation_ids:
                raise DataError(f"{request.task_name}: the continuation {continuation!r} has no words to score")
            self._count(request.task_name, context_ids[1:], continuation_ids)
            encoded.append(((context, continuation), context_ids, continuation_ids))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        texts = [(context_ids + continuation_ids, len(context_ids)) for _, context_ids, continuation_ids in requests]
        return self._score_texts(texts, check_best=True, **kwargs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text.

        Args:
            requests: Requests of the harness.
            disable_tqdm: Whether to hide the progress bar.
        """
        self._learn_spellings(request.args[0] for request in requests)
        texts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            self._count(request.task_name, [], ids)
            texts.append(([self._eos, *ids], 1))
        return [log_prob for log_prob, _ in self._score_texts(texts, check_best=False, disable_tqdm=disable_tqdm)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a generated text for each request, up to one of its stop strings.

        Args:
            requests: Requests of the harness.
            disable_tqdm: Whether to hide the progress bar.
        """
        self._learn_spellings(request.args[0] for request in requests)
        vocabulary = self._trained.vocabulary
        banned = banned_ids(vocabulary)
        texts = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Generating"):
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            prompt = [self._eos, *self.tok_encode(context)]
            self._count(request.task_name, prompt[1:], [])
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", True) else 0.0
            ids: list[int] = []
            text = ""
            num_tokens = int(options.get("max_gen_toks", MAX_GENERATED_TOKENS))
            for token in generate(
                self._trained.model, prompt, num_tokens, temperature=temperature, banned=banned, window=self._window
            ):
                ids.append(token)
                text = vocabulary.decode_text(ids)
                positions = [text.find(stop) for stop in stops if stop and stop in text]
                if positions:
                    text = text[: min(positions)]
                    break
            texts.append(text)
        return texts

    def _learn_spellings(self, texts: Any) -> None:
        """Give the spellings of all words to a model that reads spellings."""
        if self._trained.experiment.vocabulary.keep_spellings:
            words = chain.from_iterable(words_in(text, "a text of the harness") for text in texts)
            self._trained = self._trained.with_spellings(words)

    def _count(self, task: str, context_ids: Sequence[int], scored_ids: Sequence[int]) -> None:
        """Add the tokens of a request to the counts of its task."""
        counts = self.counts[task]
        context_targets, scored_targets = self._to_targets(context_ids), self._to_targets(scored_ids)
        unk = self._trained.vocabulary.unk
        counts.scored_tokens += len(scored_ids)
        counts.scored_unknown += sum(target == unk for target in scored_targets)
        counts.context_tokens += len(context_ids)
        counts.context_unknown += sum(target == unk for target in context_targets)
        counts.line_ends += scored_targets.count(self._eos)

    def _to_targets(self, ids: Sequence[int]) -> list[int]:
        """Return the classes of input ids: a spelled word is not a class, so it is scored as <unk>."""
        vocabulary = self._trained.vocabulary
        unk = vocabulary.unk
        return [unk if index >= len(vocabulary) and unk is not None else index for index in ids]

    def _score_texts(
        self, texts: Sequence[tuple[list[int], int]], check_best: bool, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of the scored tokens of each text, and whether they are the most probable ones.

        Args:
            texts: The ids of each text, and the position of its first scored token, at least 1.
            check_best: Whether to compare with the most probable tokens. If not, the result is True.
            disable_tqdm: Whether to hide the progress bar.
        """
        windows = [
            window for index, (ids, first) in enumerate(texts) for window in self._cut_windows(index, ids, first)
        ]
        log_probs = [0.0] * len(texts)
        is_best = [True] * len(texts)
        windows.sort(key=lambda window: -len(window.inputs))
        lengths = np.array([len(window.inputs) for window in windows], dtype=np.int64)
        model = self._trained.model
        max_tokens = max(ROWS_AT_ONCE // model.output.rows_per_token, int(lengths.max(initial=1)))
        with torch.no_grad(), evaluating(model), tqdm(total=len(windows), disable=disable_tqdm, desc="Scoring") as bar:
            for start, stop in pack_windows(lengths, max_tokens):
                batch = windows[start:stop]
                for window, log_prob, best in self._score_batch(batch, check_best):
                    log_probs[window.text] += log_prob
                    is_best[window.text] &= best
                bar.update(len(batch))
        return list(zip(log_probs, is_best, strict=True))

    def _cut_windows(self, text: int, ids: list[int], first: int) -> Iterator[_Window]:
        """Yield windows that score each token from position `first` on once, with as much context as fits."""
        targets = self._to_targets(ids)
        while first < len(ids):
            begin, end = 0, len(ids)
            if self._window is not None:
                if end - first <= self._window:
                    begin = max(0, end - 1 - self._window)
                else:
                    begin, end = first - 1, first + self._window
            unscored = first - 1 - begin
            yield _Window(text, ids[begin : end - 1], [IGNORE] * unscored + targets[first:end])
            first = end

    def _score_batch(self, batch: Sequence[_Window], check_best: bool) -> Iterator[tuple[_Window, float, bool]]:
        """Yield each window with the log-probability of its targets, and whether they are the most probable tokens."""
        model = self._trained.model
        device = next(model.parameters()).device
        longest = len(batch[0].inputs)
        padding = [longest - len(window.inputs) for window in batch]
        inputs = [window.inputs + [0] * count for window, count in zip(batch, padding, strict=True)]
        targets = [window.targets + [IGNORE] * count for window, count in zip(batch, padding, strict=True)]
        targets_BT = torch.tensor(targets, device=device)
        hidden_BTD = model(torch.tensor(inputs, device=device)).output
        log_probs_N = model.output.target_log_probs(hidden_BTD.flatten(0, 1), targets_BT.flatten())
        log_probs_B = log_probs_N.view_as(targets_BT).double().sum(1)
        is_best_BT = torch.ones_like(targets_BT, dtype=torch.bool)
        if check_best:
            is_scored_BT = targets_BT != IGNORE
            _, best_M1 = model.output.topk(hidden_BTD[is_scored_BT], 1)
            is_best_BT[is_scored_BT] = best_M1[:, 0] == targets_BT[is_scored_BT]
        yield from zip(batch, log_probs_B.tolist(), is_best_BT.all(1).tolist(), strict=True)


class _Window(NamedTuple):
    """Tokens of a text that are read at once."""

    text: int
    """Index of the text."""
    inputs: list[int]
    targets: list[int]
    """The id after each input; -100 if it is not scored."""


def _split_errors(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Split the results of a task into scores and their standard errors, both by metric."""
    scores: dict[str, float] = {}
    standard_errors: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or key == "sample_len":
            continue
        metric, _, filter_name = key.partition(",")
        suffix = "" if filter_name in ("", "none") else f" ({filter_name})"
        if metric.endswith("_stderr"):
            standard_errors[metric.removesuffix("_stderr") + suffix] = float(value)
        else:
            scores[metric + suffix] = float(value)
    return scores, standard_errors


def _describe_counts(counts: TaskCounts, context: str) -> list[str]:
    """Return lines on unknown words, context and line ends."""
    unknown = f"unknown words: {_format_share(counts.scored_unknown, counts.scored_tokens)} scored tokens are <unk>"
    if counts.context_tokens:
        unknown += f", and {_format_share(counts.context_unknown, counts.context_tokens)} context tokens"
    line_ends = _format_share(counts.line_ends, counts.scored_tokens)
    return [
        unknown,
        f"context: {context}; <eos> precedes every text",
        f"end of line: a line break is <eos>, {line_ends} scored tokens; nothing is added at the end of a text",
    ]


def _format_share(part: int, whole: int) -> str:
    share = f" ({part / whole:.2%})" if whole else ""
    return f"{part:,} of {whole:,}{share}"
