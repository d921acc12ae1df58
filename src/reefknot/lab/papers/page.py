"""Generate PAPERS.md, and the results in docs/ends.md, from the records of training runs under `results/`.

PAPERS.md lists the ideas of the papers with the code that implements them, our score and the paper's score; then the
results of every recipe. `update_pages` writes the pages, and `record_runs` adds finished runs to the records. They are
the two halves of a script:

    script/papers                     write the files that are out of date
    script/papers --check             only list the files that are out of date
    script/papers --record RUN ...    first add finished runs, or records of figures, to the records

A record that does not name its code, command and settings is rejected. There are three kinds of records:

    results/<recipe>/<row>/seed<k>/    config, environment, metrics, result.json and saved evaluations of a run
    results/figures/<figure>.json      the measurements of a figure (`measured_figures.py`)
    results/performance/*.json         the times of training steps (`measured_steps.py`)
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
from reefknot.lab.papers.measured_figures import (
    PICTURE_FOLDER,
    RecordedFigure,
    add_record,
    check_code,
    remove_local_paths,
)
from reefknot.lab.papers.measured_figures import to_markdown as figures_to_markdown
from reefknot.lab.papers.measured_steps import add_steps, read_measured_steps
from reefknot.lab.recipes.file import RecipeFile
from reefknot.lab.reports.cells import (
    format_mean_rho,
    format_paper_mean_rho,
    format_paper_points,
    format_perplexity,
    format_points,
    format_spread,
)
from reefknot.lab.reports.results import Result, collect_runs
from reefknot.lab.reports.rows import TableRow, has_only_similarity, has_only_times, join_runs
from reefknot.lab.reports.table import rows_from_recipe, to_markdown
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
# Folders with the code of the ideas.
_ENCODERS, _OUTPUTS, _CLASSIFIERS = (f"src/reefknot/nn/{name}" for name in ("encoders", "outputs", "classifiers"))
_EVALUATION, _FIGURES = "src/reefknot/lab/evaluation", "src/reefknot/lab/papers/figures"
# Recipes.
_PRESS_TABLE5, _PRESS_TABLE6, _PRESS_TABLE8 = "press2017/table5", "press2017/table6", "press2017/table8"
_PRESS_MULTI30K, _PRESS_VECTORS = "press2017/multi30k", "press2017/enwiki-vectors"
_INAN_TABLE1 = "inan2017/table1"
_BAEVSKI_TABLE3, _BAEVSKI_ENWIKI = "baevski2019/table3", "baevski2019/enwiki"
_BAEVSKI_WIKITEXT2 = "baevski2019/wikitext2"
_PAPPAS_TABLE1, _PAPPAS_TABLE4, _PAPPAS_TABLE5 = "pappas2019/table1", "pappas2019/table4", "pappas2019/table5"
_PAPPAS_MULTI30K = "pappas2019/multi30k"
ENDS_RECIPE = "ends"
"""The recipe with every kind of input end and output end on the same encoder; its table is in docs/ends.md."""

IDEAS = (
    Idea("LSTM of Zaremba et al.", _PRESS, f"{_ENCODERS}/stacked.py", _PRESS_TABLE6, "Small model"),
    Idea("weight tying (WT)", _PRESS, "src/reefknot/nn/tables.py", _PRESS_TABLE6, "Small + WT"),
    Idea("projection regularisation (PR)", _PRESS, f"{_CLASSIFIERS}/projected.py", _PRESS_TABLE6, "Small + PR"),
    Idea("Bayesian dropout (Gal), tied", _PRESS, f"{_ENCODERS}/bayesian_lstm.py", _PRESS_TABLE5, "Large + BD + WT"),
    Idea("recurrent highway network, tied", _PRESS, f"{_ENCODERS}/highway.py", _PRESS_TABLE5, "RHN + BD + WT"),
    Idea("variational LSTM", _INAN, f"{_ENCODERS}/variational_lstm.py", _INAN_TABLE1, "VD-LSTM small"),
    Idea("augmented loss (AL)", _INAN, f"{_OUTPUTS}/augmented.py", _INAN_TABLE1, "VD-LSTM+AL small"),
    Idea("reused embeddings (RE)", _INAN, "src/reefknot/nn/tables.py", _INAN_TABLE1, "VD-LSTM+RE small"),
    Idea("AL and RE together (REAL)", _INAN, f"{_OUTPUTS}/augmented.py", _INAN_TABLE1, "VD-LSTM+REAL small"),
    Idea("word dropout", _PAPPAS, "src/reefknot/nn/inputs/lookup.py", ENDS_RECIPE, "tied, word dropout"),
    Idea("fixed narrow input", _BAEVSKI, "src/reefknot/nn/inputs/lookup.py", ENDS_RECIPE, "narrow input"),
    Idea("adaptive input", _BAEVSKI, "src/reefknot/nn/inputs/adaptive.py", ENDS_RECIPE, "adaptive ends, tied"),
    Idea("adaptive softmax", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", ENDS_RECIPE, "adaptive softmax"),
    Idea("char-CNN input", _BAEVSKI, "src/reefknot/nn/inputs/char_cnn.py", ENDS_RECIPE, "char-CNN"),
    Idea("sub-words (BPE)", _BAEVSKI, "src/reefknot/lab/text/bpe.py", ENDS_RECIPE, "BPE, tied"),
    Idea("Transformer", _BAEVSKI, f"{_ENCODERS}/transformer.py", _BAEVSKI_TABLE3, "ADP-T"),
    Idea("cosine cycles", _BAEVSKI, "src/reefknot/lab/training/schedules.py", _BAEVSKI_TABLE3, "ADP-T"),
    Idea("batches of sentences", _BAEVSKI, "src/reefknot/lab/text/sentence_batches.py", "baevski2019/table4", "ADP-T"),
    Idea("adaptive ends, tied (ADP-T)", _BAEVSKI, "src/reefknot/nn/tables.py", _BAEVSKI_ENWIKI, "ADP-T"),
    Idea("context at inference", _BAEVSKI, f"{_EVALUATION}/windows.py", _BAEVSKI_ENWIKI, "ADP-T, context 480"),
    Idea("tail dropout", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", _BAEVSKI_WIKITEXT2, "ADP-T, tail dropout 0.2"),
    Idea("AWD-LSTM", _PAPPAS, f"{_ENCODERS}/awd_lstm.py", _PAPPAS_TABLE1, "AWD-LSTM w/o finetune"),
    Idea("finetuning with averaging", _PAPPAS, "src/reefknot/lab/training/averaging.py", _PAPPAS_TABLE1, "AWD-LSTM"),
    Idea("bilinear mapping", _PAPPAS, f"{_CLASSIFIERS}/bilinear.py", _PAPPAS_TABLE4, "Bilinear map. [G18]"),
    Idea("dual nonlinear mapping", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _PAPPAS_TABLE4, "Dual nonlinear map. [PH18]"),
    Idea("deep residual output layer (DRILL)", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _PAPPAS_TABLE4, "DRILL 4-layers"),
    Idea("mixture of softmaxes", _PAPPAS, f"{_OUTPUTS}/mixture.py", _PAPPAS_TABLE1, "AWD-LSTM-MoS"),
    Idea("sampled softmax", _PAPPAS, f"{_OUTPUTS}/sampled.py", ENDS_RECIPE, "sampled"),
    Idea(
        "dynamic evaluation",
        _PAPPAS,
        f"{_EVALUATION}/dynamic.py",
        _PAPPAS_TABLE1,
        "AWD-LSTM-DRILL + dynamic evaluation",
    ),
    Idea("attention-based translation model", _PRESS, f"{_ENCODERS}/attention_gru.py", _PRESS_MULTI30K, "Baseline"),
    Idea("three-way tying (TWWT)", _PRESS, "src/reefknot/nn/models/translator.py", _PRESS_MULTI30K, "TWWT"),
    Idea("BPE learned on both sides", _PRESS, "src/reefknot/lab/text/vocabulary.py", _PRESS_TABLE8, "EN-DE: TWWT"),
    Idea("Adadelta", _PRESS, "src/reefknot/lab/training/optimisers.py", _PRESS_TABLE8, "EN-FR: Baseline"),
    Idea("translation Transformer", _PAPPAS, f"{_ENCODERS}/encoder_decoder.py", _PAPPAS_MULTI30K, "TWWT"),
    Idea("DRILL in translation", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _PAPPAS_TABLE5, "Transformer-DRILL (base)"),
    Idea("dual mapping in translation", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _PAPPAS_MULTI30K, "TWWT + dual"),
    Idea("label smoothing", _PAPPAS, f"{_OUTPUTS}/softmax.py", _PAPPAS_MULTI30K, "Baseline"),
    Idea("beam search", _PAPPAS, f"{_EVALUATION}/beam.py", _PAPPAS_MULTI30K, "TWWT + DRILL"),
    Idea(
        "continuous cache pointer",
        _PAPPAS,
        f"{_EVALUATION}/cache.py",
        _PAPPAS_TABLE1,
        "AWD-LSTM + continuous cache pointer",
    ),
    Idea("skip-gram", _PRESS, "src/reefknot/kernels/skip_gram.py", _PRESS_VECTORS, "untied"),
    Idea("tied skip-gram", _PRESS, "src/reefknot/nn/models/skip_gram.py", _PRESS_VECTORS, "tied"),
    Idea("word similarity", _PRESS, f"{_EVALUATION}/similarity.py", "press2017/table3", "Small, PTB"),
    Idea("pairwise similarity of two tables", _PRESS, f"{_EVALUATION}/pairwise_similarity.py", "press2017/table4"),
    Idea("which rows an update changes", _PRESS, f"{_EVALUATION}/updates.py", "press2017/section3"),
    Idea("subspace distance", _INAN, f"{_EVALUATION}/subspace.py", "inan2017/1"),
    Idea("loss by frequency", _BAEVSKI, f"{_EVALUATION}/frequency.py", "baevski2019/2"),
    Idea("loss relative to another model", _PAPPAS, f"{_FIGURES}/relative_loss.py", "pappas2019/3"),
)

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_GENERATED_NOTE = "<!-- Generated by script/papers from results/. Do not edit. -->"


@dataclass(frozen=True)
class RecipeTable:
    """The rows of a recipe, joined with the records of their runs."""

    name: str
    title: str
    rows: Sequence[TableRow]


def update_pages(
    root: Path, recipes: Mapping[str, RecipeFile], figures: Sequence[RecordedFigure] = (), *, check: bool = False
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
    tables = _read_tables(root / "results", recipes)
    papers = "\n".join([_format_papers(tables, figures), *map(figures_to_markdown, figures)])
    contents = {root / "PAPERS.md": papers}
    contents |= {root / figure.picture: figure.svg for figure in figures}
    ends_tables = [table for table in tables if table.name == ENDS_RECIPE]
    if ends_tables:
        page = root / "docs" / "ends.md"
        contents[page] = _insert_between_marks(page, _format_results(ends_tables, level=4))
    stale = [path for path, text in contents.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    leftover = [path for path in sorted((root / PICTURE_FOLDER).glob("*.svg")) if path not in contents]
    if not check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, contents[path])
        for path in leftover:
            path.unlink()
    return [*stale, *leftover]


RECORDED_FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json")
"""The files of a run that a record contains: no weights and no text of a corpus."""
EVALUATIONS_FOLDER = "evaluations"
"""The folder with the results of `reefknot evaluate --save`, which is also part of a record."""


def record_runs(root: Path, runs: Sequence[Path]) -> list[Path]:
    """Copy finished runs, and records of figures, into results/, and return the new paths.

    Runs are stored by recipe, row and seed. A run is rejected if the code that ran is not the code of its commit.
    """
    run_folders = [path for path in runs if not path.is_file()]
    figure_files = [path for path in runs if path.is_file()]
    results = collect_runs(run_folders) if run_folders else []
    added = []
    for result in results:
        _check_origin(result)
        _check_code(root, result)
        folder = root / "results" / result.recipe / folder_name(result.row) / f"seed{result.seed}"
        if folder in added:
            raise DataError(f"{result.folder}: another given run has the same row and seed; pass only one of them")
        added.append(folder)
    for result, folder in zip(results, added, strict=True):
        _copy_run(result, folder)
    return added + [add_record(root, path) for path in figure_files]


def _copy_run(result: Result, folder: Path) -> None:
    """Copy the recorded files of a run into a folder, without local paths and with fewer metrics."""
    if result.record and not result.record.embedding.words and (result.folder / "best").exists():
        from reefknot.lab.tasks.word_vectors import store_embedding  # imports torch, which nothing else here needs

        store_embedding(result.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if result.evaluations:
        (folder / EVALUATIONS_FOLDER).mkdir(exist_ok=True)
    evaluation_files = [f"{EVALUATIONS_FOLDER}/{mode}.json" for mode in result.evaluations]
    for name in (*RECORDED_FILES, *evaluation_files):
        write_text(folder / name, remove_local_paths((result.folder / name).read_text(encoding="utf-8")))
    write_text(folder / "metrics.jsonl", _reduce_metrics(result.folder / "metrics.jsonl"))


def _reduce_metrics(path: Path) -> str:
    """Reduce metrics to the points of curves: every validation, and the mean training loss of each epoch."""
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        by_epoch.setdefault(line["epoch"], []).append(line)
    reduced: list[dict[str, Any]] = []
    for lines in by_epoch.values():
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
    source_hash = result.environment.get("source_sha256")
    if any(environment.get("source_sha256") != source_hash for environment in _earlier_environments(result)):
        raise DataError(f"{result.folder}: its sessions used different code; train it again")
    records = [record for record in (result.record, *result.evaluations.values()) if record]
    for commit, record_hash in dict.fromkeys((record.commit, record.source_sha256) for record in records):
        check_code(root, result.folder, commit, record_hash)


def _earlier_environments(result: Result) -> list[dict[str, object]]:
    """Return the environments of a run's earlier sessions that differ from the environment of the last session."""
    return list(result.environment.get("earlier", []))


