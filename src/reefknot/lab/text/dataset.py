"""Datasets: a corpus is encoded once with its vocabulary, stored in the cache and memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reefknot.lab.text.corpus import CorpusSettings, find_corpus
from reefknot.lab.text.encoding import FORMAT, Split, read_encoded, write_encoded
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair, VocabularySettings
from reefknot.storage.cache import cache_folder, cached_or_rebuilt
from reefknot.storage.progress import Notify, silent

__all__ = ["Dataset", "Split", "open_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A text as ids, with everything that identifies it."""

    name: str
    origin: str
    vocabulary: Vocabulary
    splits: dict[str, Split]
    hashes: dict[str, str]
    """SHA-256 of the file of each split, before the text is cut."""
    fingerprint: str
    """SHA-256 over the hashes of the texts, the cut, the vocabulary and its settings."""
    corpus_settings: CorpusSettings
    vocabulary_settings: VocabularySettings

    @property
    def words(self) -> VocabularyPair:
        """The vocabularies of the inputs and of the targets of a model, which are the same for one text."""
        return VocabularyPair(self.vocabulary, self.vocabulary)

    @property
    def summary(self) -> str:
        """One line with the name of the text and its size."""
        tokens = " / ".join(f"{split.tokens:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {tokens} tokens, {len(self.vocabulary):,} types"

    def describe(self) -> str:
        """Describe the text and how it is encoded in a few lines, for people."""
        lines = [f"{self.name}: {self.origin}; {len(self.vocabulary):,} types; hash {self.fingerprint[:12]}"]
        for split in self.splits.values():
            unknown = split.unknown / split.tokens
            lines.append(
                f"  {split.name:5} {split.tokens:>11,} tokens {split.words:>11,} words"
                f" {split.lines:>9,} lines {split.bytes:>12,} bytes {unknown:>6.2%} unknown"
            )
        return "\n".join([*lines, *(f"  {policy}" for policy in self._policies())])

    def _policies(self) -> Iterator[str]:
        corpus, words = self.corpus_settings, self.vocabulary_settings
        cuts = [f"part {corpus.part} of its lines"] if corpus.part else []
        cuts += [f"its first {corpus.tokens:,} tokens"] if corpus.tokens else []
        if cuts:
            yield f"the training text is cut to {', of that '.join(cuts)}"
        yield f"vocabulary: {words.describe()}; most frequent first"
        if words.dictionary == "fairseq":
            yield "padded to the size of fairseq's dictionary with types that do not occur"
        unknown = "become <unk>" if words.unknown == "replace" else "are rejected"
        if words.keep_spellings:
            unknown += f"; as inputs their {len(self.vocabulary.spelled):,} spellings are read"
        ends = "each line ends with <eos>" if words.end_of_line else "line ends are dropped"
        yield f"unknown words {unknown}; {ends}"


def open_dataset(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    notify: Notify = silent,
    words: Vocabulary | None = None,
) -> Dataset:
    """Find a corpus and open it as ids. It is encoded first, unless it is in the cache.

    Args:
        corpus: Settings of the corpus.
        vocabulary: Settings of the vocabulary, which is built from the training text.
        data: Folder of the downloaded corpora; REEFKNOT_DATA if None.
        cache: Cache folder; REEFKNOT_CACHE or ~/.cache/reefknot if None.
        notify: Function that is called with lines of progress.
        words: A vocabulary to use instead of building one, such as that of another program's model.
    """
    folder = cache_folder(cache)
    files = find_corpus(corpus, data=data, cache=folder, notify=notify)
    identity = {
        "text": files.hashes,
        "cut": corpus.cut,
        "vocabulary": vocabulary.identity | ({"words": words.fingerprint} if words else {}),
    }

    def fill(entry: Path) -> None:
        write_encoded(entry, files, vocabulary, notify, words)

    entry = folder / "datasets" / digest(identity, FORMAT)[:32]
    encoded_with, splits = cached_or_rebuilt(entry, fill, read_encoded, notify)
    splits = {name: replace(split, sha256=files.hashes[name]) for name, split in splits.items()}
    fingerprint = digest(identity, encoded_with.fingerprint)
    return Dataset(files.name, files.origin, encoded_with, splits, files.hashes, fingerprint, corpus, vocabulary)


def digest(*values: Any) -> str:
    """Return the SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
