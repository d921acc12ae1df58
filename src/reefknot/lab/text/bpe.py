"""Byte-pair encoding: split words into sub-words by merging frequent pairs of characters (Sennrich et al. 2016).

    bpe = BPE.train({"low": 5, "lower": 2, "newest": 6, "widest": 3}, num_merges=3)
    bpe.split_word("lowest")                     # ("lo", "w", "est</w>")
    bpe.join(["lo", "w", "est</w>", "<eos>"])    # ["lowest", "<eos>"]

The last sub-word of a word ends in `</w>`. Hugging Face's `tokenizers` learns and applies the merges, and can load the
file that stores them, `tokenizer.json`. Its ids are not used: the ids are those of our vocabulary, which is ordered by
frequency (`vocabulary.py`).
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNSPLIT_WORDS = (UNKNOWN, END_OF_LINE)
"""Words of a text that are never split."""
RESERVED_SYMBOLS = (*UNSPLIT_WORDS, START, PADDING, END_OF_WORD)
"""Strings that merges must not create. A longer word that contains one is split into characters."""
_WHITESPACE = r"[ \t\r\n\x0B\x0C]+"  # separates words in storage/lines.py, and therefore in tokenizer.json
# Training time is quadratic in the length of a word, and a line without spaces is one word.
_MAX_TRAINING_WORD_LENGTH = 4_096
_MAX_CACHED_WORDS = 1_000_000
_REPEATS = 1_000  # words are passed to the trainer in texts of at most this many


@dataclass(frozen=True)
class BPE:
    """A byte-pair encoding: the merges, and how to split words with them.

    An unknown character is a character that is not in the training text. `split_word` returns a word with an unknown
    character whole, and the vocabulary turns it into `<unk>`, so that sub-words can always be joined. Other programs
    that load the file replace only the character. To do the same here, call `split_at_unknown` first.

    Merges that were learned on two texts together can be restricted to the sub-words of one text (`restrict_to_text`).
    If a word contains a sub-word that is not allowed, the merges of that sub-word are undone until all sub-words are
    allowed, as in subword-nmt. The file does not record the restriction and contains all sub-words.
    """

    file_content: bytes
    """The content of tokenizer.json."""
    allowed_subwords: frozenset[str] | None = field(default=None, repr=False)
    """The sub-words to which the encoding is restricted, or None to allow all sub-words of the file."""
    splits_unknown: bool = False
    """Whether `split_word` splits a word around its unknown characters, as `split_at_unknown` does."""

    # -- learn merges ----------------------------------------------------------------------------------------------

    @classmethod
    def train(cls, counts: Mapping[str, int], num_merges: int, max_words: int | None = None) -> BPE:
        """Learn merges from words and their counts. Equal counts give an identical file.

        Every character is a sub-word, inside a word and at its end, so every word of known characters can be split.

        Args:
            counts: Number of occurrences of each word.
            num_merges: Maximum number of merges.
            max_words: Learn the merges from this many of the most frequent words. By default from all words.
        """
        characters = sorted(_find_characters(counts))
        final_characters = [character + END_OF_WORD for character in characters]
        base_subwords = [UNKNOWN, *characters, *final_characters]
        if max_words is not None and len(counts) > max_words:
            counts = dict(heapq.nlargest(max_words, counts.items(), key=lambda item: (item[1], item[0])))
        merges = _learn_merges(counts, base_subwords, num_merges)
        tokenizer = _build_tokenizer(base_subwords, merges)
        return cls(tokenizer.to_str(pretty=True).encode())

    def restrict_to_text(self, words: Iterable[str]) -> BPE:
        """Return the encoding restricted to the sub-words and characters of a text with these words."""
        divisible_words = {word for word in words if word not in UNSPLIT_WORDS}
        characters = _find_characters(divisible_words)
        final_characters = {character + END_OF_WORD for character in characters}
        subwords: set[str] = set()
        for word in divisible_words:
            subwords.update(self.split_word(word))
        return self.restrict_to_tokens(subwords | characters | final_characters)

    def restrict_to_tokens(self, tokens: Iterable[str]) -> BPE:
        """Return the encoding restricted to the sub-words that are among `tokens`."""
        allowed_subwords = self.subwords.intersection(tokens)
        if allowed_subwords == self.subwords:
            return self
        return replace(self, allowed_subwords=allowed_subwords)

    @cached_property
    def subwords(self) -> frozenset[str]:
        """All sub-words that may be used."""
        if self.allowed_subwords is not None:
            return self.allowed_subwords
        file_subwords = json.loads(self.file_content)["model"]["vocab"]
        return frozenset(file_subwords) - {UNKNOWN}

    # -- split words -----------------------------------------------------------------------------------------------

    def split_word(self, word: str) -> tuple[str, ...]:
        """Split a word into sub-words. A word with an unknown character is returned whole, unless `splits_unknown`."""
        subwords = self._split_cache.get(word)
        if subwords is None:
            subwords = self._split_uncached(word)
            if len(self._split_cache) >= _MAX_CACHED_WORDS:
                self._split_cache.clear()
            self._split_cache[word] = subwords
        return subwords

    def _split_uncached(self, word: str) -> tuple[str, ...]:
        if word in UNSPLIT_WORDS:
            return (word,)
        if not self._knows_characters(word):
            if not self.splits_unknown:
                return (word,)
            fragments = self.split_at_unknown(word)
            return tuple(subword for fragment in fragments for subword in self._split_uncached(fragment))
        if _contains_reserved(word):
            return (*word[:-1], word[-1] + END_OF_WORD)  # single characters
        subwords = [token.value for token in self._tokenizer.model.tokenize(word)]
        if not self.subwords.issuperset(subwords):
            return tuple(self._undo_merges(subwords))
        return tuple(subwords)

    def _knows_characters(self, word: str) -> bool:
        return self.subwords.issuperset(word)  # every known character is also a sub-word

    def _undo_merges(self, subwords: list[str]) -> Iterator[str]:
        """Yield the sub-words. Replace every sub-word that is not allowed by the two that it was merged from.

        If "low" was merged from "lo" and "w" but is not allowed, "low" and "er</w>" become "lo", "w" and "er</w>".
        """
        stack = subwords[::-1]  # the next sub-word is the last item
        while stack:
            subword = stack.pop()
            if subword in self.subwords or subword not in self._merged_from:
                yield subword
            else:
                left, right = self._merged_from[subword]
                stack.append(right)
                stack.append(left)

    def split_at_unknown(self, word: str) -> list[str]:
        """Split a word around its unknown characters. Each run of unknown characters becomes `<unk>`.

        If "X" and "Y" are unknown, "XYlow" becomes "<unk>" and "low". In a script without spaces, a whole line is one
        word, and one unknown character must not make the line unknown.
        """
        if word in UNSPLIT_WORDS or self._knows_characters(word):
            return [word]
        fragments = []
        # groupby yields each run of known characters and each run of unknown characters.
        for is_known, characters in groupby(word, self.subwords.__contains__):
            fragment = "".join(characters)
            # A symbol inside a word, such as <eos>, is not an end of line.
            is_symbol = fragment in UNSPLIT_WORDS
            if is_known and not is_symbol:
                fragments.append(fragment)
            else:
                fragments.append(UNKNOWN)
        return fragments

    def count_subwords(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the count of each sub-word. Sub-words that occur only inside longer sub-words have the count 0."""
        subword_counts = Counter(dict.fromkeys(self.subwords, 0))
        for word, count in counts.items():
            for subword in self.split_word(word):
                subword_counts[subword] += count
        return subword_counts

    # -- join sub-words --------------------------------------------------------------------------------------------

    def ends_word(self, token: str) -> bool:
        """Return whether a token is the last sub-word of a word, or a whole word."""
        return token.endswith(END_OF_WORD) or token not in self.subwords

    def join(self, tokens: Iterable[str]) -> list[str]:
        """Join tokens to words. Sub-words at the end of the text form a word even without `</w>`."""
        words: list[str] = []
        unfinished_word = ""
        for token in tokens:
            if token not in self.subwords:  # a whole word, such as <eos>
                if unfinished_word:
                    words.append(unfinished_word)
                words.append(token)
                unfinished_word = ""
            elif token.endswith(END_OF_WORD):
                words.append(unfinished_word + token.removesuffix(END_OF_WORD))
                unfinished_word = ""
            else:
                unfinished_word += token
        if unfinished_word:
            words.append(unfinished_word)
        return words

    # -- values that are computed once -----------------------------------------------------------------------------

    @cached_property
    def _split_cache(self) -> dict[str, tuple[str, ...]]:
        """Sub-words of the words split so far, cached because a text repeats its words."""
        return {}

    @cached_property
    def _merged_from(self) -> dict[str, tuple[str, str]]:
        """The two sub-words that each longer sub-word was merged from, by the merge that was learned first."""
        merges = json.loads(self.file_content)["model"]["merges"]
        return {left + right: (left, right) for left, right in reversed(merges)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.file_content.decode())


