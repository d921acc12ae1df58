"""Datasets of pairs: parallel text is encoded once with its vocabularies, cached and memory-mapped afterwards.

`<eos>` ends every line of both sides, and precedes the first word of a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import SettingsError
from reefknot.lab.text.corpus import CorpusSettings, find_pairs
from reefknot.lab.text.dataset import digest
from reefknot.lab.text.pair_encoding import (
    FORMAT,
    SIDES,
    Lines,
    PairSplit,
    Side,
    describe_dropped,
    read_pairs,
    write_pairs,
)
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair, VocabularySettings
from reefknot.storage.cache import cache_folder, cached_or_rebuilt
from reefknot.storage.progress import Notify, silent

__all__ = ["SIDES", "Lines", "PairDataset", "PairSplit", "Side", "open_pairs"]


@dataclass(frozen=True, eq=False)
class PairDataset:
    """Parallel text as ids, with everything that identifies it."""

    name: str
    origin: str
    words: VocabularyPair
    splits: dict[str, PairSplit]
    hashes: dict[str, str]
    """SHA-256 over both files of each split, before the texts are cut."""
    fingerprint: str
    """SHA-256 over the hashes of the texts, the cut and the filters, the vocabularies and their settings."""
    corpus_settings: CorpusSettings
    vocabulary_settings: VocabularySettings

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the target, whose words are predicted."""
        return self.words.vocabularies[1]

    @property
    def summary(self) -> str:
        """One line with the name of the text and its size."""
        pairs = " / ".join(f"{split.pairs:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {pairs} pairs, {self._types()} types"

    def describe(self) -> str:
        """Describe the text and how it is encoded in a few lines, for people."""
        lines = [f"{self.name}: {self.origin}; {self._types()} types; hash {self.fingerprint[:12]}"]
        for split in self.splits.values():
            sides = ((split.source, split.unknown_source), (split.target, split.unknown))
            tokens = " /".join(f"{len(side.ids):>11,}" for side, _ in sides)
            unknown = " / ".join(f"{unknown / len(side.ids):.2%}" for side, unknown in sides)
            lines.append(f"  {split.name:5} {split.pairs:>9,} pairs {tokens} tokens {unknown} unknown")
        return "\n".join([*lines, *(f"  {policy}" for policy in self._policies())])

    def _types(self) -> str:
        sizes = [len(words) for words in self.words.vocabularies]
        return " + ".join(f"{size:,}" for size in (sizes[:1] if self.words.joint else sizes))

    def _policies(self) -> Iterator[str]:
        corpus, words = self.corpus_settings, self.vocabulary_settings
        pairs = corpus.pairs
        assert pairs is not None
        yield f"{pairs.source} is translated into {pairs.target}; the numbers above are source / target"
        if corpus.part:
            yield f"the training text is cut to part {corpus.part} of its pairs"
        limits = [f"more than {pairs.longest:,} tokens on a side"] if pairs.longest else []
        limits += [f"one side more than {pairs.ratio:g} times as long as the other"] if pairs.ratio else []
        dropped = describe_dropped(self.splits["train"].dropped) or "none"
        yield f"left out of training: pairs with {' or '.join(['an empty side', *limits])} ({dropped})"
        scope = {
            "joint": "both sides together",
            "joint_bpe": "merges of both sides together, sub-words of each side separately",
            "separate": "each side separately",
        }[words.sides]
        yield f"vocabulary: {words.describe()}, {scope}; most frequent first"
        unknown = "become <unk>" if words.unknown == "replace" else "are rejected"
        yield f"unknown words {unknown}; each line ends with <eos>"


def open_pairs(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    notify: Notify = silent,
) -> PairDataset:
    """Find a parallel text and open it as ids, as `open_dataset` does for a text."""
    if not vocabulary.end_of_line:
        raise SettingsError("vocabulary.end_of_line = false: a translation must end with <eos>; remove the setting")
    if vocabulary.keep_spellings:
        raise SettingsError("vocabulary.keep_spellings is for language models; remove it, or use vocabulary.bpe")
    folder = cache_folder(cache)
    files = find_pairs(corpus, data=data, cache=folder, notify=notify)
    identity = {"text": files.hashes, "cut": corpus.cut, "vocabulary": vocabulary.identity}
    words, splits = cached_or_rebuilt(
        folder / "datasets" / digest(identity, "pairs", FORMAT)[:32],
        lambda entry: write_pairs(entry, files, vocabulary, notify),
        lambda entry: read_pairs(entry, files),
        notify,
    )
    if vocabulary.bpe is None:
        _warn_of_missing_spaces(splits["train"], notify)
    fingerprint = digest(identity, *(words.fingerprint for words in words.vocabularies))
    return PairDataset(files.name, files.origin, words, splits, files.hashes, fingerprint, corpus, vocabulary)


def _warn_of_missing_spaces(train: PairSplit, notify: Notify) -> None:
    """Warn if lines have no spaces: every line is then a single word that rarely occurs elsewhere."""
    for side, lines in zip(SIDES, (train.source, train.target), strict=True):
        if len(lines.ids) < 2.5 * train.pairs:  # one and a half words, and <eos>
            notify(f"train: hardly any line of the {side} has spaces, so every line is one word; set vocabulary.bpe")
