"""PAPERS.md and the results in docs/ends.md: generated from records that can be traced, and from nothing else."""

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
from reefknot.lab.papers.figures import FIGURES
from reefknot.lab.papers.measured_figures import Shown, without_paths
from reefknot.lab.papers.page import BEGIN, END, IDEAS, RECORDED, TOUR, Idea, record, update
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
    """A project with one record, the ideas of one paper, and a page for the results of the tour."""
    monkeypatch.setattr(papers, "IDEAS", [idea for idea in IDEAS if idea.shown_by == NAME])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ends.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    write_run(tmp_path / "results", "Small + WT", 0, result("Small + WT", 0))
    return tmp_path


def change(root: Path, **values: Any) -> None:
    path = root / "results" / "press2017" / "table6" / "small-wt" / "seed0" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_figures_come_from_the_records(root: Path) -> None:
    assert update(root, PRESS) == [root / "PAPERS.md"]
    written = (root / "PAPERS.md").read_text()
    assert (
        "| weight tying (WT) | Press and Wolf 2017 | [tables.py](src/reefknot/nn/tables.py) "
        "| `press2017/table6`, Small + WT | 112.6 | 112.4 |"
    ) in written
    assert "| `press2017/table6`, Small + PR | not run | 111.7 |" in written
    assert "| Small + WT | 2,651,600 | 116.6 | 117.5 | −0.8 % | **112.6**" not in written  # nothing to beat
    assert "| Small + WT | 2,651,600 | 116.6 | 117.5 | −0.8 % | 112.6 | 112.4 | +0.2 % | 13 | 11.6 | 1 |" in written
    assert "device NVIDIA H200; CPU EPYC; torch 2.13.0; corpus ptb (efefefefefef); seeds 0;" in written
    assert "`reefknot table press2017/table6 --seeds 1 --data DIR` trains the rows" in written


def test_word_vectors_are_shown_by_their_mean_rho(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "IDEAS", [Idea("vectors", "Press", "a.py", NAME, row) for row in ROWS])
    theirs = dict.fromkeys(FIVE, 0.3) | {"MEN": 0.5}
    whole = {end: [{"name": name, "rho": rho} for name in FIVE] for end, rho in (("input", 0.4), ("output", -0.2))}
    rows = [Row(name=row, paper_similarity={"tied": theirs}) for row in ROWS]
    for seed in (0, 1):
        write_run(root / "results", "Small", seed, result("Small", seed, similarity=whole))
    change(root, similarity={"tied": whole["input"][:-1]})  # not held against one of the benchmarks
    update(root, recipe(rows))
    written = (root / "PAPERS.md").read_text()
    assert "| `press2017/table6`, Small | rho 0.40 ± 0.00 / −0.20 ± 0.00 | rho 0.34 |" in written
    assert "| `press2017/table6`, Small + WT |  | rho 0.34 |" in written
    assert "| `press2017/table6`, Small + WT + PR | not run | rho 0.34 |" in written


def test_steps_are_held_against_plain_torch(root: Path) -> None:
    folder = root / "results" / "performance"
    folder.mkdir()
    steps = [
        {"row": "Small + WT", "mode": mode, "epoch_seconds": each} for mode, each in (("loop", 9.0), ("eager", 2.0))
    ]
    made = {"commit": "0123456789abcdef", "command": "reefknot bench steps press2017/table6"}
    record = {"bench": "steps", "recipe": NAME, "overrides": [], "environment": made, "rows": steps}
    for device, told in (("NVIDIA H200", "| 13 | 11.6 | 2.00 | 4.5 | 1 |"), ("NVIDIA A100", "| 13 | 11.6 | 1 |")):
        (folder / "gpu.json").write_text(json.dumps(record | {"machine": {"device": device}}))
        update(root, PRESS)
        assert told in (root / "PAPERS.md").read_text()


def test_what_a_figure_shows_leads_to_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "IDEAS", [Idea("idea", "Inan", "a.py", name) for name in ("inan2017/1", "inan2017/2")])
    title = "Inan & others, Figure 2: by-products (a_b)"
    made = {"figure": "inan2017/2", "runs": [], "environment": {"command": "reefknot figure", "commit": "abc"}}
    update(root, PRESS, [Shown(title, "", [], "<svg/>", made)])
    written = (root / "PAPERS.md").read_text()
    assert "| figure `inan2017/1` | not measured |  |" in written
    (anchor,) = re.findall(r"\| figure `inan2017/2` \| \[measured\]\(#(.+)\) \|  \|", written)
    assert anchor in anchors(written)


