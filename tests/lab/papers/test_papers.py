"""PAPERS.md and the results in docs/ends.md are generated only from traceable records."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from made_results import ROWS, result, scored, write_evaluation, write_run
from pages import anchors
from reefknot.errors import DataError
from reefknot.lab.evaluation.benchmarks import PRESS as FIVE
from reefknot.lab.papers import page as papers
from reefknot.lab.papers import recorded_runs
from reefknot.lab.papers.figures import FIGURES
from reefknot.lab.papers.ideas import ENDS_RECIPE, IDEAS, Idea
from reefknot.lab.papers.measured_figures import RecordedFigure, remove_local_paths
from reefknot.lab.papers.page import BEGIN, END, update_pages
from reefknot.lab.papers.recorded_runs import RECORDED_FILES, record_runs
from reefknot.lab.recipes.file import RecipeFile, Row
from reefknot.lab.runs.environment import source_sha256

ROOT = Path(__file__).resolve().parents[3]
NAME = "press2017/table6"
PRESS_ROWS = [
    Row(name="KN 5-gram", paper={"test": 141.0}, quoted=True),
    Row(name="Small model", paper={"test": 114.5}, parameters=4_651_600),
    Row(name="Small + WT", paper=ROWS["Small + WT"]["paper"], parameters=2_651_600),
    Row(name="Small + PR", paper={"valid": 116.0, "test": 111.7}, parameters=4_691_800),
]


def recipe(rows: list[Row], name: str = NAME, title: str = "Table 6") -> dict[str, RecipeFile]:
    return {name: RecipeFile(title=title, base={}, rows=rows)}


PRESS = recipe(PRESS_ROWS)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one record, the ideas of one paper, and a page for the results of the tour."""
    monkeypatch.setattr(papers, "IDEAS", [idea for idea in IDEAS if idea.shown_by == NAME])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ends.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    write_run(tmp_path / "results", "Small + WT", 0, result("Small + WT", 0))
    return tmp_path


def change_result(root: Path, **values: Any) -> None:
    path = root / "results" / "press2017" / "table6" / "small-wt" / "seed0" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def table_rows(text: str, first_column: str = "row") -> list[dict[str, str]]:
    """Parse the Markdown tables whose first column has this title; "paper" and "diff" get the score before them."""
    rows, titles = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            titles = []
        elif cells[0] == first_column:
            score = ""
            for title in cells:
                score = title if title in ("valid", "test") else score
                titles.append(f"{score} {title}" if title in ("paper", "diff") and score else title)
        elif titles and not line.startswith("|---"):
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows


def row_of(text: str, name: str, column: str = "row") -> dict[str, str]:
    """Return the only row of the tables with this name."""
    (row,) = [row for row in table_rows(text, column) if row[column] == name]
    return row


def idea_scores(text: str, shown_by: str) -> set[tuple[str, ...]]:
    """Return our score and the paper's of every idea shown by this row or figure."""
    return {tuple(row.values())[-2:] for row in table_rows(text, "idea") if shown_by in row.values()}


def test_scores_come_from_the_records(root: Path) -> None:
    assert update_pages(root, PRESS) == [root / "PAPERS.md"]
    written = (root / "PAPERS.md").read_text()
    assert idea_scores(written, "`press2017/table6`, Small + WT") == {("112.6", "112.4")}
    assert idea_scores(written, "`press2017/table6`, Small + PR") == {("not run", "111.7")}
    assert "(src/reefknot/nn/tables.py)" in written
    row = row_of(written, "Small + WT")
    assert (row["parameters"], row["epochs"], row["s/epoch"], row["seeds"]) == ("2,651,600", "13", "11.6", "1")
    assert (row["valid"], row["valid paper"], row["valid diff"]) == ("116.6", "117.5", "−0.8 %")
    assert (row["test"], row["test paper"], row["test diff"]) == ("112.6", "112.4", "+0.2 %"), (
        "a single row is not bold"
    )
    for fact in ("NVIDIA H200", "EPYC", "torch 2.13.0", "ptb (efefefefefef)", "seeds 0"):
        assert fact in written
    assert "`reefknot table press2017/table6 --seeds 1 --data DIR`" in written


