"""Translate lines of text with a trained translator, and score translations of held-out texts with BLEU and chrF.

Start with `translate`, which translates a list of strings, or `evaluate_translations`, which also scores the result.
`LineTranslator` does the work. The search for the best translation is in `beam.py`, the metrics are in `bleu.py`.

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
    def from_hypothesis(cls, hypothesis: Hypothesis, vocabulary: Vocabulary) -> Translation:
        """Convert a hypothesis to text."""
        text = " ".join(vocabulary.decode(hypothesis.ids))
        length = len(hypothesis.ids) + hypothesis.finished
        return cls(text, hypothesis.logp, hypothesis.score, hypothesis.finished, length)


Decode = Callable[[Decoder, Tensor], list[list[Hypothesis]]]
"""A function that decodes a batch source_BS and returns the hypotheses of each row, best first."""


def beam_decoder(vocabulary_pair: VocabularyPair, search: SearchSettings, n_best: int = 1) -> Decode:
    """Return a function that decodes by beam search and never generates <unk>."""
    _, target_vocabulary = vocabulary_pair.vocabularies
    eos, banned = require_eos(target_vocabulary), banned_ids(target_vocabulary)
    return lambda decoder, source_BS: beam_search(decoder, source_BS, eos, search, banned=banned, n_best=n_best)


def translate(
    model: Translator,
    lines: Sequence[str],
    vocabulary_pair: VocabularyPair,
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
        vocabulary_pair: The vocabularies of the source and target language.
        search: Settings of the search.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
        n_best: Number of translations per line. There are fewer if the search finds no more.
        notify: Function that is called with warnings, such as the number of unknown words.
        progress: Callback for progress.
    """
    parsed_lines = list(read_text("".join(f"{line}\n" for line in lines), "the lines to translate"))
    if len(parsed_lines) != len(lines):
        raise ArgumentError("a line to translate holds a line end; pass each line separately")
    translator = LineTranslator(
        model, vocabulary_pair, beam_decoder(vocabulary_pair, search, n_best), precision, notify=notify
    )
    translations = translator.translate(parsed_lines, progress)
    translator.report_unknown()
    return translations