def format_token(token: str) -> str:
    """Make a token readable: "t</w>" becomes "t", and "low", which another sub-word follows, becomes "low…"."""
    if token.endswith(END_OF_WORD):
        return token.removesuffix(END_OF_WORD)
    if token in RESERVED_SYMBOLS:
        return token
    return f"{token}…"


def _find_characters(words: Iterable[str]) -> set[str]:
    """Return the characters of all words that may be split."""
    return {character for word in words if word not in UNSPLIT_WORDS for character in word}


def _learn_merges(counts: Mapping[str, int], base_subwords: list[str], num_merges: int) -> list[tuple[str, str]]:
    """Return the merges in the order in which they are learned, each as the two sub-words that it joins."""
    import tokenizers

    learner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN, end_of_word_suffix=END_OF_WORD))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(base_subwords) + num_merges,
        # Special tokens get their ids before training. The ids decide which of two equally frequent pairs is merged, so
        # that equal counts always give the same merges.
        special_tokens=base_subwords,
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    learner.pre_tokenizer = tokenizers.pre_tokenizers.CharDelimiterSplit("\n")
    learner.train_from_iterator(_repeat_words(counts), trainer)
    learned_merges = json.loads(learner.to_str())["model"]["merges"]
    merges = [(left, right) for left, right in learned_merges]
    # Two merges may give the same sub-word, so the size of the vocabulary does not limit the number of merges.
    return merges[:num_merges]


