"""`reefknot translate`: translate lines of text."""

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
"""Number of lines that are translated as a group.

A group is large enough that batches can be filled with lines of similar length. A long file is never all in memory."""

SEARCH = "Search"
SAMPLING = "Sampling"
RESCORING = "Rescoring"
OUTPUT = "Output"

File = Annotated[Path | None, typer.Argument(help="File with lines to translate. By default, standard input is read.")]
NBest = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=OUTPUT,
        help="Print the N best translations of each line, as LINE ||| TEXT ||| SCORE. Finished translations come "
        "first. By default, the text of the best translation is printed.",
    ),
]
Scores = Annotated[
    bool,
    typer.Option("--scores", rich_help_panel=OUTPUT, help="Print the score of each translation: TEXT ||| SCORE."),
]
Detokenize = Annotated[
    bool,
    typer.Option("--detokenize", rich_help_panel=OUTPUT, help="Attach punctuation to words, as in ordinary text."),
]
Beam = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=SEARCH,
        help="Number of hypotheses that beam search keeps open. By default, the setting of the run is used.",
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=SEARCH,
        help="Exponent of the length penalty: score = log-probability / length ^ penalty. By default, the setting of "
        "the run is used.",
    ),
]
Greedy = Annotated[
    bool,
    typer.Option("--greedy", rich_help_panel=SEARCH, help="Do not search: always choose the most probable word."),
]
Sample = Annotated[bool, typer.Option("--sample", rich_help_panel=SAMPLING, help="Do not search: sample every word.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        rich_help_panel=SAMPLING,
        help="Sampling temperature. Lower values make translations more predictable. The default is 1.",
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=SAMPLING, help="Sample from the k most probable words.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=1e-9,
        max=1.0,
        rich_help_panel=SAMPLING,
        help="Sample from the most probable words that together have probability p.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=2**62, rich_help_panel=SAMPLING, help="Random seed of sampling. The default is 0."),
]
Rescore = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=RESCORING,
        help="Run of a language model that rescores the translations of the beam: score = (log p + weight x log p "
        "of the language model) / length ^ penalty.",
    ),
]
Weight = Annotated[
    float | None, typer.Option(rich_help_panel=RESCORING, help="Weight of the language model in the score.")
]
BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Number of source tokens in a batch. It changes memory and speed, not the translations."),
]


def translate(
    run: Run,
    file: File = None,
    n_best: NBest = None,
    scores: Scores = False,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    greedy: Greedy = False,
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_tokens: BatchTokens = None,
    rescore: Rescore = None,
    weight: Weight = None,
    detokenize: Detokenize = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Translate lines with the best weights of a run, one line of output for each line of input."""
    from reefknot.lab.evaluation.translation import beam_decoder
    from reefknot.storage.lines import count_lines

    searched = {"n-best": n_best, "beam": beam, "length-penalty": length_penalty, "rescore": rescore}
    sampling = {"temperature": temperature, "top-k": top_k, "top-p": top_p, "seed": seed}
    _check_decoding(greedy, sample, searched, sampling)
    _check_rescoring(rescore, weight)
    _check_output(scores, n_best, as_json)
    trained = open_translator(run, device)
    search = trained.experiment.search_with(beam, length_penalty)
    _check_n_best(n_best, search)
    rescorer = None if rescore is None else _Rescorer.open(rescore, device, cast(float, weight), search)
    if greedy or sample:
        decode = _without_search(trained, search, sampling if sample else None)
    else:
        decode = beam_decoder(trained.words, search, search.beam if rescorer else n_best or 1)
    translator = _translator(trained, decode, batch_tokens)
    finish = _detokenizer(trained) if detokenize else list
    formatted = _as_json if as_json else _as_n_best if n_best else _as_scored if scores else _as_text
    count = LineCount("translating", count_lines(file) if file is not None and file.is_file() else None)
    for lines in _groups_of_lines(file):
        before = lines[0].number - 1
        translations = translator.translate(lines, lambda _, done: count.report(before + done * len(lines)))  # noqa: B023
        if rescorer is not None:
            translations = rescorer.rescored(translations)
        best = (finish(candidates[: n_best or 1]) for candidates in translations)
        typer.echo("\n".join(formatted(line, candidates) for line, candidates in zip(lines, best, strict=True)))
    translator.report_unknown()
    if rescorer is not None:
        rescorer.note_unknown()


def _check_decoding(greedy: bool, sample: bool, searched: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Raise an error if options of decoding contradict each other or have no effect. Called before a run is opened."""
    from reefknot.errors import SettingsError

    if greedy and sample:
        raise SettingsError("--greedy and --sample exclude each other; leave one of them out")
    for name, value in searched.items():
        if value is not None and (greedy or sample):
            without = "--greedy" if greedy else "--sample"
            raise SettingsError(f"--{name} is for beam search, which {without} does not use; leave one of them out")
    for name, value in sampling.items():
        if value is not None and not sample:
            raise SettingsError(f"--{name} has no effect without --sample; add --sample or leave --{name} out")
        if value is not None and name != "temperature" and sampling["temperature"] == 0:
            raise SettingsError(
                f"--{name} has no effect at temperature 0, which always chooses the most probable word; leave it out"
            )


def _check_rescoring(rescore: Path | None, weight: float | None) -> None:
    from reefknot.errors import SettingsError

    if (rescore is None) != (weight is None):
        present, missing = ("--weight", "--rescore") if rescore is None else ("--rescore", "--weight")
        raise SettingsError(f"{present} needs {missing}; pass the run of a language model and its weight, or neither")
    if weight is not None and not math.isfinite(weight):
        raise SettingsError(f"--weight {weight}: must be a finite number")


def _check_output(scores: bool, n_best: int | None, as_json: bool) -> None:
    from reefknot.errors import SettingsError

    if scores and (n_best is not None or as_json):
        other = "--json" if as_json else "--n-best"
        raise SettingsError(f"--scores has no effect with {other}, which prints scores anyway; leave --scores out")


def _check_n_best(n_best: int | None, search: SearchSettings) -> None:
    from reefknot.errors import SettingsError

    if n_best is not None and n_best > search.beam:
        raise SettingsError(
            f"--n-best {n_best}: a beam of {search.beam} finds at most {search.beam} translations; use a wider --beam"
        )


def _without_search(trained: TrainedTranslator, search: SearchSettings, sampling: Mapping[str, Any] | None) -> Decode:
    """Return a function that decodes word by word: greedily, or by sampling if there are options of sampling."""
    from reefknot.lab.evaluation.beam import greedy, sample
    from reefknot.lab.evaluation.translation import banned_ids, require_eos

    words = trained.vocabulary
    eos, banned = require_eos(words), banned_ids(words)
    if sampling is None:
        return lambda decoder, source_BS: [[best] for best in greedy(decoder, source_BS, eos, search, banned)]
    options = {name.replace("-", "_"): value for name, value in sampling.items() if value is not None}
    return lambda decoder, source_BS: [
        [sampled] for sampled in sample(decoder, source_BS, eos, search, banned=banned, **options)
    ]


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
        notify=partial(typer.echo, err=True),
    )


