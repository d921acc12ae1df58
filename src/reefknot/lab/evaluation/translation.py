"""Translate lines, and translate and score held-out texts (`bleu.py`).

A line is split into words (`storage/lines.py`) and words into tokens, followed by <eos>. Lines of similar length are
decoded together, and translations are returned in the order of the lines. Sub-words are joined into words and words are
separated by spaces. If the training text was not tokenised, the result is plain text.

Shapes: B lines, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reefknot.errors import ArgumentError
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search
from reefknot.lab.evaluation.bleu import BleuSettings, open_metrics
from reefknot.lab.evaluation.decoding import Decoder, decoding
from reefknot.lab.evaluation.grid import Progress, ignore_progress
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.runs.result import Example, TranslationScores
from reefknot.lab.text.pair_dataset import SIDES, Lines, PairDataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.nn.models.translator import PAD, Translator
from reefknot.storage.lines import Line, read_file, read_text

BATCH_TOKENS = 4096
"""Number of source tokens, padding included, in a batch. It bounds the memory and changes no translation."""


@dataclass(frozen=True)
class Translation:
    """A translation of a line."""

    text: str
    logp: float
    score: float
    """Score by which the translation was selected."""
    finished: bool
    """Whether the translation ends with <eos>. If not, the search has reached the length limit."""
    length: int
    """Number of target tokens, including <eos> if the translation is finished."""

    @classmethod
    def from_hypothesis(cls, hypothesis: Hypothesis, words: Vocabulary) -> Translation:
        """Convert a hypothesis to text."""
        text, length = " ".join(words.decode(hypothesis.ids)), len(hypothesis.ids) + hypothesis.finished
        return cls(text, hypothesis.logp, hypothesis.score, hypothesis.finished, length)


Decode = Callable[[Decoder, Tensor], list[list[Hypothesis]]]
"""A function that decodes a batch source_BS and returns the hypotheses of each row, best first."""


def beam_decoder(words: VocabularyPair, search: SearchSettings, n_best: int = 1) -> Decode:
    """Return a function that decodes by beam search and never generates <unk>."""
    _, target = words.vocabularies
    eos, banned = end_of_line(target), excluded_ids(target)
    return lambda decoder, source_BS: beam_search(decoder, source_BS, eos, search, banned, n_best)


def translate(
    model: Translator,
    lines: Sequence[str],
    words: VocabularyPair,
    search: SearchSettings,
    *,
    precision: str = "float32",
    n_best: int = 1,
    notify: Callable[[str], None] | None = None,
    progress: Progress = ignore_progress,
) -> list[list[Translation]]:
    """Return the translations of each line, best first. The only translation of an empty line is empty.

    Args:
        model: The translator.
        lines: The lines to translate.
        words: The vocabularies of both sides.
        search: Settings of the search.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
        n_best: Number of translations per line. There are fewer if the search finds no more.
        notify: Function that is called with warnings, such as the number of unknown words.
        progress: Callback for progress.
    """
    read = list(read_text("".join(f"{line}\n" for line in lines), "the lines to translate"))
    if len(read) != len(lines):
        raise ArgumentError("a line to translate holds a line end; pass each line separately")
    translator = LineTranslator(model, words, beam_decoder(words, search, n_best), precision, notify=notify)
    translations = translator.translate(read, progress)
    translator.report_unknown()
    return translations


@dataclass
class LineTranslator:
    """Translates lines in one or several calls, and counts the unknown words."""

    model: Translator
    words: VocabularyPair
    decode: Decode
    precision: str = "float32"
    batch_tokens: int = BATCH_TOKENS
    longest: int | None = None
    """Number of tokens of the longest training sentence. Longer lines cause a warning."""
    notify: Callable[[str], None] | None = None
    """Function that is called with warnings."""
    unknown: int = field(default=0, init=False)
    """Number of words that were read as <unk>."""

    def translate(self, lines: Sequence[Line], progress: Progress = ignore_progress) -> list[list[Translation]]:
        """Return the translations of each line, best first."""
        _, target = self.words.vocabularies
        sources = [self._ids(line) for line in lines]
        translations = [[Translation("", 0.0, 0.0, True, 1)] for _ in lines]
        total, done = sum(map(len, sources)), 0
        device = next(self.model.parameters()).device
        with autocast(device, self.precision), decoding(self.model) as decoder:
            widths = [decoder.width(len(ids)) for ids in sources]
            for batch in batches_by_length(widths, self.batch_tokens):
                rows = [torch.tensor(sources[index]) for index in batch]
                source_BS = pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
                for index, hypotheses in zip(batch, self.decode(decoder, source_BS), strict=True):
                    translations[index] = [Translation.from_hypothesis(hypothesis, target) for hypothesis in hypotheses]
                done += sum(map(len, rows))
                progress("translating", done / total)
        return translations

    def report_unknown(self) -> None:
        """Report the number of unknown words, if there are any."""
        if self.unknown and self.notify:
            words = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
            source, _ = self.words.vocabularies
            reason = "not in the vocabulary," if source.bpe is None else "with unknown characters, which are"
            self.notify(f"{words} of the source {reason} read as <unk>")

    def _ids(self, line: Line) -> list[int]:
        """Return the ids of a line, with <eos>, or no ids for an empty line, which is not decoded."""
        source, _ = self.words.vocabularies
        if not line.words:
            return []
        ids = source.encode(source.known_parts(line.words))
        self.unknown += sum(word not in source for word in line.words)
        if self.longest is not None and len(ids) > self.longest and self.notify:
            self.notify(
                f"line {line.number}: {len(ids):,} tokens, but the longest training sentence had {self.longest:,}; "
                "the translation may be poor"
            )
        return [*ids, end_of_line(source)]


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices with at most `tokens` tokens, padding included, or with a single longer item.

    The longest items come first, so that running out of memory happens at once. Items of length 0 are left out.
    """
    batch: list[int] = []
    for index in sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def rerank(
    translations: Sequence[Translation], log_probs: Sequence[float], weight: float, search: SearchSettings
) -> list[Translation]:
    """Sort the translations of a line, finished translations first, by a score that includes a language model:

        (log p + weight x log p of the language model) / length^length_penalty

    Both log-probabilities are of the whole sentence, so the length penalty applies to both alike.

    Args:
        translations: The translations of a line.
        log_probs: Log-probability of each translation under the language model.
        weight: Weight of the language model.
        search: Settings of the search, which define the length penalty.
    """
    scored = [
        replace(translation, score=search.score(translation.logp + weight * logp, translation.length))
        for translation, logp in zip(translations, log_probs, strict=True)
    ]
    return sorted(scored, key=lambda translation: (not translation.finished, -translation.score))


