"""`reefknot translate`: translate lines of text with a trained translation model.

`translate` checks the options and then works in groups of lines: read a group, decode it, rescore it with a language
model (`--rescore`), detokenise it (`--detokenize`) and print it.
"""

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

from reefknot.lab.cli.options import (
    BEAM_HELP,
    LENGTH_PENALTY_HELP,
    TOP_K_HELP,
    TOP_P_HELP,
    DeviceOption,
    JsonOption,
    RunArgument,
    open_language_model,
    open_standard_input,
    open_translator,
)
from reefknot.lab.cli.progress import LineProgress

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

GROUP_SIZE = 2000
"""Number of lines in a group: enough to fill batches with lines of similar length, without reading a whole file."""

SEARCH_PANEL = "Search"
SAMPLING_PANEL = "Sampling"
RESCORING_PANEL = "Rescoring"
OUTPUT_PANEL = "Output"
"""Headings of the help page. Every option is listed under one of these panels."""

FileArgument = Annotated[Path | None, typer.Argument(help="File of lines to translate. [default: standard input]")]
NBestOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=OUTPUT_PANEL,
        help="Print the N best translations of every line, as LINE NUMBER ||| TEXT ||| SCORE. Complete translations "
        "come first. [default: print only the text of the best translation]",
    ),
]
ScoresOption = Annotated[
    bool,
    typer.Option(
        "--scores", rich_help_panel=OUTPUT_PANEL, help="Also print the score of every translation: TEXT ||| SCORE."
    ),
]
DetokenizeOption = Annotated[
    bool,
    typer.Option("--detokenize", rich_help_panel=OUTPUT_PANEL, help="Join punctuation to words, as in ordinary text."),
]
BeamOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=SEARCH_PANEL,
        help=BEAM_HELP,
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=SEARCH_PANEL,
        help=LENGTH_PENALTY_HELP,
    ),
]
GreedyOption = Annotated[
    bool,
    typer.Option(
        "--greedy",
        rich_help_panel=SEARCH_PANEL,
        help="Choose the most probable word at every step instead of searching.",
    ),
]
SampleOption = Annotated[
    bool, typer.Option("--sample", rich_help_panel=SAMPLING_PANEL, help="Sample every word instead of searching.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        rich_help_panel=SAMPLING_PANEL,
        help="Sampling temperature. Lower values make translations more predictable. [default: 1]",
    ),
]
TopKOption = Annotated[int | None, typer.Option(min=1, rich_help_panel=SAMPLING_PANEL, help=TOP_K_HELP)]
TopPOption = Annotated[
    float | None,
    typer.Option(
        min=1e-9,
        max=1.0,
        rich_help_panel=SAMPLING_PANEL,
        help=TOP_P_HELP,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, max=2**62, rich_help_panel=SAMPLING_PANEL, help="Random seed. [default: 0]"),
]
RescoreOption = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=RESCORING_PANEL,
        help="Run of a language model that rescores the translations in the beam: score = (log p of the translator + "
        "weight x log p of the language model) / length ^ penalty.",
    ),
]
WeightOption = Annotated[
    float | None, typer.Option(rich_help_panel=RESCORING_PANEL, help="Weight of the language model in the score.")
]
BatchTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of source tokens per batch. Affects memory and speed, not the translations."),
]