def test_a_figure_per_word_says_so(root: Path) -> None:
    change(root, test=scored(10.0, pieces=2))
    update(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    assert "| `press2017/table6`, Small + WT | 100.0 per word | 112.4 |" in written
    assert "| Small + WT † |" in written
    assert "\n† per word: " in written


def test_a_run_in_two_sittings_names_the_code_of_both(root: Path) -> None:
    path = root / "results" / "press2017" / "table6" / "small-wt" / "seed0" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"earlier": [{"commit": "fedcba9876543210"}]}))
    update(root, PRESS)
    assert "; commit `fedcba987654`, `0123456789ab`." in (root / "PAPERS.md").read_text()


def test_the_results_of_the_tour_replace_those_between_the_marks(root: Path) -> None:
    update(root, PRESS | recipe([Row(name="a")], TOUR, "The tour"))
    text = (root / "docs" / "ends.md").read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert "#### The tour" in text
    assert "Table 6" not in text
    assert "old" not in text


def test_check_writes_nothing_and_names_what_is_stale(root: Path) -> None:
    page, recipes = root / "docs" / "ends.md", PRESS | recipe([Row(name="a")], TOUR)
    before = page.read_text()
    assert update(root, recipes, check=True) == [root / "PAPERS.md", page]
    assert page.read_text() == before
    assert not (root / "PAPERS.md").exists()
    update(root, recipes)
    assert update(root, recipes, check=True) == []
    with (root / "PAPERS.md").open("a") as file:
        file.write("typed by hand\n")
    assert update(root, recipes, check=True) == [root / "PAPERS.md"]


def test_no_records_yet(root: Path) -> None:
    update(root, PRESS | recipe([Row(name="a")], "other/table1", "Other"))
    assert "## Other\n\n| row | test |\n|---|---:|\n| a | not run |\n\nNot run yet." in (root / "PAPERS.md").read_text()


def test_rows_that_are_quoted_or_not_run_are_shown(root: Path) -> None:
    update(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    assert "| Small + PR | 4,691,800 |  | 116.0 |  | not run | 111.7 |" in written
    assert "| KN 5-gram |" in written


def test_an_idea_whose_runs_differ_is_shown_by_the_first_of_them(root: Path) -> None:
    write_run(root / "results", "Small + WT", 1, result("Small + WT", 1), corpus={"name": "other"})
    update(root, PRESS)
    written = (root / "PAPERS.md").read_text()
    assert "| `press2017/table6`, Small + WT | 112.6 | 112.4 |" in written
    assert "| Small + WT (corpus.name=other) |" in written


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"commit": None}, "has no commit"),
        ({"command": ""}, "has no command"),
        ({"config_hash": None, "commit": None}, "has no commit, config_hash"),
        ({"dirty": True}, "uncommitted changes"),
    ],
)
def test_a_record_that_cannot_be_traced_is_refused(root: Path, values: dict[str, Any], says: str) -> None:
    change(root, **values)
    with pytest.raises(DataError, match=says) as caught:
        update(root, PRESS)
    assert "small-wt/seed0/result.json" in str(caught.value)
    assert not (root / "PAPERS.md").exists()


def test_a_saved_evaluation_has_its_row_and_can_be_traced(root: Path) -> None:
    run = root / "results" / "press2017" / "table6" / "small-wt" / "seed0"
    command = "reefknot evaluate RUN --dynamic --save --search --search-tokens 2000"
    write_evaluation(run, "dynamic", test=90.0, command=command)
    adapting = Row(name="Small + WT, adapting", paper={"test": 88.0}, of="Small + WT", by="dynamic")
    update(root, recipe([*PRESS_ROWS, adapting]))
    written = (root / "PAPERS.md").read_text()
    assert "| Small + WT, adapting | 2,651,600 | 100.0 |  |  | 90.0 | 88.0 | +2.3 % |  |  | 1 |" in written
    assert "commit `0123456789ab`, `fedcba98fedc`" in written
    assert f"trains the rows, and `{command}` evaluates them with dynamic evaluation; every record" in written
    write_evaluation(run, "dynamic", test=90.0, command=None)
    with pytest.raises(DataError, match=r"dynamic\.json: has no command"):
        update(root, PRESS)
    write_evaluation(run, "dynamic", test=90.0, dirty=True)
    with pytest.raises(DataError, match=r"dynamic\.json: was made with uncommitted changes"):
        update(root, PRESS)


def test_an_unfinished_record_is_refused(root: Path) -> None:
    write_run(root / "results", "Small")
    with pytest.raises(DataError, match="only finished runs"):
        update(root, PRESS)


