"""Translations of lines, and of held-out texts with what they are worth (`bleu.py`).

A line is cut into words (`storage/lines.py`) and these into tokens, which <eos> ends. Lines of like length are decoded
together, and come back in the order that they were given in. Words are written with spaces between them, pieces of
words joined: of a text that was not tokenised, that is plain text again.

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
from reefknot.lab.evaluation.grid import Progress, unheard
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.runs.result import Example, Translated
from reefknot.lab.text.pair_dataset import SIDES, Lines, PairDataset
from reefknot.lab.text.vocabulary import Sides, Vocabulary
from reefknot.nn.models.translator import PAD, Translator
from reefknot.storage.lines import Line, read_file, read_text

BATCH_TOKENS = 4096
"""Source tokens, padding included, that are decoded together: bounds the memory, never changes a translation."""


@dataclass(frozen=True)
class Translation:
    """What a line was translated to."""

    text: str
    logp: float
    score: float
    """What it was chosen by."""
    finished: bool
    """False where the search ended before the sentence did."""
    length: int
    """Target tokens, <eos> counted where it is finished."""

    @classmethod
    def of(cls, found: Hypothesis, words: Vocabulary) -> Translation:
        """What a hypothesis says in words."""
        text = " ".join(words.decode(found.ids))
        return cls(text, found.logp, found.score, found.finished, len(found.ids) + found.finished)


Decode = Callable[[Decoder, Tensor], list[list[Hypothesis]]]
"""What finds hypotheses: for source_BS those of each row, best first."""


def searching(words: Sides, search: SearchSettings, n_best: int = 1) -> Decode:
    """Beam search for the target's words; <unk> is none."""
    _, target = words.vocabularies
    eos, never = end_of_line(target), unwritten(target)
    return lambda decoder, source_BS: beam_search(decoder, source_BS, eos, search, never, n_best)


def translate(
    model: Translator,
    lines: Sequence[str],
    words: Sides,
    search: SearchSettings,
    *,
    precision: str = "float32",
    n_best: int = 1,
    say: Callable[[str], None] | None = None,
    progress: Progress = unheard,
) -> list[list[Translation]]:
    """The translations of each line, best first; an empty line has one, which is empty.

    Arguments:
        n_best: how many of each line; fewer where the search finds no more.
        say: hears what the model could not read.
    """
    read = list(read_text("".join(f"{line}\n" for line in lines), "the lines to translate"))
    if len(read) != len(lines):
        raise ArgumentError("a line to translate holds a line end; give each line by itself")
    translator = LineTranslator(model, words, searching(words, search, n_best), precision, say=say)
    found = translator.translate(read, progress)
    translator.tell_unknown()
    return found


@dataclass
class LineTranslator:
    """A model that is given lines, all at once or some at a time, and keeps count of what it could not read."""

    model: Translator
    words: Sides
    decode: Decode
    precision: str = "float32"
    batch_tokens: int = BATCH_TOKENS
    longest: int | None = None
    """Tokens of the longest sentence in training: where a line has more, it says so."""
    say: Callable[[str], None] | None = None
    unknown: int = field(default=0, init=False)
    """Words that were read as <unk>."""

    def translate(self, lines: Sequence[Line], progress: Progress = unheard) -> list[list[Translation]]:
        """The translations of each line, best first."""
        _, target = self.words.vocabularies
        sources = [self._ids(line) for line in lines]
        found = [[Translation("", 0.0, 0.0, True, 1)] for _ in lines]
        total, done = sum(map(len, sources)), 0
        device = next(self.model.parameters()).device
        with autocast(device, self.precision), decoding(self.model) as decoder:
            widths = [decoder.width(len(ids)) for ids in sources]
            for batch in batches_by_length(widths, self.batch_tokens):
                rows = [torch.tensor(sources[index]) for index in batch]
                source_BS = pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
                for index, hypotheses in zip(batch, self.decode(decoder, source_BS), strict=True):
                    found[index] = [Translation.of(each, target) for each in hypotheses]
                done += sum(map(len, rows))
                progress("translating", done / total)
        return found

    def tell_unknown(self) -> None:
        """Say how many words were not known, if there were any."""
        if self.unknown and self.say:
            words = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
            source, _ = self.words.vocabularies
            strange = "not in the vocabulary," if source.bpe is None else "with characters not in the vocabulary, these"
            self.say(f"{words} of the source {strange} read as <unk>")

    def _ids(self, line: Line) -> list[int]:
        """The tokens of a line and <eos>; none of an empty line, which nothing is to be searched for."""
        source, _ = self.words.vocabularies
        if not line.words:
            return []
        ids = source.encode(source.known_parts(line.words))
        self.unknown += sum(word not in source for word in line.words)
        if self.longest is not None and len(ids) > self.longest and self.say:
            self.say(
                f"line {line.number}: {len(ids):,} tokens, where the sentences of training had {self.longest:,} at "
                "most; its translation may be poor"
            )
        return [*ids, end_of_line(source)]


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most so many tokens, padding included, or of one; what has length 0 is in none.

    The longest come first: what does not fit into the memory is found out at once.
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
    found: Sequence[Translation], log_probs: Sequence[float], weight: float, search: SearchSettings
) -> list[Translation]:
    """Translations of a line, finished ones first and each kind best first by
    (log p + weight x log p of a language model) / length^length_penalty.

    Both are of the whole sentence, so that the length penalty weighs them alike. That figure is the new score.

    Arguments:
        log_probs: what the language model gives each.
    """
    scored = [
        replace(each, score=search.score(each.logp + weight * logp, each.length))
        for each, logp in zip(found, log_probs, strict=True)
    ]
    return sorted(scored, key=lambda each: (not each.finished, -each.score))