def _read_tables(folder: Path, recipes: Mapping[str, RecipeFile]) -> list[RecipeTable]:
    """Return the recipes with their rows joined to the records in the folder, after checking their origin."""
    recipe_folders = [path for name in recipes if (path := folder / name).is_dir()]
    results = collect_runs(recipe_folders) if recipe_folders else []
    for result in results:
        _check_origin(result)
    steps = read_measured_steps(folder / "performance")
    tables = []
    for name, recipe in recipes.items():
        records = [result for result in results if result.recipe == name]
        rows = add_steps(name, join_runs(rows_from_recipe(recipe.rows, name), records), steps)
        tables.append(RecipeTable(name, recipe.title, rows))
    return tables


def _check_origin(result: Result) -> None:
    """Raise a DataError if a run is not finished, or if it or one of its evaluations cannot be traced to its code."""
    if result.record is None:
        raise DataError(f"{result.folder} has no result.json; only finished runs can be recorded")
    _check_fields(result.record, result.folder / "result.json", ("commit", "command", "config_hash"))
    for mode, evaluation in result.evaluations.items():
        _check_fields(evaluation, result.folder / EVALUATIONS_FOLDER / f"{mode}.json", ("commit", "command"))


def _check_fields(record: RunResult | SavedEvaluation, path: Path, required: Sequence[str]) -> None:
    """Raise a DataError if a record does not name the code and the command that made it."""
    missing = [key for key in required if not getattr(record, key)]
    if missing:
        raise DataError(f"{path}: has no {', '.join(missing)}; record a run that has them")
    if record.dirty:
        raise DataError(f"{path}: was made with uncommitted changes; commit and run it again")