def _build_tokenizer(base_subwords: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer that applies these merges. It is what tokenizer.json stores.

    The tokenizer that learned the merges is not stored, because it may have learned too many, and because its special
    tokens include every character.
    """
    import tokenizers

    merged_subwords = [left + right for left, right in merges]
    distinct_subwords = dict.fromkeys([*base_subwords, *merged_subwords])
    model = tokenizers.models.BPE(
        vocab={subword: index for index, subword in enumerate(distinct_subwords)},
        merges=merges,
        unk_token=UNKNOWN,
        end_of_word_suffix=END_OF_WORD,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WHITESPACE), "removed")
    tokenizer.decoder = tokenizers.decoders.BPEDecoder(suffix=END_OF_WORD)
    tokenizer.add_special_tokens(list(UNSPLIT_WORDS))
    return tokenizer


def _repeat_words(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield texts that together hold every word as often as it occurs, one word per line.

    Long words are cut, and words with reserved symbols are left out.
    """
    for word, count in counts.items():
        if _contains_reserved(word):
            continue
        starts = range(0, max(len(word), 1), _MAX_TRAINING_WORD_LENGTH)
        fragments = [word[start : start + _MAX_TRAINING_WORD_LENGTH] for start in starts]
        lines = "\n".join(fragments)
        for start in range(0, count, _REPEATS):
            yield "\n".join([lines] * min(_REPEATS, count - start))


def _contains_reserved(word: str) -> bool:
    """Return whether merges inside a word could give a reserved symbol. Such words are split into characters."""
    return any(symbol in word for symbol in RESERVED_SYMBOLS)