def test_word_vectors_are_shown_by_their_mean_rho(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "IDEAS", [Idea("vectors", "Press", "a.py", NAME, row) for row in ROWS])
    theirs = dict.fromkeys(FIVE, 0.3) | {"MEN": 0.5}
    whole = {end: [{"name": name, "rho": rho} for name in FIVE] for end, rho in (("input", 0.4), ("output", -0.2))}
    rows = [Row(name=row, paper_similarity={"tied": theirs}) for row in ROWS]
    for seed in (0, 1):
        write_run(root / "results", "Small", seed, result("Small", seed, similarity=whole))
    change_result(root, similarity={"tied": whole["input"][:-1]})  # one benchmark is missing
    update_pages(root, recipe(rows))
    written = (root / "PAPERS.md").read_text()
    for name, ours in (("Small", "rho 0.40 ± 0.00 / −0.20 ± 0.00"), ("Small + WT", ""), ("Small + WT + PR", "not run")):
        assert idea_scores(written, f"`press2017/table6`, {name}") == {(ours, "rho 0.34")}


def test_steps_are_shown_only_for_the_same_device(root: Path) -> None:
    folder = root / "results" / "performance"
    folder.mkdir()
    steps = [
        {"row": "Small + WT", "mode": mode, "epoch_seconds": value} for mode, value in (("loop", 9.0), ("eager", 2.0))
    ]
    made = {"commit": "0123456789abcdef", "command": "reefknot bench steps press2017/table6"}
    record = {"bench": "steps", "recipe": NAME, "overrides": [], "environment": made, "rows": steps}
    for device, expected in (("NVIDIA H200", ("2.00", "4.5")), ("NVIDIA A100", (None, None))):
        (folder / "gpu.json").write_text(json.dumps(record | {"machine": {"device": device}}))
        update_pages(root, PRESS)
        row = row_of((root / "PAPERS.md").read_text(), "Small + WT")
        assert (row.get("s/epoch alone"), row.get("x plain torch")) == expected


def test_idea_shown_by_a_figure_links_to_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "IDEAS", [Idea("idea", "Inan", "a.py", name) for name in ("inan2017/1", "inan2017/2")])
    title = "Inan & others, Figure 2: by-products (a_b)"
    made = {"figure": "inan2017/2", "runs": [], "environment": {"command": "reefknot figure", "commit": "abc"}}
    update_pages(root, PRESS, [RecordedFigure(title, "", [], "<svg/>", made)])
    written = (root / "PAPERS.md").read_text()
    assert "| figure `inan2017/1` | not measured |  |" in written
    (anchor,) = re.findall(r"\| figure `inan2017/2` \| \[measured\]\(#(.+)\) \|  \|", written)
    assert anchor in anchors(written)


def test_perplexity_per_word_is_marked(root: Path) -> None:
    change_result(root, test=scored(10.0, pieces=2))
    update_pages(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    assert idea_scores(written, "`press2017/table6`, Small + WT") == {("100.0 per word", "112.4")}
    assert row_of(written, "Small + WT †")["test"] == "100.0 per word"
    assert "\n† perplexity per word: " in written


def test_run_in_two_sessions_names_both_commits(root: Path) -> None:
    path = root / "results" / "press2017" / "table6" / "small-wt" / "seed0" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"earlier": [{"commit": "fedcba9876543210"}]}))
    update_pages(root, PRESS)
    assert "; commit `fedcba987654`, `0123456789ab`." in (root / "PAPERS.md").read_text()


def test_tour_results_replace_the_text_between_the_markers(root: Path) -> None:
    update_pages(root, PRESS | recipe([Row(name="a")], ENDS_RECIPE, "The tour"))
    text = (root / "docs" / "ends.md").read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert "#### The tour" in text
    assert "Table 6" not in text
    assert "old" not in text


def test_check_writes_nothing_and_names_stale_pages(root: Path) -> None:
    page, recipes = root / "docs" / "ends.md", PRESS | recipe([Row(name="a")], ENDS_RECIPE)
    before = page.read_text()
    assert update_pages(root, recipes, check=True) == [root / "PAPERS.md", page]
    assert page.read_text() == before
    assert not (root / "PAPERS.md").exists()
    update_pages(root, recipes)
    assert update_pages(root, recipes, check=True) == []
    with (root / "PAPERS.md").open("a") as file:
        file.write("typed by hand\n")
    assert update_pages(root, recipes, check=True) == [root / "PAPERS.md"]