def _format_papers(tables: Sequence[RecipeTable], figures: Sequence[RecordedFigure]) -> str:
    """Return PAPERS.md without the sections of the figures: the table of ideas, and the results of each recipe."""
    rows: dict[tuple[str, str], TableRow] = {}
    for table in tables:
        for row in table.rows:
            rows.setdefault((table.name, row.base_name), row)
    figures_by_name = {str(figure.record["figure"]): figure for figure in figures}
    lines = [
        _GENERATED_NOTE,
        "",
        "# From the papers to the code",
        "",
        "This table lists the ideas of the papers. For each idea it names the file that implements it, and the row of "
        "a recipe or the figure that demonstrates it. Our score is next to the paper's score: test perplexity, BLEU "
        "or rho. rho is the mean rank correlation over the five word similarity benchmarks of Press and Wolf. It is "
        "given as input / output vectors, or as a single value if both ends share one table.",
        "",
        "| idea | paper | code | recipe, row | ours | paper's |",
        "|---|---|---|---|---:|---:|",
    ]
    for idea in IDEAS:
        code = f"[{Path(idea.code).name}]({idea.code})"
        if idea.row:
            source = f"`{idea.shown_by}`, {idea.row}"
            our_score, paper_score = _format_scores(_find_row(idea, rows))
        else:
            source = f"figure `{idea.shown_by}`"
            our_score, paper_score = _link_figure(figures_by_name.get(idea.shown_by)), ""
        lines.append(f"| {idea.name} | {idea.paper} | {code} | {source} | {our_score} | {paper_score} |")
    return "\n".join([*lines, "", _format_results(tables, level=2)])