def translate(
    run: RunArgument,
    file: FileArgument = None,
    n_best: NBestOption = None,
    scores: ScoresOption = False,
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    greedy: GreedyOption = False,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    batch_tokens: BatchTokensOption = None,
    rescore: RescoreOption = None,
    weight: WeightOption = None,
    detokenize: DetokenizeOption = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Translate text line by line with a trained translator, using the best weights of its run."""
    from reefknot.lab.evaluation.translation import beam_decoder
    from reefknot.storage.lines import count_lines

    search_options = {"n-best": n_best, "beam": beam, "length-penalty": length_penalty, "rescore": rescore}
    sampling_options = {"temperature": temperature, "top-k": top_k, "top-p": top_p, "seed": seed}
    _check_decoding(greedy, sample, search_options, sampling_options)
    _check_rescoring(rescore, weight)
    _check_output(scores, n_best, as_json)

    # Open the models.
    trained = open_translator(run, device)
    search = trained.experiment.search_with(beam, length_penalty)
    _check_n_best(n_best, search)
    rescorer = None
    if rescore is not None:
        rescorer = _Rescorer.open(rescore, device, cast(float, weight), search)

    # Choose how to decode and how to print.
    num_printed = n_best or 1  # translations to print for each line
    if sample:
        decode = _build_sampling_decoder(trained, search, sampling_options)
    elif greedy:
        decode = _build_greedy_decoder(trained, search)
    elif rescorer is not None:
        # The rescorer needs all translations of the beam, because it may prefer another one.
        decode = beam_decoder(trained.words, search, search.beam)
    else:
        decode = beam_decoder(trained.words, search, num_printed)
    translator = _build_translator(trained, decode, batch_tokens)
    postprocess = _build_detokenizer(trained) if detokenize else list
    format_line = _choose_format(scores, n_best, as_json)

    # Translate group by group.
    num_lines = count_lines(file) if file is not None and file.is_file() else None
    progress = LineProgress("translating", num_lines)
    for lines in _read_groups(file):
        translations = translator.translate(lines, partial(_report_progress, progress, lines))
        if rescorer is not None:
            translations = rescorer.rescore(translations)
        output_lines = []
        for line, candidates in zip(lines, translations, strict=True):
            printed_translations = postprocess(candidates[:num_printed])
            output_lines.append(format_line(line, printed_translations))
        typer.echo("\n".join(output_lines))

    translator.report_unknown()
    if rescorer is not None:
        rescorer.report_unknown()


def _report_progress(progress: LineProgress, lines: Sequence[Line], description: str, fraction: float) -> None:
    """Report the progress in the whole file, given the fraction of a group of lines that is done."""
    lines_before_group = lines[0].number - 1
    progress.report(lines_before_group + fraction * len(lines))


def _check_decoding(
    greedy: bool, sample: bool, search_options: Mapping[str, Any], sampling_options: Mapping[str, Any]
) -> None:
    """Raise an error if decoding options contradict each other or have no effect. Called before a run is opened."""
    from reefknot.errors import SettingsError

    if greedy and sample:
        raise SettingsError("--greedy and --sample exclude each other; leave one of them out")
    if greedy or sample:
        mode = "--greedy" if greedy else "--sample"
        for name, value in search_options.items():
            if value is not None:
                raise SettingsError(f"--{name} is for beam search, which {mode} does not use; leave one of them out")
    for name, value in sampling_options.items():
        if value is None:
            continue
        if not sample:
            raise SettingsError(f"--{name} has no effect without --sample; add --sample or leave --{name} out")
        if name != "temperature" and sampling_options["temperature"] == 0:
            raise SettingsError(
                f"--{name} has no effect at temperature 0, which always chooses the most probable word; leave --{name} "
                "out"
            )


def _check_rescoring(rescore: Path | None, weight: float | None) -> None:
    """Raise an error if only one of --rescore and --weight is set, or if the weight is not finite."""
    from reefknot.errors import SettingsError

    if (rescore is None) != (weight is None):
        present, missing = ("--weight", "--rescore") if rescore is None else ("--rescore", "--weight")
        raise SettingsError(f"{present} needs {missing}; pass the run of a language model and its weight, or neither")
    if weight is not None and not math.isfinite(weight):
        raise SettingsError(f"--weight {weight}: must be a finite number")


def _check_output(scores: bool, n_best: int | None, as_json: bool) -> None:
    """Raise an error if --scores has no effect."""
    from reefknot.errors import SettingsError

    if scores and (n_best is not None or as_json):
        stronger_option = "--json" if as_json else "--n-best"
        raise SettingsError(
            f"--scores has no effect with {stronger_option}, which prints scores anyway; leave --scores out"
        )


def _check_n_best(n_best: int | None, search: SearchSettings) -> None:
    """Raise an error if beam search finds fewer translations than --n-best asks for."""
    from reefknot.errors import SettingsError

    if n_best is not None and n_best > search.beam:
        raise SettingsError(
            f"--n-best {n_best}: a beam of {search.beam} finds at most {search.beam} translations; use a wider --beam"
        )


# Decoders return the translations of a batch source_BS: B sentences of S source tokens.


def _build_greedy_decoder(trained: TrainedTranslator, search: SearchSettings) -> Decode:
    """Return a function that decodes with the most probable word in each step."""
    from reefknot.lab.evaluation.beam import greedy
    from reefknot.lab.evaluation.generation import banned_ids
    from reefknot.lab.evaluation.translation import require_eos

    eos = require_eos(trained.vocabulary)
    banned = banned_ids(trained.vocabulary)
    return lambda decoder, source_BS: [[best] for best in greedy(decoder, source_BS, eos, search, banned)]


def _build_sampling_decoder(
    trained: TrainedTranslator, search: SearchSettings, sampling_options: Mapping[str, Any]
) -> Decode:
    """Return a function that samples every word."""
    from reefknot.lab.evaluation.beam import sample
    from reefknot.lab.evaluation.generation import banned_ids
    from reefknot.lab.evaluation.translation import require_eos

    eos = require_eos(trained.vocabulary)
    banned = banned_ids(trained.vocabulary)
    options = {name.replace("-", "_"): value for name, value in sampling_options.items() if value is not None}
    return lambda decoder, source_BS: [
        [sampled] for sampled in sample(decoder, source_BS, eos, search, banned=banned, **options)
    ]


def _build_translator(trained: TrainedTranslator, decode: Decode, batch_tokens: int | None) -> LineTranslator:
    from reefknot.lab.evaluation.translation import BATCH_TOKENS, LineTranslator

    experiment = trained.experiment
    return LineTranslator(
        trained.model,
        trained.words,
        decode,
        precision=experiment.training.precision,
        batch_tokens=batch_tokens or BATCH_TOKENS,
        longest=experiment.pairs.longest,
        notify=partial(typer.echo, err=True),
    )


def _build_detokenizer(trained: TrainedTranslator) -> Callable[[Sequence[Translation]], list[Translation]]:
    """Return a function that detokenises translations. It is called after rescoring, which needs tokens."""
    from reefknot.lab.text.detokenization import build_detokenizer

    detokenize_text = build_detokenizer(trained.experiment.pairs.target)
    return lambda translations: [
        replace(translation, text=detokenize_text(translation.text)) for translation in translations
    ]


def _read_groups(file: Path | None) -> Iterator[list[Line]]:
    """Yield groups of lines from a file or from standard input.

    If a user types the lines on a terminal, every line is a group, so that it is translated at once.
    """
    from reefknot.storage.lines import read_file, read_stream

    group_size = GROUP_SIZE
    if file is not None:
        lines = read_file(file)
    else:
        standard_input = open_standard_input()
        lines = read_stream(standard_input, "standard input")
        if standard_input.isatty():
            group_size = 1
    while group := list(islice(lines, group_size)):
        yield group


@dataclass
class _Rescorer:
    """Rescores translations with a language model: score = (log p + weight x log p of the model) / length ^ penalty."""

    trained: TrainedLanguageModel
    weight: float
    search: SearchSettings
    run: Path
    """The run folder of the language model."""
    num_unknown: int = field(default=0, init=False)
    """Number of words of translations that the language model read as <unk>."""

    @classmethod
    def open(cls, run: Path, device: str, weight: float, search: SearchSettings) -> _Rescorer:
        """Open the run of a language model; raise an error if it was trained without line ends."""
        from reefknot.errors import SettingsError

        trained = open_language_model(run, device)
        if trained.vocabulary.eos is None:
            raise SettingsError(
                f"--rescore {run}: this model was trained without line ends; use a model that was trained with them"
            )
        return cls(trained, weight, search, run)

    def rescore(self, translations: Sequence[Sequence[Translation]]) -> list[list[Translation]]:
        """Return the translations of every line with their new scores, best first."""
        from reefknot.lab.evaluation.sentences import score_sentences
        from reefknot.lab.evaluation.translation import rerank
        from reefknot.storage.lines import words_in

        # Score the texts with the language model. A text that occurs several times is scored once.
        words_by_text = {}
        for translation in chain.from_iterable(translations):
            words_by_text[translation.text] = words_in(translation.text, "a translation")
        trained = self.trained.with_spellings(chain.from_iterable(words_by_text.values()))
        scored_texts = score_sentences(trained.model, list(words_by_text.values()), trained.vocabulary)
        log_probs = {}
        for text, word_scores in zip(words_by_text, scored_texts, strict=True):
            log_probs[text] = sum(score.log_prob for score in word_scores)
            self.num_unknown += sum(score.unknown for score in word_scores)

        # Combine both scores.
        reranked = []
        for candidates in translations:
            candidate_log_probs = [log_probs[candidate.text] for candidate in candidates]
            reranked.append(rerank(candidates, candidate_log_probs, self.weight, self.search))
        return reranked

    def report_unknown(self) -> None:
        """Print the number of unknown words, if there are any."""
        if self.num_unknown:
            count = "1 word" if self.num_unknown == 1 else f"{self.num_unknown:,} words"
            typer.echo(f"{count} of translations not in the vocabulary of {self.run}: scored as <unk>", err=True)


def _choose_format(scores: bool, n_best: int | None, as_json: bool) -> Callable[[Line, Sequence[Translation]], str]:
    """Return the function that formats a source line with its best translations, as the output options ask for."""
    if as_json:
        return _format_json
    if n_best:
        return _format_n_best
    if scores:
        return _format_scored
    return _format_text


def _format_text(_: Line, translations: Sequence[Translation]) -> str:
    return translations[0].text


def _format_scored(_: Line, translations: Sequence[Translation]) -> str:
    best = translations[0]
    return f"{best.text} ||| {best.score:.4f}"


def _format_n_best(line: Line, translations: Sequence[Translation]) -> str:
    output_lines = []
    for translation in translations:
        output_lines.append(f"{line.number} ||| {translation.text} ||| {translation.score:.4f}")
    return "\n".join(output_lines)


def _format_json(line: Line, translations: Sequence[Translation]) -> str:
    record = {
        "line": line.number,
        "source": " ".join(line.words),
        "translations": [asdict(translation) for translation in translations],
    }
    return json.dumps(record, ensure_ascii=False)
