"""Generate PAPERS.md, and the results in docs/ends.md, from the records under `results/`.

    script/papers                     write the files that are out of date
    script/papers --check             only list the files that are out of date
    script/papers --record RUN ...    first add finished runs, or records of figures, to the records

A record is `results/<recipe>/<row>/seed<k>/` with config, environment, metrics and result.json, and with evaluations/
if the run has any. The record of a figure is `results/figures/<figure>.json`, and records of training steps are in
`results/performance/`. A record that does not name its code, command and settings is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import upgrade_command
from reefknot.lab.papers.measured_figures import PICTURES, Shown, check_code, take, without_paths
from reefknot.lab.papers.measured_figures import to_markdown as figures_to_markdown
from reefknot.lab.papers.measured_steps import measured_steps, with_steps
from reefknot.lab.recipes.file import RecipeFile
from reefknot.lab.reports.cells import (
    format_mean_rho,
    format_paper_mean_rho,
    format_paper_points,
    format_perplexity,
    format_points,
    format_spread,
)
from reefknot.lab.reports.results import Result, collect
from reefknot.lab.reports.rows import TableRow, join, judged_by_similarity, judged_by_time
from reefknot.lab.reports.table import from_recipe, to_markdown
from reefknot.lab.runs.definition import describe_context
from reefknot.lab.runs.folder import folder_name
from reefknot.lab.runs.modes import describe_mode
from reefknot.lab.runs.result import RunResult, SavedEvaluation
from reefknot.lab.runs.scores import BLEU, PERPLEXITY
from reefknot.storage.files import write_text


@dataclass(frozen=True)
class Idea:
    """An idea of a paper, the file that implements it, and the row of a recipe or the figure that demonstrates it."""

    name: str
    paper: str
    code: str
    shown_by: str
    """The name of the recipe or of the figure."""
    row: str | None = None
    """The row of the recipe; None for a figure."""


_PRESS = "Press and Wolf 2017"
_INAN = "Inan et al. 2017"
_BAEVSKI = "Baevski and Auli 2019"
_PAPPAS = "Pappas and Henderson 2019"
_ENCODERS, _OUTPUTS, _CLASSIFIERS = (f"src/reefknot/nn/{name}" for name in ("encoders", "outputs", "classifiers"))
_SCORED, _FIGURES = "src/reefknot/lab/evaluation", "src/reefknot/lab/papers/figures"
_LARGE, _SMALL = "press2017/table5", "press2017/table6"
_VARIATIONAL = "inan2017/table1"
_AWD, _ENDS_OF_AWD = "pappas2019/table1", "pappas2019/table4"
_TRANSLATED, _SMALL_GRU = "press2017/table8", "press2017/multi30k"
_SMALL_TRANSLATOR, _TRANSLATOR = "pappas2019/multi30k", "pappas2019/table5"
_VECTORS = "press2017/enwiki-vectors"
_ENDS_OF_TRANSFORMER, _SMALL_TRANSFORMER, _TAILS = "baevski2019/table3", "baevski2019/enwiki", "baevski2019/wikitext2"
TOUR = "ends"
"""The recipe with every kind of end on the same encoder; its table is in docs/ends.md."""

IDEAS = (
    Idea("LSTM of Zaremba et al.", _PRESS, f"{_ENCODERS}/stacked.py", _SMALL, "Small model"),
    Idea("weight tying (WT)", _PRESS, "src/reefknot/nn/tables.py", _SMALL, "Small + WT"),
    Idea("projection regularisation (PR)", _PRESS, f"{_CLASSIFIERS}/projected.py", _SMALL, "Small + PR"),
    Idea("Bayesian dropout (Gal), tied", _PRESS, f"{_ENCODERS}/bayesian_lstm.py", _LARGE, "Large + BD + WT"),
    Idea("recurrent highway network, tied", _PRESS, f"{_ENCODERS}/highway.py", _LARGE, "RHN + BD + WT"),
    Idea("variational LSTM", _INAN, f"{_ENCODERS}/variational_lstm.py", _VARIATIONAL, "VD-LSTM small"),
    Idea("augmented loss (AL)", _INAN, f"{_OUTPUTS}/augmented.py", _VARIATIONAL, "VD-LSTM+AL small"),
    Idea("reused embeddings (RE)", _INAN, "src/reefknot/nn/tables.py", _VARIATIONAL, "VD-LSTM+RE small"),
    Idea("AL and RE together (REAL)", _INAN, f"{_OUTPUTS}/augmented.py", _VARIATIONAL, "VD-LSTM+REAL small"),
    Idea("word dropout", _PAPPAS, "src/reefknot/nn/inputs/lookup.py", TOUR, "tied, word dropout"),
    Idea("fixed narrow input", _BAEVSKI, "src/reefknot/nn/inputs/lookup.py", TOUR, "narrow input"),
    Idea("adaptive input", _BAEVSKI, "src/reefknot/nn/inputs/adaptive.py", TOUR, "adaptive ends, tied"),
    Idea("adaptive softmax", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", TOUR, "adaptive softmax"),
    Idea("char-CNN input", _BAEVSKI, "src/reefknot/nn/inputs/char_cnn.py", TOUR, "char-CNN"),
    Idea("sub-words (BPE)", _BAEVSKI, "src/reefknot/lab/text/bpe.py", TOUR, "BPE, tied"),
    Idea("Transformer", _BAEVSKI, f"{_ENCODERS}/transformer.py", _ENDS_OF_TRANSFORMER, "ADP-T"),
    Idea("cosine cycles", _BAEVSKI, "src/reefknot/lab/training/schedules.py", _ENDS_OF_TRANSFORMER, "ADP-T"),
    Idea("batches of sentences", _BAEVSKI, "src/reefknot/lab/text/sentence_batches.py", "baevski2019/table4", "ADP-T"),
    Idea("adaptive ends, tied (ADP-T)", _BAEVSKI, "src/reefknot/nn/tables.py", _SMALL_TRANSFORMER, "ADP-T"),
    Idea("context at inference", _BAEVSKI, f"{_SCORED}/windows.py", _SMALL_TRANSFORMER, "ADP-T, context 480"),
    Idea("tail dropout", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", _TAILS, "ADP-T, tail dropout 0.2"),
    Idea("AWD-LSTM", _PAPPAS, f"{_ENCODERS}/awd_lstm.py", _AWD, "AWD-LSTM w/o finetune"),
    Idea("finetuning with averaging", _PAPPAS, "src/reefknot/lab/training/averaging.py", _AWD, "AWD-LSTM"),
    Idea("bilinear mapping", _PAPPAS, f"{_CLASSIFIERS}/bilinear.py", _ENDS_OF_AWD, "Bilinear map. [G18]"),
    Idea("dual nonlinear mapping", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _ENDS_OF_AWD, "Dual nonlinear map. [PH18]"),
    Idea("deep residual output layer (DRILL)", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _ENDS_OF_AWD, "DRILL 4-layers"),
    Idea("mixture of softmaxes", _PAPPAS, f"{_OUTPUTS}/mixture.py", _AWD, "AWD-LSTM-MoS"),
    Idea("sampled softmax", _PAPPAS, f"{_OUTPUTS}/sampled.py", TOUR, "sampled"),
    Idea("dynamic evaluation", _PAPPAS, f"{_SCORED}/dynamic.py", _AWD, "AWD-LSTM-DRILL + dynamic evaluation"),
    Idea("attention-based translation model", _PRESS, f"{_ENCODERS}/attention_gru.py", _SMALL_GRU, "Baseline"),
    Idea("three-way tying (TWWT)", _PRESS, "src/reefknot/nn/models/translator.py", _SMALL_GRU, "TWWT"),
    Idea("BPE learned on both sides", _PRESS, "src/reefknot/lab/text/vocabulary.py", _TRANSLATED, "EN-DE: TWWT"),
    Idea("Adadelta", _PRESS, "src/reefknot/lab/training/optimisers.py", _TRANSLATED, "EN-FR: Baseline"),
    Idea("translation Transformer", _PAPPAS, f"{_ENCODERS}/encoder_decoder.py", _SMALL_TRANSLATOR, "TWWT"),
    Idea("DRILL in translation", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _TRANSLATOR, "Transformer-DRILL (base)"),
    Idea("dual mapping in translation", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _SMALL_TRANSLATOR, "TWWT + dual"),
    Idea("label smoothing", _PAPPAS, f"{_OUTPUTS}/softmax.py", _SMALL_TRANSLATOR, "Baseline"),
    Idea("beam search", _PAPPAS, f"{_SCORED}/beam.py", _SMALL_TRANSLATOR, "TWWT + DRILL"),
    Idea("continuous cache pointer", _PAPPAS, f"{_SCORED}/cache.py", _AWD, "AWD-LSTM + continuous cache pointer"),
    Idea("skip-gram", _PRESS, "src/reefknot/kernels/skip_gram.py", _VECTORS, "untied"),
    Idea("tied skip-gram", _PRESS, "src/reefknot/nn/models/skip_gram.py", _VECTORS, "tied"),
    Idea("word similarity", _PRESS, f"{_SCORED}/similarity.py", "press2017/table3", "Small, PTB"),
    Idea("pairwise similarity of two tables", _PRESS, f"{_SCORED}/pairwise_similarity.py", "press2017/table4"),
    Idea("which rows an update changes", _PRESS, f"{_SCORED}/updates.py", "press2017/section3"),
    Idea("subspace distance", _INAN, f"{_SCORED}/subspace.py", "inan2017/1"),
    Idea("loss by frequency", _BAEVSKI, f"{_SCORED}/frequency.py", "baevski2019/2"),
    Idea("loss relative to another model", _PAPPAS, f"{_FIGURES}/relative_loss.py", "pappas2019/3"),
)

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_NOTE = "<!-- Generated by script/papers from results/. Do not edit. -->"


@dataclass(frozen=True)
class RecipeTable:
    """The rows of a recipe, joined with the records of their runs."""

    name: str
    title: str
    rows: Sequence[TableRow]


def update(
    root: Path, recipes: Mapping[str, RecipeFile], figures: Sequence[Shown] = (), *, check: bool = False
) -> list[Path]:
    """Write PAPERS.md, the results in docs/ends.md and the pictures of figures.

    Args:
        root: The root of the project.
        recipes: The recipes with a table in PAPERS.md, by name.
        figures: The figures with a section in PAPERS.md.
        check: Only compare; write nothing.

    Returns:
        The files that were out of date.
    """
    tables = _tables(root / "results", recipes)
    wanted = {root / "PAPERS.md": "\n".join([_papers(tables, figures), *map(figures_to_markdown, figures)])}
    wanted |= {root / figure.picture: figure.svg for figure in figures}
    if tour := [table for table in tables if table.name == TOUR]:
        page = root / "docs" / "ends.md"
        wanted[page] = _between_marks(page, _results(tour, level=4))
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    leftover = [path for path in sorted((root / PICTURES).glob("*.svg")) if path not in wanted]
    if not check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, wanted[path])
        for path in leftover:
            path.unlink()
    return [*stale, *leftover]


RECORDED = ("config.json", "environment.json", "metrics.jsonl", "result.json")
"""The files of a run that a record contains: no weights and no text of a corpus."""
EVALUATED = "evaluations"
"""The folder with the results of `reefknot evaluate --save`, which is also part of a record."""


def record(root: Path, runs: Sequence[Path]) -> list[Path]:
    """Copy finished runs, and records of figures, into results/, and return the new paths.

    Runs are stored by recipe, row and seed. A run is rejected if the code that ran is not the code of its commit.
    """
    added = []
    results = collect(folders) if (folders := [path for path in runs if not path.is_file()]) else []
    for result in results:
        _check_origin(result)
        _check_code(root, result)
        folder = root / "results" / result.recipe / folder_name(result.row) / f"seed{result.seed}"
        if folder in added:
            raise DataError(f"{result.folder}: another given run has the same row and seed; name only one of them")
        added.append(folder)
    for result, folder in zip(results, added, strict=True):
        if result.record and not result.record.embedding.words and (result.folder / "best").exists():
            from reefknot.lab.tasks.word_vectors import store_picture  # imports torch, which nothing else here needs

            store_picture(result.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if result.evaluations:
            (folder / EVALUATED).mkdir(exist_ok=True)
        for name in (*RECORDED, *(f"{EVALUATED}/{kind}.json" for kind in result.evaluations)):
            write_text(folder / name, without_paths((result.folder / name).read_text(encoding="utf-8")))
        write_text(folder / "metrics.jsonl", _by_epoch(result.folder / "metrics.jsonl"))
    return added + [take(root, path) for path in runs if path.is_file()]


def _by_epoch(path: Path) -> str:
    """Reduce metrics to the points of curves: every validation, and the mean training loss of each epoch."""
    epochs: dict[int, list[dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        epochs.setdefault(line["epoch"], []).append(line)
    reduced: list[dict[str, Any]] = []
    for lines in epochs.values():
        train = [line for line in lines if line["kind"] == "train"]
        if train and "nll" in train[-1]:
            tokens = [line.get("tokens", 1) for line in train]
            mean = fmean((line["nll"] for line in train), weights=tokens)
            reduced.append(train[-1] | {"nll": mean, "tokens": sum(tokens)})
        else:
            reduced += train[-1:]  # skip-gram logs the loss of the same pairs every time
        reduced += [line for line in lines if line["kind"] != "train"]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in reduced)


def _check_code(root: Path, result: Result) -> None:
    """Raise a DataError unless all sessions of a run used the code of its commit."""
    code = result.environment.get("source_sha256")
    if any(environment.get("source_sha256") != code for environment in _earlier(result)):
        raise DataError(f"{result.folder}: its sessions used different code; train it again")
    records = [record for record in (result.record, *result.evaluations.values()) if record]
    for commit, record_code in dict.fromkeys((record.commit, record.source_sha256) for record in records):
        check_code(root, result.folder, commit, record_code)


def _earlier(result: Result) -> list[dict[str, object]]:
    """Return the environments of a run's earlier sessions that differ from the environment of the last session."""
    return list(result.environment.get("earlier", []))