def _detokenizer(trained: TrainedTranslator) -> Callable[[Sequence[Translation]], list[Translation]]:
    """Return a function that detokenises translations. Rescoring comes first, because it needs tokens."""
    from reefknot.lab.text.detokenization import build_detokenizer

    detokenized = build_detokenizer(trained.experiment.pairs.target)
    return lambda translations: [
        replace(translation, text=detokenized(translation.text)) for translation in translations
    ]


def _groups_of_lines(file: Path | None) -> Iterator[list[Line]]:
    """Yield groups of lines of a file or of standard input. On a terminal, every line is a group."""
    from reefknot.storage.lines import read_file, read_stream

    lines = read_file(file) if file is not None else read_stream(standard_input(), "standard input")
    size = 1 if file is None and standard_input().isatty() else LINES_AT_ONCE
    while group := list(islice(lines, size)):
        yield group


@dataclass
class _Rescorer:
    """A language model that contributes to the scores of translations."""

    trained: TrainedLanguageModel
    weight: float
    search: SearchSettings
    path: Path
    unknown: int = field(default=0, init=False)
    """Number of words of translations that the language model read as <unk>."""

    @classmethod
    def open(cls, path: Path, device: str, weight: float, search: SearchSettings) -> _Rescorer:
        """Open the run of a language model; raise an error if it was trained without line ends."""
        from reefknot.errors import SettingsError

        trained = open_language_model(path, device)
        if trained.vocabulary.eos is None:
            raise SettingsError(
                f"--rescore {path}: this model was trained without line ends; use a model that was trained with them"
            )
        return cls(trained, weight, search, path)

    def rescored(self, translations: Sequence[Sequence[Translation]]) -> list[list[Translation]]:
        """Return the translations of each line with their new scores, best first."""
        from reefknot.lab.evaluation.sentences import score_sentences
        from reefknot.lab.evaluation.translation import rerank
        from reefknot.storage.lines import words_in

        texts = {
            translation.text: words_in(translation.text, "a translation")
            for translation in chain.from_iterable(translations)
        }
        trained = self.trained.with_spellings(chain.from_iterable(texts.values()))
        scores = score_sentences(trained.model, list(texts.values()), trained.vocabulary)
        log_probs = {text: sum(word.log_prob for word in words) for text, words in zip(texts, scores, strict=True)}
        self.unknown += sum(word.unknown for word in chain.from_iterable(scores))
        return [
            rerank(candidates, [log_probs[candidate.text] for candidate in candidates], self.weight, self.search)
            for candidates in translations
        ]

    def note_unknown(self) -> None:
        """Print the number of unknown words, if there are any."""
        if self.unknown:
            words = "1 word" if self.unknown == 1 else f"{self.unknown:,} words"
            typer.echo(f"{words} of translations not in the vocabulary of {self.path}: scored as <unk>", err=True)


def _as_text(_: Line, translations: Sequence[Translation]) -> str:
    return translations[0].text


def _as_scored(_: Line, translations: Sequence[Translation]) -> str:
    return f"{translations[0].text} ||| {translations[0].score:.4f}"


def _as_n_best(line: Line, translations: Sequence[Translation]) -> str:
    return "\n".join(
        f"{line.number} ||| {translation.text} ||| {translation.score:.4f}" for translation in translations
    )


def _as_json(line: Line, translations: Sequence[Translation]) -> str:
    record = {
        "line": line.number,
        "source": " ".join(line.words),
        "translations": [asdict(translation) for translation in translations],
    }
    return json.dumps(record, ensure_ascii=False)
