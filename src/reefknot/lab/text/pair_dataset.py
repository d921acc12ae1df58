"""Open parallel text as arrays of token ids, to train a translator.

Start with `open_pairs`, which does for parallel text what `open_dataset` (`lab/text/dataset.py`) does for monolingual
text: it finds the files, builds the vocabularies, encodes the text once and memory-maps it afterwards. `<eos>` ends
every line of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import SettingsError
from reefknot.lab.text.corpus import CorpusSettings, find_pairs
from reefknot.lab.text.dataset import hash_json
from reefknot.lab.text.pair_encoding import (
    FORMAT,
    SIDES,
    Lines,
    PairSplit,
    Side,
    describe_dropped,
    read_encoded_pairs,
    write_encoded_pairs,
)
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair, VocabularySettings
from reefknot.storage.cache import cache_folder, load_or_rebuild
from reefknot.storage.progress import Notify, silent

__all__ = ["SIDES", "Lines", "PairDataset", "PairSplit", "Side", "open_pairs"]


@dataclass(frozen=True, eq=False)
class PairDataset:
    """Parallel text encoded as ids, with its vocabularies and the hashes that identify it."""

    name: str
    origin: str
    """Human-readable description of the text."""
    vocabulary_pair: VocabularyPair
    """The vocabularies of the source and of the target, which are the same object if they are joint."""
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
        _, target_vocabulary = self.vocabulary_pair.vocabularies
        return target_vocabulary

    @property
    def summary(self) -> str:
        """One line with the name of the text and its size."""
        pairs = " / ".join(f"{split.pairs:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {pairs} pairs, {self._format_sizes()} types"

    def describe(self) -> str:
        """Return a human-readable description of the text and of how it is encoded, in a few lines."""
        lines = [f"{self.name}: {self.origin}; {self._format_sizes()} types; hash {self.fingerprint[:12]}"]
        for split in self.splits.values():
            source_tokens, target_tokens = len(split.source.ids), len(split.target.ids)
            tokens = f"{source_tokens:>11,} /{target_tokens:>11,}"
            unknown = f"{split.unknown_source / source_tokens:.2%} / {split.unknown / target_tokens:.2%}"
            lines.append(f"  {split.name:5} {split.pairs:>9,} pairs {tokens} tokens {unknown} unknown")
        return "\n".join([*lines, *(f"  {line}" for line in self._describe_encoding())])

    def _format_sizes(self) -> str:
        """Return the sizes of the vocabularies: "32,000", or "30,000 + 20,000" if they are separate."""
        source, target = self.vocabulary_pair.vocabularies
        return f"{len(source):,}" if self.vocabulary_pair.joint else f"{len(source):,} + {len(target):,}"

    def _describe_encoding(self) -> Iterator[str]:
        """Yield lines that say which pairs are used and how they become ids."""
        corpus, vocabulary = self.corpus_settings, self.vocabulary_settings
        pairs = corpus.pairs
        assert pairs is not None
        yield f"{pairs.source} is translated into {pairs.target}; the numbers above are source / target"
        if corpus.part:
            yield f"the training text is cut to part {corpus.part} of its pairs"
        reasons = ["an empty side"]
        if pairs.longest:
            reasons.append(f"more than {pairs.longest:,} tokens on a side")
        if pairs.ratio:
            reasons.append(f"one side more than {pairs.ratio:g} times as long as the other")
        dropped = describe_dropped(self.splits["train"].dropped) or "none"
        yield f"left out of training: pairs with {' or '.join(reasons)} ({dropped})"
        scope = {
            "joint": "both sides together",
            "joint_bpe": "merges of both sides together, sub-words of each side separately",
            "separate": "each side separately",
        }[vocabulary.sides]
        yield f"vocabulary: {vocabulary.describe()}, {scope}; most frequent first"
        unknown_policy = "become <unk>" if vocabulary.unknown == "replace" else "are rejected"
        yield f"unknown words {unknown_policy}; each line ends with <eos>"


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

    def encode(entry: Path) -> None:
        write_encoded_pairs(entry, files, vocabulary, notify)

    def read(entry: Path) -> tuple[VocabularyPair, dict[str, PairSplit]]:
        return read_encoded_pairs(entry, files)

    entry = folder / "datasets" / hash_json(identity, "pairs", FORMAT)[:32]
    vocabulary_pair, splits = load_or_rebuild(entry, encode, read, notify)
    if vocabulary.bpe is None:
        _warn_of_missing_spaces(splits["train"], notify)
    source_vocabulary, target_vocabulary = vocabulary_pair.vocabularies
    fingerprint = hash_json(identity, source_vocabulary.fingerprint, target_vocabulary.fingerprint)
    return PairDataset(
        name=files.name,
        origin=files.origin,
        vocabulary_pair=vocabulary_pair,
        splits=splits,
        hashes=files.hashes,
        fingerprint=fingerprint,
        corpus_settings=corpus,
        vocabulary_settings=vocabulary,
    )


def _warn_of_missing_spaces(train: PairSplit, notify: Notify) -> None:
    """Warn if lines have no spaces: every line is then a single word that rarely occurs elsewhere."""
    for side, lines in zip(SIDES, (train.source, train.target), strict=True):
        if len(lines.ids) < 2.5 * train.pairs:  # one and a half words, and <eos>
            notify(f"train: hardly any line of the {side} has spaces, so every line is one word; set vocabulary.bpe")
