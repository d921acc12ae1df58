"""Datasets: a corpus encoded once with its vocabulary, kept in the cache and memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reefknot.lab.text.corpus import CorpusSettings, find_corpus
from reefknot.lab.text.encoding import FORMAT, Split, read_encoded, write_encoded
from reefknot.lab.text.vocabulary import Vocabulary, VocabularySettings
from reefknot.storage.cache import cache_folder, mended
from reefknot.storage.progress import Say, silent

__all__ = ["Dataset", "Split", "open_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A corpus as ids, with what is needed to say exactly what it is."""

    name: str
    origin: str
    vocabulary: Vocabulary
    splits: dict[str, Split]
    hashes: dict[str, str]
    """SHA-256 of the text of each split, before any cut."""
    fingerprint: str
    """SHA-256 over the texts, the cuts, the vocabulary and its settings."""
    corpus_settings: CorpusSettings
    vocabulary_settings: VocabularySettings

    @property
    def words(self) -> Vocabulary:
        """What a model of this text is built for."""
        return self.vocabulary

    @property
    def summary(self) -> str:
        """One line: which text this is, and how much of it."""
        tokens = " / ".join(f"{split.tokens:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {tokens} tokens, {len(self.vocabulary):,} types"

    def describe(self) -> str:
        """The texts and the policies in a few lines, for people."""
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
            yield "filled up to the size of fairseq's dictionary with types that no text has"
        unknown = "become <unk>" if words.unknown == "replace" else "are refused"
        if words.keep_spellings:
            unknown += f", as inputs they keep their {len(self.vocabulary.spelled):,} spellings"
        ends = "each line ends with <eos>" if words.end_of_line else "line ends are left out"
        yield f"unknown words {unknown}; {ends}"


def open_dataset(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    say: Say = silent,
    words: Vocabulary | None = None,
) -> Dataset:
    """Find a corpus and open it as ids, encoding it first if the cache does not hold it.

    `data` is the folder of the published corpora, `cache` that of what is made from texts; `say` hears of
    progress. With `words`, those of another program's model, none are counted in the training text.
    """
    folder = cache_folder(cache)
    source = find_corpus(corpus, data=data, cache=folder, say=say)
    identity = {
        "text": source.hashes,
        "cut": corpus.cut,
        "vocabulary": vocabulary.identity | ({"words": words.fingerprint} if words else {}),
    }

    def fill(entry: Path) -> None:
        write_encoded(entry, source, vocabulary, say, words)

    entry = folder / "datasets" / digest(identity, FORMAT)[:32]
    found, splits = mended(entry, fill, read_encoded, say)
    splits = {name: replace(split, sha256=source.hashes[name]) for name, split in splits.items()}
    fingerprint = digest(identity, found.fingerprint)
    return Dataset(source.name, source.origin, found, splits, source.hashes, fingerprint, corpus, vocabulary)


def digest(*values: Any) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