def _find_row(idea: Idea, rows: Mapping[tuple[str, str], TableRow]) -> TableRow:
    row = rows.get((idea.shown_by, idea.row or ""))
    if row is None:
        raise DataError(
            f"idea '{idea.name}': recipe {idea.shown_by} has no row '{idea.row}'; correct the list of ideas"
        )
    return row


def _link_figure(figure: RecordedFigure | None) -> str:
    """Return a link to the section of a figure in PAPERS.md."""
    return f"[measured]({figure.anchor})" if figure else "not measured"


def _format_scores(row: TableRow) -> tuple[str, str]:
    """Return our score and the paper's: BLEU for translators, rho for word vectors, otherwise perplexity."""
    bleu = row.mean_score(BLEU, "test")
    if bleu or "bleu_test" in row.paper:
        our_score = f"BLEU {format_points(bleu)}" if bleu else row.state
        paper_score = f"BLEU {format_paper_points(row.paper['bleu_test'])}" if "bleu_test" in row.paper else ""
        return our_score, paper_score
    if row.paper_similarity or has_only_similarity([row]):
        rho, paper_rho = format_mean_rho(row), format_paper_mean_rho(row)
        return f"rho {rho}" if rho else row.state, f"rho {paper_rho}" if paper_rho else ""
    our_score = format_spread(row.mean_score(PERPLEXITY, "test")) or row.state
    if row.uses_subwords:
        our_score += " per word"
    return our_score, format_perplexity(row.paper["test"]) if "test" in row.paper else ""