@dataclass(frozen=True)
class Evaluated:
    """Translations of a text and their scores."""

    scores: TranslationScores
    lines: list[str]


def evaluate_translations(
    model: Translator,
    dataset: PairDataset,
    split: str,
    search: SearchSettings,
    bleu: BleuSettings,
    *,
    precision: str = "float32",
    notify: Callable[[str], None] | None = None,
    progress: Progress = ignore_progress,
) -> Evaluated:
    """Translate a text and score the translations against the references."""
    metrics = open_metrics(bleu)
    pairs = dataset.splits[split]
    sources, references = map(pairs.text, SIDES)

    def report(_: str, done: float) -> None:
        progress(f"translating the {pairs.name} text", done)

    options: dict[str, Any] = {"precision": precision, "notify": notify, "progress": report}
    translations = [best for best, *_ in translate(model, sources, dataset.words, search, **options)]
    lines = [translation.text for translation in translations]
    scores = metrics.score(lines, references).replace(
        pairs=len(lines),
        unfinished=sum(not translation.finished for translation in translations),
        search=search.model_dump(),
        by_length=metrics.by_length(lines, references, pairs.source.lengths - 1),
    )
    return Evaluated(scores, lines)


def beginning(dataset: PairDataset, split: str, number: int | None) -> PairDataset:
    """Return a dataset with only the first `number` pairs of a split, or the dataset itself if there are no more."""
    pairs = dataset.splits[split]
    if number is None or number >= pairs.pairs:
        return dataset
    numbers = pairs.numbers[:number]
    line_numbers = set(numbers.tolist())
    first_lines = islice(read_file(pairs.files.target), max(line_numbers, default=0))
    counted = [line for line in first_lines if line.number in line_numbers]
    source, target = (
        Lines(side.ids[: side.bounds[number]], side.bounds[: number + 1]) for side in (pairs.source, pairs.target)
    )
    first = replace(
        pairs,
        name=f"shortened {split}",
        source=source,
        target=target,
        numbers=numbers,
        words=sum(len(line.words) for line in counted),
        bytes=sum(line.size for line in counted),
        unknown=_count_unknown(target, dataset.words.vocabularies[1]),
        unknown_source=_count_unknown(source, dataset.words.vocabularies[0]),
    )
    return replace(dataset, splits={**dataset.splits, split: first})


def _count_unknown(lines: Lines, words: Vocabulary) -> int:
    return 0 if words.unk is None else int((lines.ids == words.unk).sum())


def examples(
    model: Translator,
    dataset: PairDataset,
    split: str,
    number: int,
    search: SearchSettings,
    *,
    precision: str = "float32",
) -> list[Example]:
    """Translate example pairs, spread evenly over a text, and return them with their attention weights."""
    pairs = dataset.splits[split]
    source, target = dataset.words.vocabularies
    decode = beam_decoder(dataset.words, search)
    sources, references = map(pairs.text, SIDES)
    device = next(model.parameters()).device
    nonempty = np.flatnonzero(pairs.source.lengths > 1)
    chosen = []
    with autocast(device, precision), decoding(model) as decoder:
        for rank in np.unique(np.linspace(0, len(nonempty) - 1, min(number, len(nonempty))).astype(int)):
            index = int(nonempty[rank])
            ids = pairs.source[index].tolist()
            source_1S = torch.tensor([ids], device=device)
            best = decode(decoder, source_1S)[0][0]
            written = [*best.ids, end_of_line(target)] if best.finished else list(best.ids)
            x_1T = torch.tensor([[end_of_line(target), *written[:-1]]], device=device)
            a_TS = model.attention(x_1T, model.read(source_1S))[0].float()
            chosen.append(
                Example(
                    source=sources[index],
                    reference=references[index],
                    translation=" ".join(target.decode(best.ids)),
                    source_tokens=tuple(source.words[token] for token in ids),
                    target_tokens=tuple(target.words[token] for token in written),
                    attention=tuple(tuple(round(weight, 3) for weight in row) for row in a_TS.tolist()),
                )
            )
    return chosen


def end_of_line(words: Vocabulary) -> int:
    """Return the id of <eos>, which every vocabulary of a translator needs."""
    if words.eos is None:
        raise ArgumentError("the vocabulary has no <eos>, so no translation could end; train with <eos>")
    return words.eos


def excluded_ids(words: Vocabulary) -> tuple[int, ...]:
    """Return the ids that are never generated in a translation."""
    return () if words.unk is None else (words.unk,)