def test_a_page_without_its_marks_is_named(root: Path) -> None:
    for text in ("nothing", f"{END} {BEGIN}", BEGIN):
        (root / "docs" / "ends.md").write_text(text)
        with pytest.raises(DataError, match=r"ends\.md: the markers of the results are missing"):
            update(root, PRESS | recipe([Row(name="a")], TOUR))


def test_an_idea_without_its_row_is_named(root: Path) -> None:
    with pytest.raises(DataError, match="no row 'Small model'"):
        update(root, recipe(PRESS_ROWS[2:]))


def test_every_idea_points_at_a_file() -> None:
    assert [idea.code for idea in IDEAS if not (ROOT / idea.code).is_file()] == []


def test_every_idea_without_a_row_points_at_a_figure() -> None:
    assert {idea.shown_by for idea in IDEAS if not idea.row} <= FIGURES.keys()


def test_a_run_is_recorded_only_with_the_code_of_its_commit(tmp_path: Path) -> None:
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

    assert record(root, [run]) == [root / "results" / "press2017" / "table6" / "small-wt" / "seed0"]
    assert sorted(path.name for path in record(root, [run])[0].iterdir()) == sorted(RECORDED)
    write_evaluation(run, "cache", test=90.0, **traced)
    (folder,) = record(root, [run])
    assert [path.name for path in (folder / "evaluations").iterdir()] == ["cache.json"]
    write_evaluation(run, "mc", test=90.0, **traced | {"source_sha256": "0" * 64})
    with pytest.raises(DataError, match="differs from commit"):
        record(root, [run])
    (run / "evaluations" / "mc.json").unlink()

    wrong = {"differs from commit": {"source_sha256": "0" * 64}, "not in this repository": {"commit": "0" * 40}}
    for number, (said, changed) in enumerate(wrong.items()):
        other = write_run(tmp_path / str(number), "Small + WT", 0, result("Small + WT", 0) | traced | changed)
        with pytest.raises(DataError, match=said):
            record(root, [other])


def test_a_record_keeps_the_curve_and_little_more(tmp_path: Path) -> None:
    path = write_run(tmp_path, "Small") / "metrics.jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [json.loads(line) for line in papers._by_epoch(path).splitlines()]
    assert [line for line in kept if line["kind"] == "valid"] == [line for line in whole if line["kind"] == "valid"]
    assert [line["kind"] for line in kept] == ["train", "valid"] * 13
    path.write_text(
        '{"kind": "train", "step": 5, "epoch": 1, "nll": 4.0, "tokens": 30, "wall": {"seconds": 1}}\n'
        '{"kind": "train", "step": 9, "epoch": 1, "nll": 2.0, "tokens": 10, "wall": {"seconds": 2}}\n'
    )
    (line,) = map(json.loads, papers._by_epoch(path).splitlines())
    assert line == {"kind": "train", "step": 9, "epoch": 1, "nll": 3.5, "tokens": 40, "wall": {"seconds": 2}}


def test_a_record_names_no_folder_of_the_machine_it_came_from() -> None:
    command = 'reefknot train a/b --row "x y" --data /home/me/data --out /runs/x --start=/runs/y training.seed=1'
    text = json.dumps({"command": command, "origin": "/home/me/data"})
    found = json.loads(without_paths(text))
    assert found["command"] == 'reefknot train a/b --row "x y" --data DIR --out RUN --start=RUN training.seed=1'
    assert found["origin"] == "/home/me/data"  # what the text was is no command


@pytest.mark.parametrize("run", ["runs/a/seed0", "~/runs/a", "/runs/a", "RUN"])
def test_a_record_of_an_evaluation_names_any_run(run: str) -> None:
    text = json.dumps({"command": f"reefknot evaluate {run} --cache --save"})
    assert json.loads(without_paths(text))["command"] == "reefknot evaluate RUN --cache --save"


@pytest.mark.parametrize("option", ["--json ", "--json=", "--output ", "-o "])
@pytest.mark.parametrize("place", ["", "/", "/tmp/", "/home/me/runs/"])
def test_a_file_that_a_command_writes_keeps_its_name(option: str, place: str) -> None:
    text = json.dumps({"command": f"reefknot figure a/1 /home/me/runs {option}{place}a.json"})
    assert json.loads(without_paths(text))["command"] == f"reefknot figure a/1 RUN {option}a.json"


def test_two_runs_for_one_record_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "_check_code", lambda root, result: None)
    runs = [write_run(tmp_path / name, "Small", 0, result("Small", 0)) for name in ("a", "b")]
    with pytest.raises(DataError, match="another run of the same row and seed"):
        record(tmp_path, runs)
    assert not (tmp_path / "results").exists()
