"""`reefknot translate`: lines of one language in, lines of the other out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from reefknot.lab.cli.options import AsJson, Device, Run, open_language_model, open_translator, standard_input
from reefknot.lab.cli.progress import LineCount

if TYPE_CHECKING:
    from reefknot.lab.evaluation.beam import SearchSettings
    from reefknot.lab.evaluation.translation import Decode, LineTranslator, Translation
    from reefknot.lab.tasks.language_model import TrainedLanguageModel
    from reefknot.lab.tasks.translation import TrainedTranslator
    from reefknot.storage.lines import Line

EXAMPLES = """\b
Examples:
  reefknot translate RUN < test.en > test.de
  reefknot translate RUN test.en --n-best 5 --beam 10 --length-penalty 0.6
  reefknot translate RUN test.en --rescore LM_RUN --weight 0.2
"""

LINES_AT_ONCE = 2000
"""Lines that are read before they are translated, so that there are some of each length; a long file never lies in
memory."""


def translate(
    run: Run,
    file: Annotated[Path | None, typer.Argument(help="Lines to translate; without it, standard input.")] = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, help="Print LINE ||| TEXT ||| SCORE of N, finished first.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Print TEXT ||| SCORE.")] = False,
    beam: Annotated[int | None, typer.Option(min=1, help="Hypotheses kept (the run's).")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Score = log p / length ^ this (the run's).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="No search: take the best word each time.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="No search: draw each word.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sample: below 1 safer (1).")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample: among the k best words.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-9, max=1.0, help="Sample: among the best that reach p.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**62, help="Sample: of the draws (0).")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Source tokens at once: memory only.")] = None,
    rescore: Annotated[
        Path | None, typer.Option(help="Score = (log p + W x log p of this LM run) / length ^ penalty.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Rescore: W, how much that counts.")] = None,
    detokenize: Annotated[bool, typer.Option("--detokenize", help="Put words and punctuation together.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Translate lines with a run's best weights, each to one line."""
    from reefknot.lab.evaluation.translation import searching
    from reefknot.storage.lines import count_lines

    searched = {"n-best": n_best, "beam": beam, "length-penalty": length_penalty, "rescore": rescore}
    drawn = {"temperature": temperature, "top-k": top_k, "top-p": top_p, "seed": seed}
    _check(greedy, sample, searched, drawn, weight)
    trained = open_translator(run, device)
    search = search_settings(trained, beam, length_penalty)
    _check_number(n_best, search)
    ranking = None if rescore is None else _Ranking.open(rescore, device, cast(float, weight), search)
    if greedy or sample:
        decode = _one_each(trained, search, drawn if sample else None)
    else:
        decode = searching(trained.words, search, search.beam if ranking else n_best or 1)
    translator = _translator(trained, decode, batch_tokens)
    polished = _detokenized(trained) if detokenize else list
    written = _as_json if as_json else _as_n_best if n_best else _as_scored if scores else _as_text
    told = LineCount("translating", count_lines(file) if file is not None and file.is_file() else None)
    for lines in _some_at_a_time(file):
        before = lines[0].number - 1
        found = translator.translate(lines, lambda _, done: told.tell(before + done * len(lines)))  # noqa: B023
        if ranking is not None:
            found = ranking.ranked(found)
        shown = (polished(each[: n_best or 1]) for each in found)
        typer.echo("\n".join(written(line, each) for line, each in zip(lines, shown, strict=True)))
    translator.tell_unknown()
    if ranking is not None:
        ranking.tell_unknown()


def search_settings(trained: TrainedTranslator, beam: int | None, length_penalty: float | None) -> SearchSettings:
    """How the run searches for a translation, with what the user has said."""
    from reefknot.lab.config.settings import check
    from reefknot.lab.evaluation.beam import SearchSettings

    said = {"beam": beam, "length_penalty": length_penalty}
    own = trained.experiment.search
    changed = {name: value for name, value in said.items() if value is not None}
    return check(SearchSettings, own.model_dump() | changed, "how to search")


def _check(
    greedy: bool, sample: bool, searched: Mapping[str, Any], drawn: Mapping[str, Any], weight: float | None
) -> None:
    """Refuse options that do not go together, before anything is opened."""
    from reefknot.errors import SettingsError

    if greedy and sample:
        raise SettingsError("--greedy and --sample: a word is chosen in one way at a time; choose one")
    for name, value in searched.items():
        if value is not None and (greedy or sample):
            way = "--greedy" if greedy else "--sample"
            raise SettingsError(f"--{name} goes with beam search, which {way} does without; leave one of both out")
    for name, value in drawn.items():
        if value is not None and not sample:
            raise SettingsError(f"--{name} goes with --sample; add that or leave --{name} out")
    if (searched["rescore"] is None) != (weight is None):
        there, missing = ("--weight", "--rescore") if weight is not None else ("--rescore", "--weight")
        raise SettingsError(f"{there} goes with {missing}: give the run of a language model, and how much it counts")
    if weight is not None and not math.isfinite(weight):
        raise SettingsError(f"--weight {weight}: must be a finite number")