def _format_results(tables: Sequence[RecipeTable], level: int) -> str:
    """Return a heading, a table and the origin of its scores for each recipe."""
    sections = []
    for table in tables:
        records = [record for row in table.rows for record in row.records]
        if records:
            origin = _describe_origin(table, records)
        else:
            origin = "Not trained yet.\n" if _has_only_steps(table) else "Not run yet.\n"
        sections.append(f"{'#' * level} {table.title}\n\n{to_markdown(table.rows)}\n{origin}")
    return "\n".join(sections)


def _has_only_steps(table: RecipeTable) -> bool:
    """Return whether the table is about time and has measured training steps."""
    return has_only_times(table.rows) and any(row.step_times for row in table.rows)


def _describe_origin(table: RecipeTable, records: Sequence[RunResult]) -> str:
    """Describe the machines, the code and the commands that produced the scores, and how the scores are defined."""
    results = [result for row in table.rows for result in row.results]
    command = f"reefknot table {table.name} --seeds {1 + max(record.seed for record in records)} --data DIR"
    test_scores = [record.test for record in records if record.test]
    context_definition = next(filter(None, map(describe_context, test_scores)), "")
    signatures = dict.fromkeys(
        scores.bleu_signature
        for row in table.rows
        for scores in row.translation_scores("test")
        if scores.bleu_signature
    )
    sentences = [
        _describe_machines(table, records),
        f"Our scores are from {' or '.join(_describe_scored_weights(results, records))}",
        "± is the standard deviation over seeds",
        _describe_speed(results),
        context_definition[:1].upper() + context_definition[1:],
    ]
    if signatures:
        sentences.append("BLEU is computed by sacrebleu, " + ", ".join(f"`{signature}`" for signature in signatures))
    return (
        f"{'. '.join(filter(None, sentences))}.\n\n"
        f"`{command}` trains the rows.{_describe_evaluations(table)} Every record names its command and settings.\n"
    )