def _tables(folder: Path, recipes: Mapping[str, RecipeFile]) -> list[RecipeTable]:
    """Return the recipes with their rows joined to the records in the folder, after checking their origin."""
    recorded = [path for name in recipes if (path := folder / name).is_dir()]
    results = collect(recorded) if recorded else []
    for result in results:
        _check_origin(result)
    steps = measured_steps(folder / "performance")
    tables = []
    for name, recipe in recipes.items():
        records = [result for result in results if result.recipe == name]
        rows = with_steps(name, join(from_recipe(recipe.rows, name), records), steps)
        tables.append(RecipeTable(name, recipe.title, rows))
    return tables


def _check_origin(result: Result) -> None:
    """Raise a DataError if a run is not finished, or if it or one of its evaluations cannot be traced to its code."""
    if result.record is None:
        raise DataError(f"{result.folder} has no result.json; only finished runs can be recorded")
    _check_made_by(result.record, result.folder / "result.json", ("commit", "command", "config_hash"))
    for kind, evaluation in result.evaluations.items():
        _check_made_by(evaluation, result.folder / EVALUATED / f"{kind}.json", ("commit", "command"))


def _check_made_by(record: RunResult | SavedEvaluation, path: Path, needed: Sequence[str]) -> None:
    """Raise a DataError if a record does not name the code and the command that made it."""
    missing = [key for key in needed if not getattr(record, key)]
    if missing:
        raise DataError(f"{path}: has no {', '.join(missing)}; record a run that has them")
    if record.dirty:
        raise DataError(f"{path}: was made with uncommitted changes; commit and run it again")


