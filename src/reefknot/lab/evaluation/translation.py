"""Translate lines of text with a trained translator, and score translations of held-out texts with BLEU and chrF.

Start with `translate`, or with `evaluate_translations`, which also scores the result:

    translations = translate(model, ["ein Haus"], vocabulary_pair, SearchSettings())
    translations[0][0].text    # the best translation of the first line

`LineTranslator` does the work. The search for the best translation is in `beam.py`, the metrics are in `bleu.py`. A
line is split into words (`storage/lines.py`) and words into tokens, followed by <eos>. In a translation, sub-words are
joined into words and words are separated by spaces. If the training text was not tokenised, the result is plain text.

Shapes: B lines, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reefknot.errors import ArgumentError
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search
from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics
from reefknot.lab.evaluation.decoding import Decoder, decoding
from reefknot.lab.evaluation.generation import banned_ids
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.runs.result import Example, TranslationScores
from reefknot.lab.text.pair_dataset import Lines, PairDataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.nn.models.translator import PAD, Translator
from reefknot.storage.lines import Line, read_file, read_text
from reefknot.storage.progress import ProgressCallback, ignore_progress

BATCH_TOKENS = 4096
"""Number of source tokens, padding included, in a batch. It bounds the memory and changes no translation."""


@dataclass(frozen=True)
class Translation:
    """A translation of a line."""

    text: str
    logp: float
    """Log-probability of the translation."""
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


def translate(
    model: Translator,
    lines: Sequence[str],
    vocabulary_pair: VocabularyPair,
    search: SearchSettings,
    *,
    precision: str = "float32",
    n_best: int = 1,
    notify: Callable[[str], None] | None = None,
    progress: ProgressCallback = ignore_progress,
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
    joined_lines = "".join(f"{line}\n" for line in lines)
    parsed_lines = list(read_text(joined_lines, "the lines to translate"))
    if len(parsed_lines) != len(lines):
        raise ArgumentError("a line to translate holds a line end; pass each line separately")
    decode = beam_decoder(vocabulary_pair, search, n_best)
    translator = LineTranslator(model, vocabulary_pair, decode, precision, notify=notify)
    translations = translator.translate(parsed_lines, progress)
    translator.report_unknown()
    return translations


def beam_decoder(vocabulary_pair: VocabularyPair, search: SearchSettings, n_best: int = 1) -> Decode:
    """Return a function that decodes by beam search and never generates <unk>."""
    _, target_vocabulary = vocabulary_pair.vocabularies
    eos = require_eos(target_vocabulary)
    banned = banned_ids(target_vocabulary)

    def decode(decoder: Decoder, source_BS: Tensor) -> list[list[Hypothesis]]:
        return beam_search(decoder, source_BS, eos, search, banned=banned, n_best=n_best)

    return decode


@dataclass
class LineTranslator:
    """Translates lines in one or several calls, and counts the unknown words.

    Lines of similar length are decoded together, and translations are returned in the order of the lines.
    """

    model: Translator
    vocabulary_pair: VocabularyPair
    decode: Decode
    """Function that decodes a batch, such as the result of `beam_decoder`."""
    precision: str = "float32"
    batch_tokens: int = BATCH_TOKENS
    """Number of source tokens, padding included, in a batch."""
    longest: int | None = None
    """Number of tokens of the longest training sentence. Longer lines cause a warning."""
    notify: Callable[[str], None] | None = None
    """Function that is called with warnings."""
    unknown: int = field(default=0, init=False)
    """Number of words that were read as <unk>."""

    def translate(self, lines: Sequence[Line], progress: ProgressCallback = ignore_progress) -> list[list[Translation]]:
        """Return the translations of each line, best first."""
        _, target_vocabulary = self.vocabulary_pair.vocabularies
        sources = [self._encode(line) for line in lines]
        # Empty lines are not decoded and keep this empty translation.
        translations = [[Translation("", logp=0.0, score=0.0, finished=True, length=1)] for _ in lines]
        total_tokens = sum(map(len, sources))
        done_tokens = 0
        device = next(self.model.parameters()).device
        with autocast(device, self.precision), decoding(self.model) as decoder:
            padded_lengths = [decoder.padded_length(len(ids)) for ids in sources]
            for batch in batches_by_length(padded_lengths, self.batch_tokens):
                batch_sources = [torch.tensor(sources[index]) for index in batch]
                source_BS = pad_sequence(batch_sources, batch_first=True, padding_value=PAD).to(device)
                batch_hypotheses = self.decode(decoder, source_BS)
                for index, hypotheses in zip(batch, batch_hypotheses, strict=True):
                    translations[index] = [
                        Translation.from_hypothesis(hypothesis, target_vocabulary) for hypothesis in hypotheses
                    ]
                done_tokens += sum(map(len, batch_sources))
                progress("translating", done_tokens / total_tokens)
        return translations

    def report_unknown(self) -> None:
        """Report the number of unknown words, if there are any."""
        if not self.unknown or not self.notify:
            return
        count = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
        source_vocabulary, _ = self.vocabulary_pair.vocabularies
        reason = "with unknown characters, which are"
        if source_vocabulary.bpe is None:
            reason = "not in the vocabulary,"
        self.notify(f"{count} of the source {reason} read as <unk>")

    def _encode(self, line: Line) -> list[int]:
        """Return the ids of a line, with <eos>, or no ids for an empty line, which is not decoded."""
        source_vocabulary, _ = self.vocabulary_pair.vocabularies
        if not line.words:
            return []
        ids = source_vocabulary.encode(source_vocabulary.split_at_unknown(line.words))
        self.unknown += sum(word not in source_vocabulary for word in line.words)
        if self.longest is not None and len(ids) > self.longest and self.notify:
            self.notify(
                f"line {line.number}: {len(ids):,} tokens, but the longest training sentence had {self.longest:,}; "
                "the translation may be poor"
            )
        return [*ids, require_eos(source_vocabulary)]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices with at most `max_tokens` tokens, padding included, or with a single longer item.

    For example, lengths [3, 0, 5, 4] with at most 10 tokens give the batches [2, 3] and [0].

    The longest items come first, so that running out of memory happens at once. Items of length 0 are left out.
    """
    nonempty = [index for index, length in enumerate(lengths) if length]
    longest_first = sorted(nonempty, key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in longest_first:
        if batch:
            longest = lengths[batch[0]]
            is_full = (len(batch) + 1) * longest > max_tokens
            if is_full:
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
    rescored = []
    for translation, language_model_logp in zip(translations, log_probs, strict=True):
        combined_logp = translation.logp + weight * language_model_logp
        score = search.score(combined_logp, translation.length)
        rescored.append(replace(translation, score=score))
    return sorted(rescored, key=lambda translation: (not translation.finished, -translation.score))


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
    progress: ProgressCallback = ignore_progress,
) -> TranslationEvaluation:
    """Translate a text and score the translations against the references."""
    metrics = create_metrics(bleu)
    pair_split = dataset.splits[split]
    sources = pair_split.read_text("source")
    references = pair_split.read_text("target")

    def report(_: str, fraction: float) -> None:
        progress(f"translating the {pair_split.name} text", fraction)

    translations = translate(
        model,
        sources,
        dataset.vocabulary_pair,
        search,
        precision=precision,
        notify=notify,
        progress=report,
    )
    best_translations = [translations_of_line[0] for translations_of_line in translations]
    texts = [translation.text for translation in best_translations]

    source_lengths = pair_split.source.lengths - 1  # without <eos>
    scores = metrics.score(texts, references).replace(
        pairs=len(texts),
        unfinished=sum(not translation.finished for translation in best_translations),
        search=search.model_dump(),
        by_length=metrics.score_by_length(texts, references, source_lengths),
    )
    return TranslationEvaluation(scores, texts)


