"""Byte-pair encoding: words are split into sub-words by merging frequent pairs (Sennrich et al. 2016).

Hugging Face's `tokenizers` learns and applies the merges, and can load their file, `tokenizer.json`. Ids are those of
our vocabulary, ordered by frequency, not those of the file. The last sub-word of a word ends in `</w>`, so that
sub-words can be joined to words again. For the same reason, `<unk>` is always a whole word: a word with a character
that is not in the training text becomes `<unk>`. Other programs that load the file replace only the character.

Merges that were learned on two texts together can be restricted to the sub-words of one text (`of_text`). If a word
contains a sub-word that is not allowed, the merges of that sub-word are undone until all sub-words are allowed, as in
subword-nmt. The file does not record the restriction and contains all sub-words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, repeat
from types import ModuleType
from typing import TYPE_CHECKING

from reefknot.errors import SettingsError
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE = (UNKNOWN, END_OF_LINE)
"""Words that are never split."""
_RESERVED = (*WHOLE, START, PADDING, END_OF_WORD)
_WHITESPACE = r"[ \t\r\n\x0B\x0C]+"  # separates words in storage/lines.py, and therefore in tokenizer.json
_LONGEST = 4_096  # training time is quadratic in the length of a word, and a line without spaces is one word


@dataclass(frozen=True)
class BPE:
    """A byte-pair encoding."""

    file: bytes
    """The contents of tokenizer.json."""
    allowed: frozenset[str] | None = field(default=None, repr=False)
    """The sub-words that may be used; all sub-words of the file if None."""

    @classmethod
    def train(cls, counts: Mapping[str, int], merges: int) -> BPE:
        """Learn merges from words and their counts. Equal counts give an identical file.

        Every character is a sub-word, inside a word and at its end, so every word of known characters can be split.
        """
        library = _library()
        characters = sorted({character for word in counts if word not in WHOLE for character in word})
        symbols = [UNKNOWN, *characters, *(character + END_OF_WORD for character in characters)]
        words = ((word, count) for word, count in counts.items() if not _holds_reserved(word))
        learner = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN, end_of_word_suffix=END_OF_WORD))
        trainer = library.trainers.BpeTrainer(
            vocab_size=len(symbols) + merges,
            special_tokens=symbols,  # ids that are fixed in advance break ties between pairs
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        occurrences = chain.from_iterable(repeat(word, count) for word, count in words)
        learner.train_from_iterator(chain.from_iterable(map(_limited, occurrences)), trainer)
        # Two merges may give the same sub-word, so the size of the vocabulary does not limit the number of merges.
        learned = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]][:merges]
        subwords = dict.fromkeys([*symbols, *(left + right for left, right in learned)])
        model = library.models.BPE(
            vocab={subword: index for index, subword in enumerate(subwords)},
            merges=learned,
            unk_token=UNKNOWN,
            end_of_word_suffix=END_OF_WORD,
        )
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_WHITESPACE), "removed")
        tokenizer.decoder = library.decoders.BPEDecoder(suffix=END_OF_WORD)
        tokenizer.add_special_tokens(list(WHOLE))
        return cls(tokenizer.to_str(pretty=True).encode())

    def of_text(self, words: Iterable[str]) -> BPE:
        """Return the encoding restricted to the sub-words and characters of a text with these words."""
        divisible = {word for word in words if word not in WHOLE}
        characters = {character for word in divisible for character in word}
        ends = {character + END_OF_WORD for character in characters}
        return self.restricted({subword for word in divisible for subword in self.split_word(word)} | characters | ends)

    def restricted(self, tokens: Iterable[str]) -> BPE:
        """Return the encoding restricted to the sub-words that are among `tokens`."""
        allowed = self.subwords.intersection(tokens)
        return self if allowed == self.subwords else replace(self, allowed=allowed)

    @cached_property
    def subwords(self) -> frozenset[str]:
        """All sub-words that may be used."""
        if self.allowed is not None:
            return self.allowed
        return frozenset(json.loads(self.file)["model"]["vocab"]) - {UNKNOWN}

    def split_word(self, word: str) -> tuple[str, ...]:
        """Split a word into sub-words. A word with an unknown character is returned whole."""
        subwords = self._cuts.get(word)
        if subwords is None:
            subwords = self._cuts[word] = self._cut(word)
        return subwords

    def _cut(self, word: str) -> tuple[str, ...]:
        if word in WHOLE or not self.subwords.issuperset(word):
            return (word,)
        if _holds_reserved(word):
            return (*word[:-1], word[-1] + END_OF_WORD)
        subwords = [token.value for token in self._tokenizer.model.tokenize(word)]
        return tuple(subwords if self.subwords.issuperset(subwords) else self._undo(subwords))

    def _undo(self, subwords: list[str]) -> Iterator[str]:
        """Yield the sub-words. Replace every sub-word that is not allowed by the two that it was merged from."""
        stack = subwords[::-1]
        while stack:
            subword = stack.pop()
            if subword in self.subwords or subword not in self._merged_from:
                yield subword
            else:
                left, right = self._merged_from[subword]
                stack += right, left

    def known_parts(self, word: str) -> list[str]:
        """Split a word around its unknown characters. Each run of unknown characters becomes `<unk>`.

        In a script without spaces, a whole line is one word, and one unknown character must not make the line unknown.
        """
        if word in WHOLE or self.subwords.issuperset(word):
            return [word]
        runs = groupby(word, self.subwords.__contains__)
        parts = ("".join(run) if known else UNKNOWN for known, run in runs)
        return [UNKNOWN if part in WHOLE else part for part in parts]  # a symbol inside a word is not an end of line

    def count(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the count of each sub-word. Sub-words that occur only inside longer sub-words have the count 0."""
        subwords = Counter(dict.fromkeys(self.subwords, 0))
        for word, count in counts.items():
            for subword in self.split_word(word):
                subwords[subword] += count
        return subwords

    def ends_word(self, token: str) -> bool:
        """Return whether a token is the last sub-word of a word, or a whole word."""
        return token.endswith(END_OF_WORD) or token not in self.subwords

    def join(self, tokens: Iterable[str]) -> list[str]:
        """Join tokens to words. Sub-words at the end of the text form a word even without `</w>`."""
        words, partial = [], ""
        for token in tokens:
            if token not in self.subwords:
                words += [partial, token] if partial else [token]
                partial = ""
            elif token.endswith(END_OF_WORD):
                words.append(partial + token.removesuffix(END_OF_WORD))
                partial = ""
            else:
                partial += token
        return [*words, partial] if partial else words

    @cached_property
    def _cuts(self) -> dict[str, tuple[str, ...]]:
        """Sub-words of the words split so far, cached because a text repeats its words."""
        return {}

    @cached_property
    def _merged_from(self) -> dict[str, tuple[str, str]]:
        """The two sub-words that each longer sub-word was merged from, by the merge that was learned first."""
        merges = json.loads(self.file)["model"]["merges"]
        return {left + right: (left, right) for left, right in reversed(merges)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = _library().Tokenizer.from_str(self.file.decode())
        return tokenizer


def readable(token: str) -> str:
    """Format a token for people: `</w>` is removed, and a sub-word inside a word ends with dots."""
    if token.endswith(END_OF_WORD):
        return token.removesuffix(END_OF_WORD)
    return token if token in _RESERVED else f"{token}…"


def _limited(word: str) -> Iterable[str]:
    """Split a very long word into parts for training."""
    if len(word) <= _LONGEST:
        return (word,)
    return (word[first : first + _LONGEST] for first in range(0, len(word), _LONGEST))


def _holds_reserved(word: str) -> bool:
    """Return whether merges inside a word could give a reserved symbol. Such words are split into characters."""
    return any(symbol in word for symbol in _RESERVED)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("vocabulary.bpe needs the package tokenizers; pip install tokenizers") from error
    return tokenizers