def _papers(tables: Sequence[RecipeTable], figures: Sequence[Shown]) -> str:
    rows: dict[tuple[str, str], TableRow] = {}
    for table in tables:
        for row in table.rows:
            rows.setdefault((table.name, row.own_name), row)
    measured = {str(figure.record["figure"]): figure for figure in figures}
    lines = [
        _NOTE,
        "",
        "# From the papers to the code",
        "",
        "This table lists the ideas of the papers. For each idea it names the file that implements it, and the row of "
        "a recipe or the figure that demonstrates it. Our score is next to the paper's score: test perplexity, BLEU "
        "or rho. rho is the mean rank correlation over the five word similarity benchmarks of Press and Wolf, for the "
        "input / output vectors, or one value for the table that both ends share.",
        "",
        "| idea | paper | code | recipe, row | ours | paper's |",
        "|---|---|---|---|---:|---:|",
    ]
    for idea in IDEAS:
        code = f"[{Path(idea.code).name}]({idea.code})"
        shown = f"`{idea.shown_by}`, {idea.row}" if idea.row else f"figure `{idea.shown_by}`"
        ours, theirs = _scores(_row(idea, rows)) if idea.row else (_link(measured.get(idea.shown_by)), "")
        lines.append(f"| {idea.name} | {idea.paper} | {code} | {shown} | {ours} | {theirs} |")
    return "\n".join([*lines, "", _results(tables, level=2)])