@dataclass
class LineTranslator:
    """Translates lines in one or several calls, and counts the unknown words."""

    model: Translator
    vocabulary_pair: VocabularyPair
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
        _, target_vocabulary = self.vocabulary_pair.vocabularies
        sources = [self._encode(line) for line in lines]
        # Empty lines are not decoded and keep this empty translation.
        translations = [[Translation("", 0.0, 0.0, True, 1)] for _ in lines]
        total_tokens, done_tokens = sum(map(len, sources)), 0
        device = next(self.model.parameters()).device
        with autocast(device, self.precision), decoding(self.model) as decoder:
            padded_lengths = [decoder.padded_length(len(ids)) for ids in sources]
            for batch in batches_by_length(padded_lengths, self.batch_tokens):
                batch_sources = [torch.tensor(sources[index]) for index in batch]
                source_BS = pad_sequence(batch_sources, batch_first=True, padding_value=PAD).to(device)
                for index, hypotheses in zip(batch, self.decode(decoder, source_BS), strict=True):
                    translations[index] = [
                        Translation.from_hypothesis(hypothesis, target_vocabulary) for hypothesis in hypotheses
                    ]
                done_tokens += sum(map(len, batch_sources))
                progress("translating", done_tokens / total_tokens)
        return translations

    def report_unknown(self) -> None:
        """Report the number of unknown words, if there are any."""
        if self.unknown and self.notify:
            count = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
            source_vocabulary, _ = self.vocabulary_pair.vocabularies
            reason = "not in the vocabulary," if source_vocabulary.bpe is None else "with unknown characters, which are"
            self.notify(f"{count} of the source {reason} read as <unk>")

    def _encode(self, line: Line) -> list[int]:
        """Return the ids of a line, with <eos>, or no ids for an empty line, which is not decoded."""
        vocabulary, _ = self.vocabulary_pair.vocabularies
        if not line.words:
            return []
        ids = vocabulary.encode(vocabulary.split_at_unknown(line.words))
        self.unknown += sum(word not in vocabulary for word in line.words)
        if self.longest is not None and len(ids) > self.longest and self.notify:
            self.notify(
                f"line {line.number}: {len(ids):,} tokens, but the longest training sentence had {self.longest:,}; "
                "the translation may be poor"
            )
        return [*ids, require_eos(vocabulary)]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices with at most `max_tokens` tokens, padding included, or with a single longer item.

    For example, lengths [3, 0, 5, 4] with at most 10 tokens give the batches [2, 3] and [0].

    The longest items come first, so that running out of memory happens at once. Items of length 0 are left out.
    """
    batch: list[int] = []
    nonempty = [index for index, length in enumerate(lengths) if length]
    for index in sorted(nonempty, key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) + 1) * longest > max_tokens:
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
class TranslationEvaluation:
    """Translations of a text, one per line of the source, and their scores (BLEU and chrF)."""

    scores: TranslationScores
    translations: list[str]


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
) -> TranslationEvaluation:
    """Translate a text and score the translations against the references."""
    metrics = open_metrics(bleu)
    pairs = dataset.splits[split]
    sources, references = map(pairs.text, SIDES)

    def report(_: str, done: float) -> None:
        progress(f"translating the {pairs.name} text", done)

    options: dict[str, Any] = {"precision": precision, "notify": notify, "progress": report}
    best_translations = [best for best, *_ in translate(model, sources, dataset.vocabulary_pair, search, **options)]
    texts = [translation.text for translation in best_translations]
    source_lengths = pairs.source.lengths - 1  # without <eos>
    scores = metrics.score(texts, references).replace(
        pairs=len(texts),
        unfinished=sum(not translation.finished for translation in best_translations),
        search=search.model_dump(),
        by_length=metrics.score_by_length(texts, references, source_lengths),
    )
    return TranslationEvaluation(scores, texts)


def shorten_dataset(dataset: PairDataset, split: str, max_pairs: int | None) -> PairDataset:
    """Return a dataset with only the first `max_pairs` pairs of a split, or the dataset itself if there are no more."""
    pairs = dataset.splits[split]
    if max_pairs is None or max_pairs >= pairs.pairs:
        return dataset
    kept_numbers = pairs.line_numbers[:max_pairs]
    line_numbers = set(kept_numbers.tolist())
    first_lines = islice(read_file(pairs.files.target), max(line_numbers, default=0))
    target_lines = [line for line in first_lines if line.number in line_numbers]
    source, target = (
        Lines(side.ids[: side.bounds[max_pairs]], side.bounds[: max_pairs + 1]) for side in (pairs.source, pairs.target)
    )
    shortened = replace(
        pairs,
        name=f"shortened {split}",
        source=source,
        target=target,
        line_numbers=kept_numbers,
        words=sum(len(line.words) for line in target_lines),
        bytes=sum(line.size for line in target_lines),
        unknown=_count_unknown(target, dataset.vocabulary_pair.vocabularies[1]),
        unknown_source=_count_unknown(source, dataset.vocabulary_pair.vocabularies[0]),
    )
    return replace(dataset, splits={**dataset.splits, split: shortened})


def _count_unknown(lines: Lines, vocabulary: Vocabulary) -> int:
    return 0 if vocabulary.unk is None else int((lines.ids == vocabulary.unk).sum())


def translate_examples(
    model: Translator,
    dataset: PairDataset,
    split: str,
    count: int,
    search: SearchSettings,
    *,
    precision: str = "float32",
) -> list[Example]:
    """Translate `count` example pairs, spread evenly over a text, and return them with their attention weights."""
    pairs = dataset.splits[split]
    source_vocabulary, target_vocabulary = dataset.vocabulary_pair.vocabularies
    eos = require_eos(target_vocabulary)
    decode = beam_decoder(dataset.vocabulary_pair, search)
    sources, references = map(pairs.text, SIDES)
    device = next(model.parameters()).device
    nonempty = np.flatnonzero(pairs.source.lengths > 1)
    evenly_spaced = np.unique(np.linspace(0, len(nonempty) - 1, min(count, len(nonempty))).astype(int))
    examples = []
    with autocast(device, precision), decoding(model) as decoder:
        for index in nonempty[evenly_spaced].tolist():
            source_ids = pairs.source[index].tolist()
            source_1S = torch.tensor([source_ids], device=device)
            best = decode(decoder, source_1S)[0][0]
            target_ids = [*best.ids, eos] if best.finished else list(best.ids)
            inputs_1T = torch.tensor([[eos, *target_ids[:-1]]], device=device)
            attention_TS = model.attention(inputs_1T, model.encode_source(source_1S))[0].float()
            examples.append(
                Example(
                    source=sources[index],
                    reference=references[index],
                    translation=" ".join(target_vocabulary.decode(best.ids)),
                    source_tokens=tuple(source_vocabulary.words[token] for token in source_ids),
                    target_tokens=tuple(target_vocabulary.words[token] for token in target_ids),
                    attention=tuple(tuple(round(weight, 3) for weight in row) for row in attention_TS.tolist()),
                )
            )
    return examples


def require_eos(vocabulary: Vocabulary) -> int:
    """Return the id of <eos>. Raise an error if the vocabulary has none, because a translator needs it."""
    if vocabulary.eos is None:
        raise ArgumentError("the vocabulary has no <eos>, so no translation could end; train with <eos>")
    return vocabulary.eos


def banned_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids that are never generated in a translation."""
    return () if vocabulary.unk is None else (vocabulary.unk,)
