"""Upgrade results of format 1 to format 2 when they are read. Their files are not changed.

The functions `upgrade_...` convert the JSON content of a file; `result.py` calls them.

Format 1 described only in sentences how a score was measured (its `definition`) and which settings were changed. This
is the only module that parses these sentences, or infers values from the presence of keys. A value that no sentence
states stays unknown. For example, the sentence `training.epochs: 60 -> 25` becomes three fields:

    {"key": "training.epochs", "old": 60, "new": 25}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import upgrade_key
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.modes import MODES, parse_window_sizes

if TYPE_CHECKING:
    from reefknot.lab.runs.result import RunResult
    from reefknot.lab.runs.scores import TextScore

Json = dict[str, Any]
"""A JSON object that has not been checked."""

_SPLITS = ("train", "valid", "test")
_DEFINITION_PATTERNS = {
    "tokens": re.compile(r"^tokens: [\d,]+ scored once each, of ([\d,]+) in the (.+) text$", re.MULTILINE),
    "unknown": re.compile(r"^unknown words: (?:([\d,]+) here|none)", re.MULTILINE),
    "line_ends": re.compile(r"end of line: (every line ends|line ends are no)", re.MULTILINE),
    "units": re.compile(
        r"^word perplexity: the same total over [\d,]+ [a-z ]*?words[a-z ]*?( in [\d,]+ pieces)?[,;]", re.MULTILINE
    ),
    "precision": re.compile(r"^computed in (\w+)", re.MULTILINE),
    "context": re.compile(r"^context: (.+?)(?: from an empty state|, each |;)", re.MULTILINE),
    "gradients": re.compile(r"statistics of ([\d,]+) gradients"),
    "plain": re.compile(r"without (?:it|dropout): perplexity ([\d.,e+>]+)"),
    "passes": re.compile(r"a pass alone: perplexity ([\d.,e+>]+) to ([\d.,e+>]+)"),
}
"""Patterns of the sentences in the `definition` of a score in format 1."""


def upgrade_result(content: Mapping[str, Any], source: Path | str) -> Json:
    """Return the content of a result.json in the current format. `source` names the file in error messages."""
    if not _is_format_1(content, source):
        return dict(content)
    result: Json = dict(content)
    result["format"] = 2
    result["task"] = _infer_task(content)
    result["changed"] = upgrade_changes(content.get("changed") or [])
    for split in _SPLITS:
        if isinstance(content.get(split), Mapping):
            result[split] = _upgrade_score(content[split], split)
    if isinstance(content.get("neighbors"), Mapping):
        result["neighbors"] = _upgrade_neighbors(content["neighbors"])
    return result


def upgrade_evaluation(content: Mapping[str, Any], result: RunResult | None, source: Path | str) -> Json:
    """Return a saved evaluation in the current format.

    Args:
        content: The content of the file.
        result: The result of the run that was evaluated.
        source: The name of the file, for error messages.
    """
    if not _is_format_1(content, source):
        return dict(content)
    evaluation: Json = {**content, "format": 2}
    settings = content.get("settings")
    if not isinstance(settings, Mapping):
        settings = {}

    translations: Json = {}
    for split in _SPLITS:
        if not isinstance(content.get(split), Mapping):
            continue
        # Format 1 has one object per split for the score of the text and the scores of its translations.
        text_score: Json = {}
        translation_scores: Json = {}
        for key, value in content[split].items():
            if key in ("perplexity", "nll", "tokens", "definition"):
                text_score[key] = value
            else:
                translation_scores[key] = value
        if "bleu" in translation_scores:
            translations[split] = translation_scores
        evaluation[split] = _upgrade_evaluation_score(
            text_score,
            split,
            kind=str(content.get("kind")),
            settings=settings,
            plain_score=result.score(split) if result else None,
        )
    if translations:
        evaluation["translation"] = translations
    return evaluation


def upgrade_changes(changes: Iterable[Any]) -> list[Any]:
    """Return changed settings as key, old and new value. Old files have one sentence per change."""
    return [_parse_change(change) if isinstance(change, str) else change for change in changes]


def upgrade_metrics_line(line: Mapping[str, Any]) -> Json:
    """Return a line of metrics.jsonl. A loss of skip-gram is over pairs of words, so it has the kind `pairs`."""
    if "loss" in line:
        return {**line, "kind": "pairs", "nll": line["loss"]}
    return dict(line)


def _is_format_1(content: Mapping[str, Any], source: Path | str) -> bool:
    """Return whether a file has format 1. Raise an error if its format is neither 1 nor 2."""
    file_format = content.get("format")
    if file_format not in (1, 2):
        raise DataError(f"{source}: unknown format {file_format!r}; read it with the version that wrote it")
    return bool(file_format == 1)


def _infer_task(content: Mapping[str, Any]) -> str:
    """Return the task. Only translators have translations, and only skip-gram has no scores of a text."""
    if "translation" in content:
        return "translation"
    if any(split in content for split in _SPLITS):
        return "language_model"
    return "skip_gram"


def _upgrade_neighbors(neighbors: Mapping[str, Any]) -> Json:
    """Return the nearest words by end. Format 1 has the output vectors under the key `labels`."""
    upgraded: Json = {}
    for end, nearest_words in neighbors.items():
        new_end = "output" if end == "labels" else end
        upgraded[new_end] = nearest_words
    return upgraded


def _upgrade_score(old_score: Mapping[str, Any], split: str) -> Json:
    """Return a score with the fields that its definition states."""
    score = dict(old_score)
    definition = str(score.pop("definition", ""))
    matches = {name: pattern.search(definition) for name, pattern in _DEFINITION_PATTERNS.items()}

    # What the definition states about the text.
    text: Json = {"split": split}
    tokens = matches["tokens"]
    if tokens:
        text["tokens"] = _parse_integer(tokens[1])
        text["split"] = tokens[2]
    unknown = matches["unknown"]
    if unknown:
        text["unknown"] = _parse_integer(unknown[1] or "0")
    line_ends = matches["line_ends"]
    if line_ends:
        text["line_ends"] = line_ends[1] == "every line ends"
    units = matches["units"]
    if units:
        text["tokenisation"] = "pieces" if units[1] else "words"

    # What it states about the computation. A field that the score already has is not replaced by the context.
    precision = matches["precision"]
    if precision:
        score["precision"] = precision[1]
    context = matches["context"]
    if context:
        score = _parse_context(context[1]) | score
    return score | {"text": text}


def _parse_context(description: str) -> Json:
    """Return the streams (contiguous parts), windows or pairs that a text was divided into."""
    if description == "one stream":
        return {"streams": 1}
    streams = re.fullmatch(r"([\d,]+) contiguous streams", description)
    if streams:
        return {"streams": _parse_integer(streams[1])}
    pairs = re.fullmatch(r"([\d,]+) pairs", description)
    if pairs:
        return {"streams": 1, "pairs": _parse_integer(pairs[1])}
    windows = _parse_windows(description)
    if windows:
        return {"streams": 1, "windows": windows}
    return {}


def _parse_windows(description: str) -> str | None:
    """Return the window name (`modes.py`) that a description stands for."""
    windows = re.fullmatch(r"windows of ([\d,]+) tokens of which the last ([\d,]+) are scored", description)
    if windows:
        length = _parse_integer(windows[1])
        stride = _parse_integer(windows[2])
        return f"context-{length - stride}-stride-{stride}"
    blocks = re.fullmatch(r"blocks of ([\d,]+) tokens", description)
    if blocks:
        return f"context-0-stride-{_parse_integer(blocks[1])}"
    line_blocks = re.fullmatch(r"blocks of whole lines of at most ([\d,]+) tokens", description)
    if line_blocks:
        return f"complete-{_parse_integer(line_blocks[1])}"
    if description == "single lines":
        return "lines"
    return None


def _upgrade_evaluation_score(
    old_score: Mapping[str, Any], split: str, kind: str, settings: Mapping[str, Any], plain_score: TextScore | None
) -> Json:
    """Return the score of a saved evaluation.

    Args:
        old_score: The score in format 1.
        split: The split that was scored.
        kind: The mode of the evaluation, or the name of its windows.
        settings: The settings of the evaluation.
        plain_score: The plain score of the run on the same split. Its numbers of words and bytes are copied if it is
            over the same tokens.
    """
    score = _upgrade_score(old_score, split)
    windows = settings.get("windows", kind)
    if isinstance(windows, str) and parse_window_sizes(windows):
        score |= {"streams": 1, "windows": windows}
    if plain_score and plain_score.words and "nll" in score and score.get("tokens") == plain_score.tokens:
        word_perplexity = perplexity(score["nll"] * plain_score.tokens / plain_score.words)
        score |= {"words": plain_score.words, "bytes": plain_score.bytes, "word_perplexity": word_perplexity}
    if kind in MODES:
        mode_settings = {key: value for key, value in settings.items() if key != "windows"}
        parsed_fields = _parse_mode(str(old_score.get("definition", "")), kind)
        score["mode"] = {"kind": kind, **mode_settings, **parsed_fields}
    return score


def _parse_mode(definition: str, kind: str) -> Json:
    """Return the fields of a mode that only its definition states."""
    mode: Json = {}
    plain = _DEFINITION_PATTERNS["plain"].search(definition)
    if plain:
        mode["plain"] = _parse_perplexity(plain[1])
    gradients = _DEFINITION_PATTERNS["gradients"].search(definition)
    if gradients and kind == "dynamic":
        mode["gradients"] = _parse_integer(gradients[1])
    if kind == "mc":
        mode["drops"] = "this model drops nothing" not in definition
        passes = _DEFINITION_PATTERNS["passes"].search(definition)
        if passes:
            mode["lowest"] = _parse_perplexity(passes[1])
            mode["highest"] = _parse_perplexity(passes[2])
    return mode


def _parse_change(sentence: str) -> Json:
    """Return `training.epochs: 60 -> 25` as fields. A value that was shortened stays text."""
    key, _, values = sentence.partition(": ")
    old_field, remainder = _parse_value("old", values)
    new_field, _ = _parse_value("new", remainder.removeprefix(" -> "))
    return {"key": upgrade_key(key), **old_field, **new_field}


def _parse_value(side: str, text: str) -> tuple[Json, str]:
    """Parse the JSON value at the beginning of a text.

    Args:
        side: The key of the value, `old` or `new`.
        text: The text, such as `60 -> 25`.

    Returns:
        An object with the value under the key `side`, which is empty if the text starts with `not set`; and the
        remaining text.
    """
    if text.startswith("not set"):
        return {}, text.removeprefix("not set")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        value, arrow, remainder = text.partition(" -> ")
        return {side: value}, arrow + remainder
    return {side: value}, text[end:]


def _parse_integer(text: str) -> int:
    """Parse an integer with commas."""
    return int(text.replace(",", ""))


def _parse_perplexity(text: str) -> float:
    """Parse a printed perplexity. It may contain commas, and it begins with > if it was too large to print."""
    return float(text.replace(",", "").removeprefix(">"))