@dataclass(frozen=True)
class Evaluated:
    """Translations of a text and what they are worth."""

    figures: Translated
    lines: list[str]


def evaluate_translations(
    model: Translator,
    dataset: PairDataset,
    split: str,
    search: SearchSettings,
    bleu: BleuSettings,
    *,
    precision: str = "float32",
    say: Callable[[str], None] | None = None,
    progress: Progress = unheard,
) -> Evaluated:
    """Translate a text and compare it with its references."""
    metrics = open_metrics(bleu)
    pairs = dataset.splits[split]
    sources, references = map(pairs.text, SIDES)

    def tell(_: str, done: float) -> None:
        progress(f"translating the {pairs.name} text", done)

    how: dict[str, Any] = {"precision": precision, "say": say, "progress": tell}
    found = [best for best, *_ in translate(model, sources, dataset.words, search, **how)]
    lines = [each.text for each in found]
    figures = metrics.figures(lines, references).replace(
        pairs=len(lines),
        unfinished=sum(not each.finished for each in found),
        search=search.model_dump(),
        by_length=metrics.by_length(lines, references, pairs.source.lengths - 1),
    )
    return Evaluated(figures, lines)


def beginning(dataset: PairDataset, split: str, number: int | None) -> PairDataset:
    """The dataset with the first pairs of a text; itself where no fewer than all are asked for."""
    pairs = dataset.splits[split]
    if number is None or number >= pairs.pairs:
        return dataset
    numbers = pairs.numbers[:number]
    kept = set(numbers.tolist())
    counted = [line for line in islice(read_file(pairs.files.target), max(kept, default=0)) if line.number in kept]
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
    """Pairs from all over a text with their translations, and where each token of those looked in the source."""
    pairs = dataset.splits[split]
    source, target = dataset.words.vocabularies
    decode = searching(dataset.words, search)
    sources, references = map(pairs.text, SIDES)
    device = next(model.parameters()).device
    there = np.flatnonzero(pairs.source.lengths > 1)
    found = []
    with autocast(device, precision), decoding(model) as decoder:
        for place in np.unique(np.linspace(0, len(there) - 1, min(number, len(there))).astype(int)):
            index = int(there[place])
            ids = pairs.source[index].tolist()
            source_1S = torch.tensor([ids], device=device)
            best = decode(decoder, source_1S)[0][0]
            written = [*best.ids, end_of_line(target)] if best.finished else list(best.ids)
            x_1T = torch.tensor([[end_of_line(target), *written[:-1]]], device=device)
            a_TS = model.attention(x_1T, model.read(source_1S))[0].float()
            found.append(
                Example(
                    source=sources[index],
                    reference=references[index],
                    translation=" ".join(target.decode(best.ids)),
                    source_tokens=tuple(source.words[each] for each in ids),
                    target_tokens=tuple(target.words[each] for each in written),
                    attention=tuple(tuple(round(weight, 3) for weight in row) for row in a_TS.tolist()),
                )
            )
    return found


def end_of_line(words: Vocabulary) -> int:
    """The id of <eos>, which every vocabulary of pairs has."""
    if words.eos is None:
        raise ArgumentError("a vocabulary without <eos> cannot tell where a translation ends; train one with it")
    return words.eos


def unwritten(words: Vocabulary) -> tuple[int, ...]:
    """Tokens that no translation holds."""
    return () if words.unk is None else (words.unk,)
