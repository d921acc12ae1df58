"""Datasets of pairs: parallel text encoded once with the words of its sides, cached and memory-mapped afterwards.

`<eos>` ends every line of both sides, and stands before the first word of a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import SettingsError
from reefknot.lab.text.corpus import CorpusSettings, find_pairs
from reefknot.lab.text.dataset import digest
from reefknot.lab.text.pair_encoding import FORMAT, SIDES, Lines, PairSplit, Side, read_pairs, told, write_pairs
from reefknot.lab.text.vocabulary import Sides, Vocabulary, VocabularySettings
from reefknot.storage.cache import cache_folder, cached_or_rebuilt
from reefknot.storage.progress import Say, silent

__all__ = ["SIDES", "Lines", "PairDataset", "PairSplit", "Side", "open_pairs"]


@dataclass(frozen=True, eq=False)
class PairDataset:
    """Parallel text as ids, with what is needed to say exactly what it is."""

    name: str
    origin: str
    words: Sides
    splits: dict[str, PairSplit]
    hashes: dict[str, str]
    """SHA-256 over both texts of each split, before any cut."""
    fingerprint: str
    """SHA-256 over the texts, the cuts and filters, the vocabularies and their settings."""
    corpus_settings: CorpusSettings
    vocabulary_settings: VocabularySettings

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that are predicted: the target's."""
        return self.words.vocabularies[1]

    @property
    def summary(self) -> str:
        """One line: which text this is, and how much of it."""
        pairs = " / ".join(f"{split.pairs:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {pairs} pairs, {self._types()} types"

    def describe(self) -> str:
        """The texts and the policies in a few lines, for people."""
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
        yield f"{pairs.source} is translated into {pairs.target}; numbers above are of source / target"
        if corpus.part:
            yield f"the training text is cut to part {corpus.part} of its pairs"
        limits = [f"more than {pairs.longest:,} tokens on a side"] if pairs.longest else []
        limits += [f"one side more than {pairs.ratio:g} times as long as the other"] if pairs.ratio else []
        dropped = told(self.splits["train"].dropped) or "none"
        yield f"left out of training: pairs with {' or '.join(['an empty side', *limits])} ({dropped})"
        where = {
            "joint": "both sides together",
            "joint_bpe": "merges of both sides together, pieces of each side by itself",
            "separate": "each side by itself",
        }[words.sides]
        yield f"vocabulary: {words.describe()}, {where}; most frequent first"
        unknown = "become <unk>" if words.unknown == "replace" else "are refused"
        yield f"unknown words {unknown}; each line ends with <eos>"


def open_pairs(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    say: Say = silent,
) -> PairDataset:
    """Find parallel text and open it as ids, encoding it first if the cache does not hold it; see `open_dataset`."""
    if not vocabulary.end_of_line:
        raise SettingsError("vocabulary.end_of_line = false: a translation ends with <eos>; leave it out")
    if vocabulary.keep_spellings:
        raise SettingsError("vocabulary.keep_spellings is for a language model; leave it out, or use vocabulary.bpe")
    folder = cache_folder(cache)
    found = find_pairs(corpus, data=data, cache=folder, say=say)
    identity = {"text": found.hashes, "cut": corpus.cut, "vocabulary": vocabulary.identity}
    words, splits = cached_or_rebuilt(
        folder / "datasets" / digest(identity, "pairs", FORMAT)[:32],
        lambda entry: write_pairs(entry, found, vocabulary, say),
        lambda entry: read_pairs(entry, found),
        say,
    )
    if vocabulary.bpe is None:
        _tell_whole_lines(splits["train"], say)
    fingerprint = digest(identity, *(words.fingerprint for words in words.vocabularies))
    return PairDataset(found.name, found.origin, words, splits, found.hashes, fingerprint, corpus, vocabulary)


def _tell_whole_lines(train: PairSplit, say: Say) -> None:
    """In a script without spaces a line is one word, which hardly any other line has."""
    for side, lines in zip(SIDES, (train.source, train.target), strict=True):
        if len(lines.ids) < 2.5 * train.pairs:  # a word and a half, and <eos>
            say(f"train: hardly a line of the {side} has spaces, so each is a word of its own; set vocabulary.bpe")