def shorten_dataset(dataset: PairDataset, split: str, max_pairs: int | None) -> PairDataset:
    """Return a dataset with only the first `max_pairs` pairs of a split, or the dataset itself if there are no more."""
    pair_split = dataset.splits[split]
    if max_pairs is None or max_pairs >= pair_split.pairs:
        return dataset

    # Read the target lines of the first pairs, to count their words and bytes.
    kept_numbers = pair_split.line_numbers[:max_pairs]
    line_numbers = set(kept_numbers.tolist())
    first_lines = islice(read_file(pair_split.files.target), max(line_numbers, default=0))
    target_lines = [line for line in first_lines if line.number in line_numbers]

    source = _first_lines(pair_split.source, max_pairs)
    target = _first_lines(pair_split.target, max_pairs)
    source_vocabulary, target_vocabulary = dataset.vocabulary_pair.vocabularies
    shortened = replace(
        pair_split,
        name=f"shortened {split}",
        source=source,
        target=target,
        line_numbers=kept_numbers,
        words=sum(len(line.words) for line in target_lines),
        bytes=sum(line.size for line in target_lines),
        unknown=target_vocabulary.count_unknown(target.ids),
        unknown_source=source_vocabulary.count_unknown(source.ids),
    )
    return replace(dataset, splits={**dataset.splits, split: shortened})


def _first_lines(lines: Lines, count: int) -> Lines:
    """Return the first `count` lines."""
    end = lines.bounds[count]
    return Lines(lines.ids[:end], lines.bounds[: count + 1])


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
    pair_split = dataset.splits[split]
    source_vocabulary, target_vocabulary = dataset.vocabulary_pair.vocabularies
    eos = require_eos(target_vocabulary)
    decode = beam_decoder(dataset.vocabulary_pair, search)
    sources = pair_split.read_text("source")
    references = pair_split.read_text("target")
    device = next(model.parameters()).device

    # Choose pairs that are not empty.
    nonempty = np.flatnonzero(pair_split.source.lengths > 1)
    num_examples = min(count, len(nonempty))
    evenly_spaced = np.unique(np.linspace(0, len(nonempty) - 1, num_examples).astype(int))

    examples = []
    with autocast(device, precision), decoding(model) as decoder:
        for index in nonempty[evenly_spaced].tolist():
            # Translate the source.
            source_ids = pair_split.source[index].tolist()
            source_1S = torch.tensor([source_ids], device=device)
            best = decode(decoder, source_1S)[0][0]

            # Read the translation again, to compute the attention of each of its tokens.
            target_ids = list(best.ids)
            if best.finished:
                target_ids.append(eos)
            inputs_1T = torch.tensor([[eos, *target_ids[:-1]]], device=device)
            attention_TS = model.attention(inputs_1T, model.encode_source(source_1S))[0].float()
            attention = [tuple(round(weight, 3) for weight in weights_S) for weights_S in attention_TS.tolist()]
            examples.append(
                Example(
                    source=sources[index],
                    reference=references[index],
                    translation=" ".join(target_vocabulary.decode(best.ids)),
                    source_tokens=tuple(source_vocabulary.words[token] for token in source_ids),
                    target_tokens=tuple(target_vocabulary.words[token] for token in target_ids),
                    attention=tuple(attention),
                )
            )
    return examples


def require_eos(vocabulary: Vocabulary) -> int:
    """Return the id of <eos>. Raise an error if the vocabulary has none, because a translator needs it."""
    if vocabulary.eos is None:
        raise ArgumentError("the vocabulary has no <eos>, so no translation could end; train with <eos>")
    return vocabulary.eos