def _row(idea: Idea, rows: Mapping[tuple[str, str], TableRow]) -> TableRow:
    row = rows.get((idea.shown_by, idea.row or ""))
    if row is None:
        raise DataError(
            f"idea '{idea.name}': recipe {idea.shown_by} has no row '{idea.row}'; correct the list of ideas"
        )
    return row


def _link(figure: Shown | None) -> str:
    """Return a link to the section of a figure in PAPERS.md."""
    return f"[measured]({figure.anchor})" if figure else "not measured"


def _scores(row: TableRow) -> tuple[str, str]:
    """Return our score and the paper's: BLEU for translators, rho for word vectors, otherwise perplexity."""
    bleu = row.mean_score(BLEU, "test")
    if bleu or "bleu_test" in row.paper:
        papers = f"BLEU {format_paper_points(row.paper['bleu_test'])}" if "bleu_test" in row.paper else ""
        return f"BLEU {format_points(bleu)}" if bleu else row.state, papers
    if row.paper_similarity or judged_by_similarity([row]):
        ours, theirs = format_mean_rho(row), format_paper_mean_rho(row)
        return f"rho {ours}" if ours else row.state, f"rho {theirs}" * bool(theirs)
    ours = (format_spread(row.mean_score(PERPLEXITY, "test")) or row.state) + (" per word" if row.per_word else "")
    return ours, format_perplexity(row.paper["test"]) if "test" in row.paper else ""