def _check_number(n_best: int | None, search: SearchSettings) -> None:
    from reefknot.errors import SettingsError

    if n_best is not None and n_best > search.beam:
        raise SettingsError(
            f"--n-best {n_best}: a beam of {search.beam} finds {search.beam} at most; use a wider --beam"
        )


def _one_each(trained: TrainedTranslator, search: SearchSettings, drawn: Mapping[str, Any] | None) -> Decode:
    """One translation of each source, word by word: the best each time, or drawn."""
    from reefknot.lab.evaluation.beam import greedy, sample
    from reefknot.lab.evaluation.translation import end_of_line, unwritten

    words = trained.vocabulary
    eos, never = end_of_line(words), unwritten(words)
    if drawn is None:
        return lambda decoder, source_BS: [[best] for best in greedy(decoder, source_BS, eos, search, never)]
    how = {name.replace("-", "_"): value for name, value in drawn.items() if value is not None}
    return lambda decoder, source_BS: [[each] for each in sample(decoder, source_BS, eos, search, never=never, **how)]


def _translator(trained: TrainedTranslator, decode: Decode, batch_tokens: int | None) -> LineTranslator:
    from reefknot.lab.evaluation.translation import BATCH_TOKENS, LineTranslator

    experiment = trained.experiment
    return LineTranslator(
        trained.model,
        trained.words,
        decode,
        experiment.training.precision,
        batch_tokens or BATCH_TOKENS,
        experiment.pairs.longest,
        say=partial(typer.echo, err=True),
    )


def _detokenized(trained: TrainedTranslator) -> Callable[[Sequence[Translation]], list[Translation]]:
    """Translations as a person writes them; after any language model has read their tokens."""
    from reefknot.lab.text.detokenization import detokenizer

    joined = detokenizer(trained.experiment.pairs.target)
    return lambda found: [replace(each, text=joined(each.text)) for each in found]


def _some_at_a_time(file: Path | None) -> Iterator[list[Line]]:
    """The lines of a file or of standard input; each by itself where a person types them."""
    from reefknot.storage.lines import read_file, read_stream

    lines = read_file(file) if file is not None else read_stream(standard_input(), "standard input")
    number = 1 if file is None and standard_input().isatty() else LINES_AT_ONCE
    while some := list(islice(lines, number)):
        yield some


@dataclass
class _Ranking:
    """The language model that has a say in which translations are best."""

    trained: TrainedLanguageModel
    weight: float
    search: SearchSettings
    path: Path
    unknown: int = field(default=0, init=False)

    @classmethod
    def open(cls, path: Path, device: str, weight: float, search: SearchSettings) -> _Ranking:
        """That of a run, which must know where lines end."""
        from reefknot.errors import SettingsError

        trained = open_language_model(path, device)
        if trained.vocabulary.eos is None:
            raise SettingsError(f"--rescore {path}: it was trained without ends of lines; use a run that has them")
        return cls(trained, weight, search, path)

    def ranked(self, found: Sequence[Sequence[Translation]]) -> list[list[Translation]]:
        """The translations of each line in their new order, with their new scores."""
        from reefknot.lab.evaluation.sentences import score_sentences
        from reefknot.lab.evaluation.translation import rerank
        from reefknot.storage.lines import words_in

        texts = {each.text: words_in(each.text, "a translation") for each in chain.from_iterable(found)}
        trained = self.trained.knowing(chain.from_iterable(texts.values()))
        scored = score_sentences(trained.model, list(texts.values()), trained.vocabulary)
        logp = {text: sum(word.log_prob for word in each) for text, each in zip(texts, scored, strict=True)}
        self.unknown += sum(word.unknown for word in chain.from_iterable(scored))
        return [rerank(each, [logp[one.text] for one in each], self.weight, self.search) for each in found]

    def tell_unknown(self) -> None:
        if self.unknown:
            words = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
            told = f"{words} of translations not in the vocabulary of {self.path}, scored as <unk>"
            typer.echo(told, err=True)


def _as_text(_: Line, found: Sequence[Translation]) -> str:
    return found[0].text


def _as_scored(_: Line, found: Sequence[Translation]) -> str:
    return f"{found[0].text} ||| {found[0].score:.4f}"


def _as_n_best(line: Line, found: Sequence[Translation]) -> str:
    return "\n".join(f"{line.number} ||| {each.text} ||| {each.score:.4f}" for each in found)


def _as_json(line: Line, found: Sequence[Translation]) -> str:
    told = {"line": line.number, "source": " ".join(line.words), "translations": [asdict(each) for each in found]}
    return json.dumps(told, ensure_ascii=False)