def _describe_machines(table: RecipeTable, records: Sequence[RunResult]) -> str:
    """Describe the recipe, machines, corpora, seeds and commits of the runs of a table.

    For example: "Recipe `demo`; device cpu; torch 2.11.0; corpus python-docs (0123456789ab); seeds 0, 1; commit `...`".
    """
    results = [result for row in table.rows for result in row.results]
    environments = [result.environment for result in results]
    # A run that was resumed with other code names both commits.
    commits = [environment.get("commit") for result in results for environment in _earlier_environments(result)]
    commits += [record.commit for record in records]
    commits += [evaluation.commit for row in table.rows for evaluation in row.evaluations]
    devices = [record.training.device for record in records]
    cpus = [str(environment.get("cpu") or "") for environment in environments]
    values_by_name = {
        "Recipe": [f"`{table.name}`"],
        "device": devices,
        "CPU": [cpu for cpu in cpus if cpu not in devices],
        "torch": [str(environment.get("torch") or "") for environment in environments],
        "corpus": [f"{record.corpus.name} ({record.corpus.fingerprint[:12]})" for record in records],
        "seeds": sorted({str(record.seed) for record in records}, key=int),
        "commit": [f"`{str(commit)[:12]}`" for commit in commits if commit],
    }
    descriptions = []
    for name, values in values_by_name.items():
        distinct_values = dict.fromkeys(filter(None, values))
        if distinct_values:
            descriptions.append(f"{name} {', '.join(distinct_values)}")
    return "; ".join(descriptions)


def _describe_evaluations(table: RecipeTable) -> str:
    """Return a sentence for each command that evaluates the trained rows in another mode."""
    commands = dict.fromkeys(
        (row.mode, evaluation.command) for row in table.rows if row.mode for evaluation in row.evaluations
    )
    return "".join(
        f" `{upgrade_command(command)}` evaluates them with {describe_mode(mode)}."
        for mode, command in commands
        if command
    )


def _describe_speed(results: Sequence[Result]) -> str:
    """Explain the speed column of a table."""
    if any(result.is_limited_by_updates for result in results):
        return "tokens/s counts training only and depends on what else ran on the device"
    return (
        "s/epoch is the median time of an epoch in the fastest run; it counts training only and depends on what else "
        "ran on the device"
    )


def _describe_scored_weights(results: Sequence[Result], records: Sequence[RunResult]) -> list[str]:
    """Return a description of the scored weights for each kind of run (best epoch, or average of checkpoints)."""
    unit = "update" if any(result.is_limited_by_updates for result in results) else "epoch"
    best = f"the {unit} with the best validation perplexity"
    single = best if any(record.test for record in records) else "the last epoch"
    checkpoint_counts = sorted({len(record.averaged) for record in records})
    return [_describe_average(count) if count else single for count in checkpoint_counts]


def _describe_average(checkpoint_count: int) -> str:
    """Describe averaged checkpoints. A short run may have fewer of them than its setting asks for."""
    if checkpoint_count > 1:
        return f"the mean of the last {checkpoint_count} checkpoints"
    return "the last checkpoint"


def _insert_between_marks(page: Path, block: str) -> str:
    """Return the text of a page with the block between its two marks."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    head, begin_mark, rest = text.partition(BEGIN)
    _, end_mark, tail = rest.partition(END)
    if not begin_mark or not end_mark:
        raise DataError(f"{page}: the lines {BEGIN} and {END} are missing; add them where the results belong")
    return f"{head}{BEGIN}\n{_GENERATED_NOTE}\n\n{block}\n{END}{tail}"
