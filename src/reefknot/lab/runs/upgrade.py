"""Upgrade results of format 1 to format 2 when they are read. Their files are not changed.

The functions `upgrade_...` convert the JSON content of a file; `result.py` calls them. Format 1 described only in
sentences how a score was measured and which settings were changed. This is the only module that parses these sentences,
or infers values from the presence of keys. A value that no sentence states stays unknown.
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

Raw = dict[str, Any]
"""JSON content that has not been checked."""

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
"""What the `definition` of a score in format 1 states."""


def upgrade_result(raw: Mapping[str, Any], source: Path | str) -> Raw:
    """Return the content of a result.json in the current format. `source` names the file in error messages."""
    if not _is_format_1(raw, source):
        return dict(raw)
    result: Raw = {**raw, "format": 2, "task": _infer_task(raw), "changed": upgrade_changes(raw.get("changed") or [])}
    for split in _SPLITS:
        if isinstance(raw.get(split), Mapping):
            result[split] = _upgrade_score(raw[split], split)
    neighbors = raw.get("neighbors")
    if isinstance(neighbors, Mapping):
        result["neighbors"] = {("output" if key == "labels" else key): value for key, value in neighbors.items()}
    return result


def upgrade_evaluation(raw: Mapping[str, Any], result: RunResult | None, source: Path | str) -> Raw:
    """Return a saved evaluation in the current format. `result` is the result of its run."""
    if not _is_format_1(raw, source):
        return dict(raw)
    evaluation: Raw = {**raw, "format": 2}
    settings = raw.get("settings")
    if not isinstance(settings, Mapping):
        settings = {}
    translations: Raw = {}
    for split in _SPLITS:
        if not isinstance(raw.get(split), Mapping):
            continue
        # Format 1 has one object per split for the score of the text and the scores of its translations.
        text_keys = ("perplexity", "nll", "tokens", "definition")
        text_score = {key: value for key, value in raw[split].items() if key in text_keys}
        translation_scores = {key: value for key, value in raw[split].items() if key not in text_keys}
        if "bleu" in translation_scores:
            translations[split] = translation_scores
        evaluation[split] = _upgrade_evaluation_score(
            text_score,
            split,
            kind=str(raw.get("kind")),
            settings=settings,
            plain_score=result.score(split) if result else None,
        )
    if translations:
        evaluation["translation"] = translations
    return evaluation


def upgrade_changes(raw: Iterable[Any]) -> list[Any]:
    """Return changed settings as key, old and new value. Old files have one sentence per change."""
    return [_parse_change(change) if isinstance(change, str) else change for change in raw]


def upgrade_metrics_line(raw: Mapping[str, Any]) -> Raw:
    """Return a line of metrics.jsonl. A loss of skip-gram is over pairs of words, so it has the kind `pairs`."""
    if "loss" in raw:
        return {**raw, "kind": "pairs", "nll": raw["loss"]}
    return dict(raw)


def _is_format_1(raw: Mapping[str, Any], source: Path | str) -> bool:
    file_format = raw.get("format")
    if file_format not in (1, 2):
        raise DataError(f"{source}: unknown format {file_format!r}; read it with the version that wrote it")
    return bool(file_format == 1)


def _infer_task(raw: Mapping[str, Any]) -> str:
    """Return the task. Only translators have translations, and only skip-gram has no scores of a text."""
    if "translation" in raw:
        return "translation"
    return "language_model" if any(split in raw for split in _SPLITS) else "skip_gram"


def _upgrade_score(raw: Mapping[str, Any], split: str) -> Raw:
    """Return a score with the fields that its definition states."""
    score = dict(raw)
    definition = str(score.pop("definition", ""))
    matches = {name: pattern.search(definition) for name, pattern in _DEFINITION_PATTERNS.items()}
    text: Raw = {"split": split}
    if match := matches["tokens"]:
        text |= {"tokens": _parse_integer(match[1]), "split": match[2]}
    if match := matches["unknown"]:
        text["unknown"] = _parse_integer(match[1] or "0")
    if match := matches["line_ends"]:
        text["line_ends"] = match[1] == "every line ends"
    if match := matches["units"]:
        text["tokenisation"] = "pieces" if match[1] else "words"
    if match := matches["precision"]:
        score["precision"] = match[1]
    if match := matches["context"]:
        score = _parse_context(match[1]) | score
    return score | {"text": text}


def _parse_context(description: str) -> Raw:
    """Return the streams (contiguous parts), windows or pairs that a text was divided into."""
    if description == "one stream":
        return {"streams": 1}
    if match := re.fullmatch(r"([\d,]+) contiguous streams", description):
        return {"streams": _parse_integer(match[1])}
    if match := re.fullmatch(r"([\d,]+) pairs", description):
        return {"streams": 1, "pairs": _parse_integer(match[1])}
    windows = _parse_windows(description)
    return {"streams": 1, "windows": windows} if windows else {}


def _parse_windows(description: str) -> str | None:
    """Return the name of windows (`modes.py`) from their description."""
    if match := re.fullmatch(r"windows of ([\d,]+) tokens of which the last ([\d,]+) are scored", description):
        length, stride = map(_parse_integer, match.groups())
        return f"context-{length - stride}-stride-{stride}"
    if match := re.fullmatch(r"blocks of ([\d,]+) tokens", description):
        return f"context-0-stride-{_parse_integer(match[1])}"
    if match := re.fullmatch(r"blocks of whole lines of at most ([\d,]+) tokens", description):
        return f"complete-{_parse_integer(match[1])}"
    return "lines" if description == "single lines" else None


def _upgrade_evaluation_score(
    raw: Mapping[str, Any], split: str, kind: str, settings: Mapping[str, Any], plain_score: TextScore | None
) -> Raw:
    """Return the score of a saved evaluation.

    The numbers of words and bytes are copied from the plain score of the run, if it is over the same tokens.
    """
    score = _upgrade_score(raw, split)
    windows = settings.get("windows", kind)
    if isinstance(windows, str) and parse_window_sizes(windows):
        score |= {"streams": 1, "windows": windows}
    if plain_score and plain_score.words and "nll" in score and score.get("tokens") == plain_score.tokens:
        word_perplexity = perplexity(score["nll"] * plain_score.tokens / plain_score.words)
        score |= {"words": plain_score.words, "bytes": plain_score.bytes, "word_perplexity": word_perplexity}
    if kind in MODES:
        mode_settings = {key: value for key, value in settings.items() if key != "windows"}
        score["mode"] = {"kind": kind, **mode_settings, **_parse_mode(str(raw.get("definition", "")), kind)}
    return score


def _parse_mode(definition: str, kind: str) -> Raw:
    """Return the fields of a mode that only its definition states."""
    mode: Raw = {}
    if match := _DEFINITION_PATTERNS["plain"].search(definition):
        mode["plain"] = _parse_perplexity(match[1])
    if kind == "dynamic" and (match := _DEFINITION_PATTERNS["gradients"].search(definition)):
        mode["gradients"] = _parse_integer(match[1])
    if kind == "mc":
        mode["drops"] = "this model drops nothing" not in definition
        if match := _DEFINITION_PATTERNS["passes"].search(definition):
            mode |= {"lowest": _parse_perplexity(match[1]), "highest": _parse_perplexity(match[2])}
    return mode


def _parse_change(text: str) -> Raw:
    """Return `training.epochs: 60 -> 25` as fields. A value that was shortened stays text."""
    key, _, values = text.partition(": ")
    old, remainder = _parse_value("old", values)
    new, _ = _parse_value("new", remainder.removeprefix(" -> "))
    return {"key": upgrade_key(key), **old, **new}


def _parse_value(side: str, text: str) -> tuple[Raw, str]:
    """Parse the JSON value at the beginning of a text.

    Returns:
        The value under the key `side`, or no value if the text is `not set`; and the remaining text.
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