def test_recipe_without_records_is_shown_as_not_run(root: Path) -> None:
    update_pages(root, PRESS | recipe([Row(name="a")], "other/table1", "Other"))
    section = (root / "PAPERS.md").read_text().partition("## Other\n")[2]
    assert table_rows(section) == [{"row": "a", "test": "not run"}]
    assert "Not run yet." in section


def test_quoted_and_missing_rows_are_shown(root: Path) -> None:
    update_pages(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    missing, quoted = row_of(written, "Small + PR"), row_of(written, "KN 5-gram")
    assert (missing["valid"], missing["valid paper"], missing["test"]) == ("", "116.0", "not run")
    assert (missing["parameters"], missing["test paper"], quoted["test paper"]) == ("4,691,800", "111.7", "141.0")


def test_idea_with_different_runs_shows_the_first(root: Path) -> None:
    write_run(root / "results", "Small + WT", 1, result("Small + WT", 1), corpus={"name": "other"})
    update_pages(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    assert idea_scores(written, "`press2017/table6`, Small + WT") == {("112.6", "112.4")}
    assert row_of(written, "Small + WT (corpus.name=other)")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"commit": None}, "has no commit"),
        ({"command": ""}, "has no command"),
        ({"config_hash": None, "commit": None}, "has no commit, config_hash"),
        ({"dirty": True}, "uncommitted changes"),
    ],
)
def test_untraceable_record_is_rejected(root: Path, values: dict[str, Any], message: str) -> None:
    change_result(root, **values)
    with pytest.raises(DataError, match=message) as caught:
        update_pages(root, PRESS)
    assert "small-wt/seed0/result.json" in str(caught.value)
    assert not (root / "PAPERS.md").exists()


def test_saved_evaluation_has_a_row_and_must_be_traceable(root: Path) -> None:
    run = root / "results" / "press2017" / "table6" / "small-wt" / "seed0"
    command = "reefknot evaluate RUN --dynamic --save --search --search-tokens 2000"
    write_evaluation(run, "dynamic", test=90.0, command=command)
    adapting = Row(name="Small + WT, adapting", paper={"test": 88.0}, of="Small + WT", by="dynamic")
    update_pages(root, recipe([*PRESS_ROWS, adapting]))
    written = (root / "PAPERS.md").read_text()
    row = row_of(written, "Small + WT, adapting")
    assert (row["parameters"], row["valid"], row["seeds"]) == ("2,651,600", "100.0", "1")
    assert (row["test"], row["test paper"], row["test diff"]) == ("90.0", "88.0", "+2.3 %")
    assert "commit `0123456789ab`, `fedcba98fedc`" in written
    assert f"`{command}`" in written
    write_evaluation(run, "dynamic", test=90.0, command=None)
    with pytest.raises(DataError, match=r"dynamic\.json: has no command"):
        update_pages(root, PRESS)
    write_evaluation(run, "dynamic", test=90.0, dirty=True)
    with pytest.raises(DataError, match=r"dynamic\.json: was made with uncommitted changes"):
        update_pages(root, PRESS)


def test_unfinished_record_is_rejected(root: Path) -> None:
    write_run(root / "results", "Small")
    with pytest.raises(DataError, match="only finished runs"):
        update_pages(root, PRESS)


def test_page_without_markers_is_rejected(root: Path) -> None:
    for text in ("nothing", f"{END} {BEGIN}", BEGIN):
        (root / "docs" / "ends.md").write_text(text)
        with pytest.raises(DataError, match=r"ends\.md: the lines .* are missing"):
            update_pages(root, PRESS | recipe([Row(name="a")], ENDS_RECIPE))


def test_idea_without_its_row_is_rejected(root: Path) -> None:
    with pytest.raises(DataError, match="no row 'Small model'"):
        update_pages(root, recipe(PRESS_ROWS[2:]))


def test_every_idea_points_to_an_existing_file() -> None:
    assert [idea.code for idea in IDEAS if not (ROOT / idea.code).is_file()] == []


def test_every_idea_without_a_row_points_to_a_figure() -> None:
    assert {idea.shown_by for idea in IDEAS if not idea.row} <= FIGURES.keys()