def _results(tables: Sequence[RecipeTable], level: int) -> str:
    """Return a heading, a table and the origin of its scores for each recipe."""
    parts = []
    for table in tables:
        records = _records(table)
        origin = _origin(table, records) if records else "Not trained yet.\n" if _timed(table) else "Not run yet.\n"
        parts.append(f"{'#' * level} {table.title}\n\n{to_markdown(table.rows)}\n{origin}")
    return "\n".join(parts)


def _timed(table: RecipeTable) -> bool:
    """Return whether the table is about time and has measured training steps."""
    return judged_by_time(table.rows) and any(row.steps for row in table.rows)


def _records(table: RecipeTable) -> list[RunResult]:
    return [record for row in table.rows for record in row.records]


def _origin(table: RecipeTable, records: Sequence[RunResult]) -> str:
    """Describe the machines, the code and the commands that produced the scores, and how the scores are defined."""
    results = [result for row in table.rows for result in row.results]
    environments = [result.environment for result in results]
    # A run that was resumed with other code names both commits.
    commits = [environment.get("commit") for result in results for environment in _earlier(result)]
    commits += [record.commit for record in records]
    commits += [evaluation.commit for row in table.rows for evaluation in row.evaluations]
    devices = [record.training.device for record in records]
    facts = {
        "Recipe": [f"`{table.name}`"],
        "device": devices,
        "CPU": [cpu for environment in environments if (cpu := str(environment.get("cpu") or "")) not in devices],
        "torch": [str(environment.get("torch") or "") for environment in environments],
        "corpus": [f"{record.corpus.name} ({record.corpus.fingerprint[:12]})" for record in records],
        "seeds": sorted({str(record.seed) for record in records}, key=int),
        "commit": [f"`{str(commit)[:12]}`" for commit in commits if commit],
    }
    parts = [
        f"{name} {', '.join(dict.fromkeys(filter(None, values)))}" for name, values in facts.items() if any(values)
    ]
    command = f"reefknot table {table.name} --seeds {1 + max(record.seed for record in records)} --data DIR"
    scored = [record.test for record in records if record.test]
    definition = next(filter(None, map(describe_context, scored)), "")
    modes = dict.fromkeys((row.by, saved.command) for row in table.rows if row.by for saved in row.evaluations)
    evaluated = "".join(
        f" `{upgrade_command(scoring)}` evaluates them with {describe_mode(mode)}."
        for mode, scoring in modes
        if scoring
    )
    signatures = dict.fromkeys(
        scores.bleu_signature for row in table.rows for scores in row.translated("test") if scores.bleu_signature
    )
    quoted = ", ".join(f"`{signature}`" for signature in signatures)
    sentences = [
        "; ".join(parts),
        f"Our scores are from {' or '.join(_scored_weights(results, records))}",
        "± is the standard deviation over seeds",
        _pace_definition(results),
        definition[:1].upper() + definition[1:],
        f"BLEU is computed by sacrebleu, {quoted}" * bool(signatures),
    ]
    return (
        f"{'. '.join(filter(None, sentences))}.\n\n"
        f"`{command}` trains the rows.{evaluated} Every record names its command and settings.\n"
    )


