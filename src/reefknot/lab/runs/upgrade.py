"""Old results, upgraded when they are read. Their files keep their bytes.

This is the only module that recovers facts from sentences or from the presence of keys. Format 1 had neither the facts
of a score nor key, old and new value of a changed setting as fields, but sentences that told them to people. What a
sentence does not say stays unknown.
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
    """Return the content of a result.json in the format of today."""
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
    """Return a saved evaluation in the format of today; `result` is that of its run."""
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
    """Return changed settings as key, old and new value; old files have a sentence for each."""
    return [_change(change) if isinstance(change, str) else change for change in raw]


def upgrade_metrics_line(raw: Mapping[str, Any]) -> Raw:
    """Return a line of metrics.jsonl. The loss of skip-gram is one of pairs of words, and so a kind of its own."""
    return {**raw, "kind": "pairs", "nll": raw["loss"]} if "loss" in raw else dict(raw)


def _is_old(raw: Mapping[str, Any], where: Path | str) -> bool:
    number = raw.get("format")
    if number not in (1, 2):
        raise DataError(f"{where}: format {number!r} is not known here; read it with the version that wrote it")
    return bool(number == 1)


def _task(raw: Mapping[str, Any]) -> str:
    """Skip-gram gives no text a probability, and a translator has translations."""
    if "translation" in raw:
        return "translation"
    return "language_model" if any(split in raw for split in _SPLITS) else "skip_gram"


def _score(raw: Mapping[str, Any], split: str) -> Raw:
    """A score with the facts that its definition tells."""
    score = dict(raw)
    told = str(score.pop("definition", ""))
    found = {fact: pattern.search(told) for fact, pattern in _FACTS.items()}
    text: Raw = {"split": split}
    if match := found["tokens"]:
        text |= {"tokens": _integer(match[1]), "split": match[2]}
    if match := found["unknown"]:
        text["unknown"] = _integer(match[1] or "0")
    if match := found["line_ends"]:
        text["line_ends"] = match[1] == "every line ends"
    if match := found["units"]:
        text["tokenisation"] = "pieces" if match[1] else "words"
    if match := found["precision"]:
        score["precision"] = match[1]
    if match := found["context"]:
        score = _context(match[1]) | score
    return score | {"text": text}


def _context(told: str) -> Raw:
    """The streams, windows or pairs that a text was cut into."""
    if told == "one stream":
        return {"streams": 1}
    if match := re.fullmatch(r"([\d,]+) contiguous streams", told):
        return {"streams": _integer(match[1])}
    if match := re.fullmatch(r"([\d,]+) pairs", told):
        return {"streams": 1, "pairs": _integer(match[1])}
    windows = _windows(told)
    return {"streams": 1, "windows": windows} if windows else {}


def _windows(told: str) -> str | None:
    """The name of windows that are told in words."""
    if match := re.fullmatch(r"windows of ([\d,]+) tokens of which the last ([\d,]+) are scored", told):
        whole, stride = map(_integer, match.groups())
        return f"context-{whole - stride}-stride-{stride}"
    if match := re.fullmatch(r"blocks of ([\d,]+) tokens", told):
        return f"context-0-stride-{_integer(match[1])}"
    if match := re.fullmatch(r"blocks of whole lines of at most ([\d,]+) tokens", told):
        return f"complete-{_integer(match[1])}"
    return "lines" if told == "single lines" else None


def _evaluated(
    raw: Mapping[str, Any], split: str, kind: str, settings: Mapping[str, Any], recorded: TextScore | None
) -> Raw:
    """The score of a saved evaluation. What it was counted over, the run's own score of the same tokens knows."""
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


def _mode_facts(told: str, kind: str) -> Raw:
    """What the definition of a figure in some mode tells beside the settings."""
    facts: Raw = {}
    if match := _FACTS["plain"].search(told):
        facts["plain"] = _number(match[1])
    if kind == "dynamic" and (match := _FACTS["gradients"].search(told)):
        facts["gradients"] = _integer(match[1])
    if kind == "mc":
        facts["drops"] = "this model drops nothing" not in told
        if match := _FACTS["passes"].search(told):
            facts |= {"lowest": _number(match[1]), "highest": _number(match[2])}
    return facts


def _change(told: str) -> Raw:
    """`training.epochs: 60 -> 25` as fields. A value that was cut short stays a text."""
    key, _, rest = told.partition(": ")
    old, rest = _value("old", rest)
    new, _ = _value("new", rest.removeprefix(" -> "))
    return {"key": upgrade_key(key), **old, **new}


def _value(side: str, told: str) -> tuple[Raw, str]:
    """The JSON value that a text begins with, none if it was not set, and the rest of the text."""
    if told.startswith("not set"):
        return {}, told.removeprefix("not set")
    try:
        value, end = json.JSONDecoder().raw_decode(told)
    except ValueError:
        value, arrow, rest = told.partition(" -> ")
        return {side: value}, arrow + rest
    return {side: value}, told[end:]


def _integer(told: str) -> int:
    return int(told.replace(",", ""))


def _number(told: str) -> float:
    """A perplexity as people read it: with commas, and with > before one that is too large to print."""
    return float(told.replace(",", "").removeprefix(">"))
