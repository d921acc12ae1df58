"""Open parallel text as arrays of token ids, to train a translator.

Parallel text consists of pairs: a line of the source side and its translation on the target side. Start with
`open_pairs`. It finds the files, builds the vocabularies and encodes the text as ids. The ids are stored in the cache,
so the next call only memory-maps them. `<eos>` ends every line of both sides. `lab/text/dataset.py` does the same for
monolingual text.
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
    describe_dropped,
    read_encoded_pairs,
    write_encoded_pairs,
)
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.storage.cache import cache_folder, load_or_create
from reefknot.storage.progress import Notify, silent

__all__ = ["Lines", "PairDataset", "PairSplit", "open_pairs"]

_DESCRIPTIONS_OF_SIDES = {
    "joint": "both sides together",
    "joint_bpe": "merges of both sides together, sub-words of each side separately",
    "separate": "each side separately",
}
_MIN_TOKENS_PER_LINE = 2.5  # one and a half words, and <eos>


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
    """SHA-256 over the hashes of the files, the selected pairs, the vocabularies and their settings."""
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
        pair_counts = " / ".join(f"{split.pairs:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {pair_counts} pairs, {self._format_sizes()} types"

    def describe(self) -> str:
        """Return a human-readable description of the text and of how it is encoded, in a few lines."""
        lines = [f"{self.name}: {self.origin}; {self._format_sizes()} types; hash {self.fingerprint[:12]}"]
        for split in self.splits.values():
            source_tokens = len(split.source.ids)
            target_tokens = len(split.target.ids)
            tokens = f"{source_tokens:>11,} /{target_tokens:>11,}"
            unknown_shares = f"{split.unknown_source / source_tokens:.2%} / {split.unknown / target_tokens:.2%}"
            lines.append(f"  {split.name:5} {split.pairs:>9,} pairs {tokens} tokens {unknown_shares} unknown")
        lines += [f"  {line}" for line in self._describe_encoding()]
        return "\n".join(lines)

    def _format_sizes(self) -> str:
        """Return the sizes of the vocabularies: "32,000", or "30,000 + 20,000" if they are separate."""
        source, target = self.vocabulary_pair.vocabularies
        if self.vocabulary_pair.joint:
            return f"{len(source):,}"
        return f"{len(source):,} + {len(target):,}"

    def _describe_encoding(self) -> Iterator[str]:
        """Yield lines that say which pairs are used and how they become ids."""
        filters = self.corpus_settings.pairs
        assert filters is not None
        yield f"{filters.source} is translated into {filters.target}; the numbers above are source / target"
        if self.corpus_settings.part:
            yield f"only part {self.corpus_settings.part} of the training pairs is used"

        reasons = ["an empty side"]
        if filters.longest:
            reasons.append(f"more than {filters.longest:,} tokens on a side")
        if filters.ratio:
            reasons.append(f"one side more than {filters.ratio:g} times as long as the other")
        dropped = describe_dropped(self.splits["train"].dropped) or "none"
        yield f"left out of training: pairs with {' or '.join(reasons)} ({dropped})"

        settings = self.vocabulary_settings
        yield f"vocabulary: {settings.describe()}, {_DESCRIPTIONS_OF_SIDES[settings.sides]}; most frequent first"
        unknown_policy = "become <unk>" if settings.unknown == "replace" else "are rejected"
        yield f"unknown words {unknown_policy}; each line ends with <eos>"


def open_pairs(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    notify: Notify = silent,
) -> PairDataset:
    """Find a parallel text and open it as ids. The text is encoded first, unless it is in the cache.

    Args:
        corpus: Settings of the corpus. `corpus.pairs` must be set.
        vocabulary: Settings of the vocabularies, which are built from the training text.
        data: Folder of the downloaded corpora; REEFKNOT_DATA if None.
        cache: Cache folder; REEFKNOT_CACHE or ~/.cache/reefknot if None.
        notify: Function that is called with lines of progress.
    """
    if not vocabulary.end_of_line:
        raise SettingsError("vocabulary.end_of_line = false: a translation must end with <eos>; remove the setting")
    if vocabulary.keep_spellings:
        raise SettingsError("vocabulary.keep_spellings is for language models; remove it, or use vocabulary.bpe")
    if vocabulary.text != "train":
        raise SettingsError('vocabulary.text = "all" is for language models; remove it')
    cache = cache_folder(cache)
    pair_files = find_pairs(corpus, data=data, cache=cache, notify=notify)

    # The identity names the cache entry: equal identities give equal ids.
    identity = {"text": pair_files.hashes, "cut": corpus.selection, "vocabulary": vocabulary.identity}
    cache_entry = cache / "datasets" / hash_json(identity, "pairs", FORMAT)[:32]

    def encode(folder: Path) -> None:
        write_encoded_pairs(folder, pair_files, vocabulary, notify)

    def read(folder: Path) -> tuple[VocabularyPair, dict[str, PairSplit]]:
        return read_encoded_pairs(folder, pair_files)

    vocabulary_pair, splits = load_or_create(cache_entry, encode, read, notify)
    if vocabulary.bpe is None:
        _warn_of_missing_spaces(splits["train"], notify)

    source_vocabulary, target_vocabulary = vocabulary_pair.vocabularies
    fingerprint = hash_json(identity, source_vocabulary.fingerprint, target_vocabulary.fingerprint)
    return PairDataset(
        name=pair_files.name,
        origin=pair_files.origin,
        vocabulary_pair=vocabulary_pair,
        splits=splits,
        hashes=pair_files.hashes,
        fingerprint=fingerprint,
        corpus_settings=corpus,
        vocabulary_settings=vocabulary,
    )


def _warn_of_missing_spaces(train: PairSplit, notify: Notify) -> None:
    """Warn if lines have no spaces: every line is then a single word that rarely occurs elsewhere."""
    for side, lines in zip(SIDES, (train.source, train.target), strict=True):
        if len(lines.ids) < _MIN_TOKENS_PER_LINE * train.pairs:
            notify(f"train: hardly any line of the {side} has spaces, so every line is one word; set vocabulary.bpe")