def _pace_definition(results: Sequence[Result]) -> str:
    """Explain the speed column of a table."""
    if any(result.by_updates for result in results):
        return "tokens/s counts training only and depends on what else ran on the device"
    return (
        "s/epoch is the median epoch of the fastest run; it counts training only and depends on what else ran on the "
        "device"
    )


def _scored_weights(results: Sequence[Result], records: Sequence[RunResult]) -> list[str]:
    """Return which weights of the runs were scored, once for each kind."""
    moment = "update" if any(result.by_updates for result in results) else "epoch"
    best = f"the {moment} with the best validation perplexity"
    single = best if any(record.test for record in records) else "the last epoch"
    numbers = sorted({len(record.averaged) for record in records})
    return [_mean_of(number) if number else single for number in numbers]


def _mean_of(number: int) -> str:
    """Describe averaged checkpoints. A short run may have fewer of them than its setting asks for."""
    return f"the mean of the last {number} checkpoints" if number > 1 else "the last checkpoint"


def _between_marks(page: Path, block: str) -> str:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    head, begin, after = text.partition(BEGIN)
    _, end, tail = after.partition(END)
    if not begin or not end:
        raise DataError(f"{page}: the lines {BEGIN} and {END} are missing; add them where the results belong")
    return f"{head}{BEGIN}\n{_NOTE}\n\n{block}\n{END}{tail}"