def test_run_is_recorded_only_with_the_code_of_its_commit(tmp_path: Path) -> None:
    root = tmp_path / "project"
    package = root / "src" / "reefknot"
    package.mkdir(parents=True)
    (package / "code.py").write_text("one = 1\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    traced = {"commit": head, "source_sha256": source_sha256(package)}
    run = write_run(tmp_path / "runs", "Small + WT", 0, result("Small + WT", 0) | traced)

    assert record_runs(root, [run]) == [root / "results" / "press2017" / "table6" / "small-wt" / "seed0"]
    assert sorted(path.name for path in record_runs(root, [run])[0].iterdir()) == sorted(
        ("MANIFEST.json", *RECORDED_FILES)
    )
    write_evaluation(run, "cache", test=90.0, **traced)
    (folder,) = record_runs(root, [run])
    assert [path.name for path in (folder / "evaluations").iterdir()] == ["cache.json"]
    write_evaluation(run, "mc", test=90.0, **traced | {"source_sha256": "0" * 64})
    with pytest.raises(DataError, match="differs from commit"):
        record_runs(root, [run])
    (run / "evaluations" / "mc.json").unlink()

    wrong = {"differs from commit": {"source_sha256": "0" * 64}, "not in this repository": {"commit": "0" * 40}}
    for number, (message, changed) in enumerate(wrong.items()):
        other = write_run(tmp_path / str(number), "Small + WT", 0, result("Small + WT", 0) | traced | changed)
        with pytest.raises(DataError, match=message):
            record_runs(root, [other])


def test_recorded_metrics_keep_one_line_per_epoch_and_kind(tmp_path: Path) -> None:
    path = write_run(tmp_path, "Small") / "metrics.jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    recorded_lines = [json.loads(line) for line in recorded_runs._reduce_metrics(path).splitlines()]
    assert [line for line in recorded_lines if line["kind"] == "valid"] == [
        line for line in whole if line["kind"] == "valid"
    ]
    assert [line["kind"] for line in recorded_lines] == ["train", "valid"] * 13
    path.write_text(
        '{"kind": "train", "step": 5, "epoch": 1, "nll": 4.0, "tokens": 30, "wall": {"seconds": 1}}\n'
        '{"kind": "train", "step": 9, "epoch": 1, "nll": 2.0, "tokens": 10, "wall": {"seconds": 2}}\n'
    )
    (line,) = map(json.loads, recorded_runs._reduce_metrics(path).splitlines())
    assert line == {"kind": "train", "step": 9, "epoch": 1, "nll": 3.5, "tokens": 40, "wall": {"seconds": 2}}


def test_recorded_command_has_no_local_folders() -> None:
    command = 'reefknot train a/b --row "x y" --data /home/me/data --out /runs/x --start=/runs/y training.seed=1'
    text = json.dumps({"command": command, "origin": "/home/me/data"})
    cleaned = json.loads(remove_local_paths(text))
    assert cleaned["command"] == 'reefknot train a/b --row "x y" --data DIR --out RUN --start=RUN training.seed=1'
    assert cleaned["origin"] == "/home/me/data"  # only commands are changed


@pytest.mark.parametrize("run", ["runs/a/seed0", "~/runs/a", "/runs/a", "RUN"])
def test_recorded_evaluation_command_has_no_run_folder(run: str) -> None:
    text = json.dumps({"command": f"reefknot evaluate {run} --cache --save"})
    assert json.loads(remove_local_paths(text))["command"] == "reefknot evaluate RUN --cache --save"


@pytest.mark.parametrize("option", ["--json ", "--json=", "--output ", "-o "])
@pytest.mark.parametrize("folder", ["", "/", "/tmp/", "/home/me/runs/"])
def test_output_file_of_a_command_keeps_only_its_name(option: str, folder: str) -> None:
    text = json.dumps({"command": f"reefknot figure a/1 /home/me/runs {option}{folder}a.json"})
    assert json.loads(remove_local_paths(text))["command"] == f"reefknot figure a/1 RUN {option}a.json"


def test_two_runs_for_one_record_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_runs, "_check_code", lambda root, result: None)
    runs = [write_run(tmp_path / name, "Small", 0, result("Small", 0)) for name in ("a", "b")]
    with pytest.raises(DataError, match="another given run has the same row and seed"):
        record_runs(tmp_path, runs)
    assert not (tmp_path / "results").exists()
