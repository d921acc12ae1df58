"""Upgrade old results when they are read. Their files are not changed.

Format 1 described the facts of a score, and changed settings, only in sentences. This is the only module that parses
sentences, or infers facts from the presence of keys. A fact that no sentence states stays unknown.
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
from reefknot.lab.runs.modes import MODES, window_sizes

if TYPE_CHECKING:
    from reefknot.lab.runs.result import RunResult
    from reefknot.lab.runs.scores import TextScore

Raw = dict[str, Any]

_SPLITS = ("train", "valid", "test")
_FACTS = {
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


def upgrade_result(raw: Mapping[str, Any], where: Path | str) -> Raw:
    """Return the content of a result.json in the current format."""
    if not _is_old(raw, where):
        return dict(raw)
    result: Raw = {**raw, "format": 2, "task": _task(raw), "changed": upgrade_changes(raw.get("changed") or [])}
    for split in _SPLITS:
        if isinstance(raw.get(split), Mapping):
            result[split] = _score(raw[split], split)
    near = raw.get("neighbors")
    if isinstance(near, Mapping):
        result["neighbors"] = {("output" if key == "labels" else key): value for key, value in near.items()}
    return result


def upgrade_evaluation(raw: Mapping[str, Any], result: RunResult | None, where: Path | str) -> Raw:
    """Return a saved evaluation in the current format. `result` is the result of its run."""
    if not _is_old(raw, where):
        return dict(raw)
    evaluation: Raw = {**raw, "format": 2}
    settings = raw.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    translations: Raw = {}
    for split in _SPLITS:
        if not isinstance(raw.get(split), Mapping):
            continue
        old = dict(raw[split])
        score = {key: old.pop(key) for key in ("perplexity", "nll", "tokens", "definition") if key in old}
        if "bleu" in old:
            translations[split] = old
        recorded = result.score(split) if result else None
        evaluation[split] = _evaluated(score, split, str(raw.get("kind")), settings, recorded)
    return evaluation | ({"translation": translations} if translations else {})


def upgrade_changes(raw: Iterable[Any]) -> list[Any]:
    """Return changed settings as key, old and new value. Old files have one sentence per change."""
    return [_change(change) if isinstance(change, str) else change for change in raw]


def upgrade_metrics_line(raw: Mapping[str, Any]) -> Raw:
    """Return a line of metrics.jsonl. A loss of skip-gram is over pairs of words, so it has the kind `pairs`."""
    return {**raw, "kind": "pairs", "nll": raw["loss"]} if "loss" in raw else dict(raw)


def _is_old(raw: Mapping[str, Any], where: Path | str) -> bool:
    number = raw.get("format")
    if number not in (1, 2):
        raise DataError(f"{where}: unknown format {number!r}; read it with the version that wrote it")
    return bool(number == 1)


def _task(raw: Mapping[str, Any]) -> str:
    """Return the task. Only translators have translations, and only skip-gram has no scores of a text."""
    if "translation" in raw:
        return "translation"
    return "language_model" if any(split in raw for split in _SPLITS) else "skip_gram"


def _score(raw: Mapping[str, Any], split: str) -> Raw:
    """Return a score with the facts that its definition states."""
    score = dict(raw)
    definition = str(score.pop("definition", ""))
    matches = {fact: pattern.search(definition) for fact, pattern in _FACTS.items()}
    text: Raw = {"split": split}
    if match := matches["tokens"]:
        text |= {"tokens": _integer(match[1]), "split": match[2]}
    if match := matches["unknown"]:
        text["unknown"] = _integer(match[1] or "0")
    if match := matches["line_ends"]:
        text["line_ends"] = match[1] == "every line ends"
    if match := matches["units"]:
        text["tokenisation"] = "pieces" if match[1] else "words"
    if match := matches["precision"]:
        score["precision"] = match[1]
    if match := matches["context"]:
        score = _context(match[1]) | score
    return score | {"text": text}


def _context(text: str) -> Raw:
    """Return the streams, windows or pairs that a text was divided into."""
    if text == "one stream":
        return {"streams": 1}
    if match := re.fullmatch(r"([\d,]+) contiguous streams", text):
        return {"streams": _integer(match[1])}
    if match := re.fullmatch(r"([\d,]+) pairs", text):
        return {"streams": 1, "pairs": _integer(match[1])}
    windows = _windows(text)
    return {"streams": 1, "windows": windows} if windows else {}


def _windows(text: str) -> str | None:
    """Return the name of windows from their description."""
    if match := re.fullmatch(r"windows of ([\d,]+) tokens of which the last ([\d,]+) are scored", text):
        whole, stride = map(_integer, match.groups())
        return f"context-{whole - stride}-stride-{stride}"
    if match := re.fullmatch(r"blocks of ([\d,]+) tokens", text):
        return f"context-0-stride-{_integer(match[1])}"
    if match := re.fullmatch(r"blocks of whole lines of at most ([\d,]+) tokens", text):
        return f"complete-{_integer(match[1])}"
    return "lines" if text == "single lines" else None


def _evaluated(
    raw: Mapping[str, Any], split: str, kind: str, settings: Mapping[str, Any], recorded: TextScore | None
) -> Raw:
    """Return the score of a saved evaluation.

    The numbers of words and bytes are copied from the plain score of the run, if it is over the same tokens.
    """
    score = _score(raw, split)
    windows = settings.get("windows", kind)
    if isinstance(windows, str) and window_sizes(windows):
        score |= {"streams": 1, "windows": windows}
    if recorded and recorded.words and "nll" in score and score.get("tokens") == recorded.tokens:
        per_word = perplexity(score["nll"] * recorded.tokens / recorded.words)
        score |= {"words": recorded.words, "bytes": recorded.bytes, "word_perplexity": per_word}
    if kind in MODES:
        used = {key: value for key, value in settings.items() if key != "windows"}
        score["mode"] = {"kind": kind, **used, **_mode_facts(str(raw.get("definition", "")), kind)}
    return score


def _mode_facts(text: str, kind: str) -> Raw:
    """Return the facts about a mode that only its definition states."""
    facts: Raw = {}
    if match := _FACTS["plain"].search(text):
        facts["plain"] = _number(match[1])
    if kind == "dynamic" and (match := _FACTS["gradients"].search(text)):
        facts["gradients"] = _integer(match[1])
    if kind == "mc":
        facts["drops"] = "this model drops nothing" not in text
        if match := _FACTS["passes"].search(text):
            facts |= {"lowest": _number(match[1]), "highest": _number(match[2])}
    return facts


def _change(text: str) -> Raw:
    """Return `training.epochs: 60 -> 25` as fields. A value that was shortened stays text."""
    key, _, values = text.partition(": ")
    old, remainder = _value("old", values)
    new, _ = _value("new", remainder.removeprefix(" -> "))
    return {"key": upgrade_key(key), **old, **new}


def _value(side: str, text: str) -> tuple[Raw, str]:
    """Return the JSON value at the beginning of a text (nothing if it was not set), and the remaining text."""
    if text.startswith("not set"):
        return {}, text.removeprefix("not set")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        value, arrow, remainder = text.partition(" -> ")
        return {side: value}, arrow + remainder
    return {side: value}, text[end:]


def _integer(text: str) -> int:
    return int(text.replace(",", ""))


def _number(text: str) -> float:
    """Parse a printed perplexity. It may contain commas, and it begins with > if it was too large to print."""
    return float(text.replace(",", "").removeprefix(">"))
