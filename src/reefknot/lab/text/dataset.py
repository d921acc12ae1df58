"""Open a text corpus as arrays of token ids, ready for training.

Start with `open_dataset`. It finds the files of a corpus, builds a vocabulary from the training text, and encodes every
split (train, valid and test) as ids. The ids are stored in the cache, so the next call only memory-maps them.
`lab/text/batches.py` cuts the ids into batches. `lab/text/pair_dataset.py` does the same for parallel text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reefknot.lab.text.corpus import CorpusSettings, find_corpus
from reefknot.lab.text.encoding import FORMAT, Split, read_encoded, write_encoded
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.lab.text.workers import work_folder
from reefknot.storage.cache import cache_folder, load_or_create
from reefknot.storage.progress import Notify, silent

__all__ = ["Dataset", "Split", "open_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A text encoded as ids, with its vocabulary and the hashes that identify it.

    `dataset.splits["train"].ids` is the training text, and `dataset.vocabulary.words[i]` is the token with the id i.
    """

    name: str
    origin: str
    """Human-readable description of the text and of how it was recognised."""
    vocabulary: Vocabulary
    splits: dict[str, Split]
    hashes: dict[str, str]
    """SHA-256 of the file of each split, before the text is cut."""
    fingerprint: str
    """SHA-256 over the hashes of the files, the selected part of the text, the vocabulary and its settings."""
    corpus_settings: CorpusSettings
    vocabulary_settings: VocabularySettings

    @property
    def vocabulary_pair(self) -> VocabularyPair:
        """The vocabularies of a model's inputs and targets. Both are `vocabulary`, because there is only one text."""
        return VocabularyPair(self.vocabulary, self.vocabulary)

    @property
    def summary(self) -> str:
        """One line with the name of the text and its size."""
        tokens = " / ".join(f"{split.tokens:,}" for split in self.splits.values())
        return f"{self.name} (hash {self.fingerprint[:12]}): {tokens} tokens, {len(self.vocabulary):,} types"

    def describe(self) -> str:
        """Return a human-readable description of the text and of how it is encoded, in a few lines."""
        lines = [f"{self.name}: {self.origin}; {len(self.vocabulary):,} types; hash {self.fingerprint[:12]}"]
        for split in self.splits.values():
            unknown_share = split.unknown / split.tokens
            lines.append(
                f"  {split.name:5} {split.tokens:>11,} tokens {split.words:>11,} words"
                f" {split.lines:>9,} lines {split.bytes:>12,} bytes {unknown_share:>6.2%} unknown"
            )
        lines += [f"  {line}" for line in self._describe_encoding()]
        return "\n".join(lines)

    def _describe_encoding(self) -> Iterator[str]:
        """Yield lines that say which part of the text is used and how it becomes ids."""
        corpus_settings = self.corpus_settings
        selected_parts = []
        if corpus_settings.part:
            selected_parts.append(f"part {corpus_settings.part} of its lines")
        if corpus_settings.tokens:
            selected_parts.append(f"its first {corpus_settings.tokens:,} tokens")
        if selected_parts:
            yield f"the training text is cut to {', of that '.join(selected_parts)}"

        settings = self.vocabulary_settings
        yield f"vocabulary: {settings.describe()}; most frequent first"
        if settings.dictionary == "fairseq":
            yield "padded to the size of fairseq's dictionary with types that do not occur"

        unknown_policy = "become <unk>" if settings.unknown == "replace" else "are rejected"
        if settings.keep_spellings:
            unknown_policy += f"; as inputs their {len(self.vocabulary.spelled_words):,} spellings are read"
        line_end_policy = "each line ends with <eos>" if settings.end_of_line else "line ends are dropped"
        yield f"unknown words {unknown_policy}; {line_end_policy}"


def open_dataset(
    corpus: CorpusSettings,
    vocabulary: VocabularySettings,
    *,
    data: Path | None = None,
    cache: Path | None = None,
    notify: Notify = silent,
    words: Vocabulary | None = None,
) -> Dataset:
    """Find a corpus and open it as ids. The corpus is encoded first, unless it is in the cache.

        dataset = rk.open_dataset(rk.CorpusSettings(name="wikitext-2"), rk.VocabularySettings(min_count=3))

    Args:
        corpus: Settings of the corpus.
        vocabulary: Settings of the vocabulary, which is built from the training text.
        data: Folder of the downloaded corpora; REEFKNOT_DATA if None.
        cache: Cache folder; REEFKNOT_CACHE or ~/.cache/reefknot if None.
        notify: Function that is called with lines of progress.
        words: A vocabulary to use instead of building one, such as that of another program's model.
    """
    cache = cache_folder(cache)
    text_files = find_corpus(corpus, data=data, cache=cache, notify=notify)

    # The identity names the cache entry: equal identities give equal ids.
    vocabulary_identity = vocabulary.identity
    if words:
        vocabulary_identity = vocabulary_identity | {"words": words.fingerprint}
    identity = {"text": text_files.hashes, "cut": corpus.selection, "vocabulary": vocabulary_identity}
    cache_entry = cache / "datasets" / hash_json(identity, FORMAT)[:32]
    with work_folder(cache, cache_entry, notify) as shard_folder:

        def encode(folder: Path) -> None:
            write_encoded(folder, text_files, vocabulary, notify, words, shard_folder)

        dataset_vocabulary, splits = load_or_create(cache_entry, encode, read_encoded, notify)
    splits = {name: replace(split, sha256=text_files.hashes[name]) for name, split in splits.items()}
    fingerprint = hash_json(identity, dataset_vocabulary.fingerprint)
    return Dataset(
        name=text_files.name,
        origin=text_files.origin,
        vocabulary=dataset_vocabulary,
        splits=splits,
        hashes=text_files.hashes,
        fingerprint=fingerprint,
        corpus_settings=corpus,
        vocabulary_settings=vocabulary,
    )


def hash_json(*values: Any) -> str:
    """Return the SHA-256 of values as JSON."""
    json_text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(json_text.encode()).hexdigest()
