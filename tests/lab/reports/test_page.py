"""The HTML page: complete, self-contained, safe with any text, sortable, and usable on a phone."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from made_results import ROWS, result, write_evaluation, write_run, write_runs
from reefknot.errors import SettingsError
from reefknot.lab import reports
from reefknot.lab.reports import page as page_module
from reefknot.lab.reports.page import Section, recipe_title, write_report
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.loading import collect_runs

VOID = {"meta", "br", "img", "link", "hr", "input"}
MALICIOUS = "</pre></style><script>alert('x')</script><img src=x onerror=alert(1)>\"'&amp;"

PLACES = {"xy": [[0.1, 0.2], [0.3, -0.4]], "explained": [0.5, 0.25]}
JUDGED = [{"name": "MEN", "rho": 0.5, "low": 0.4, "high": 0.6, "pairs": 12, "of": 3000}]
LEARNED: dict[str, Any] = {
    "embedding": {"words": ["market", "s" * 60], "groups": [0, 0], "input": PLACES, "output": PLACES},
    "similarity": {"input": JUDGED, "output": JUDGED},
}


class PageParser(HTMLParser):
    """Checks that tags are nested, and collects tags, attributes, ids, text and rows of tables."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without its beginning"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
            return
        self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())


def write_page(
    root: Path, folder: Path, rows: list[TableRow] | None = None, title: str = "Tying"
) -> tuple[Path, PageParser]:
    path = write_report(collect_runs([root]), folder / "report.html", rows=rows, title=title)
    parsed = PageParser()
    parsed.feed(path.read_text(encoding="utf-8"))
    parsed.close()
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    return path, parsed


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PageParser]:
    """Return the report of the realistic runs, which are kept next to it."""
    folder = tmp_path_factory.mktemp("page")
    return write_page(write_runs(folder / "runs"), folder)


def inject(value: Any) -> Any:
    """Return the record with malicious text in place of every string."""
    if isinstance(value, dict):
        return {key: item if key in ("task", "tokenisation") else inject(item) for key, item in value.items()}
    if isinstance(value, list):
        return [inject(item) for item in value]
    return MALICIOUS if isinstance(value, str) else value


def test_page_has_all_sections_and_key_facts(page: tuple[Path, PageParser]) -> None:
    _, parsed = page
    sections = {"results", "training", "frequency", "ends", "samples", "perplexity", "settings"}
    assert sections <= set(parsed.ids)
    text = " ".join(parsed.text)
    for words in (
        "117.2 ± 0.7",
        "lowest test perplexity",
        "output vectors",
        "shared table",
        "the company",
        "every token is scored",
        "model.output.classifier.kind",
        '"torch": "2.13.0"',
        "reefknot train press2017/table6 --row 'Small + WT' --seed 0",
        "train 929,589 tokens",
    ):
        assert words in text


def test_links_point_to_sections(page: tuple[Path, PageParser]) -> None:
    _, parsed = page
    links = [value for name, value in parsed.attributes if name == "href" and not value.startswith("data:")]
    assert len(links) > 6
    assert {link.removeprefix("#") for link in links} <= set(parsed.ids)


def test_page_is_self_contained(page: tuple[Path, PageParser]) -> None:
    path, parsed = page
    html = path.read_text(encoding="utf-8")
    assert not parsed.tags & {"link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?:|\bsrc=|@import|url\((?!#)", html)
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "src"]


def test_only_the_script_of_the_package_may_run(page: tuple[Path, PageParser]) -> None:
    _, parsed = page
    assert parsed.scripts == [(Path(reports.__path__[0]) / "page.js").read_text(encoding="utf-8")]
    [policy] = [value for name, value in parsed.attributes if name == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[0].encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def read_downloads(parsed: PageParser) -> dict[str, list[dict[str, str]]]:
    """Return the rows of the CSV files in a page, by file name."""
    names = [value for name, value in parsed.attributes if name == "download"]
    addresses = [value for name, value in parsed.attributes if name == "href" and value.startswith("data:")]
    tables = {}
    for name, address in zip(names, addresses, strict=True):
        content = base64.b64decode(address.removeprefix("data:text/csv;charset=utf-8;base64,"), validate=True)
        tables[name] = list(csv.DictReader(io.StringIO(content.decode())))
    return tables


def test_page_contains_its_data_as_csv(page: tuple[Path, PageParser]) -> None:
    _, parsed = page
    tables = read_downloads(parsed)
    scores = [(row["row"], row["seed"], float(row["test.perplexity"])) for row in tables["results.csv"]]
    assert ("Small", "1", pytest.approx(117.7)) in scores
    assert len(scores) == 5
    assert {row["kind"] for row in tables["curves.csv"]} == {"train", "valid"}
    assert len(tables["frequency.csv"]) == 5 * 10


def test_title_names_the_corpus(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "Small", 0, result("Small", 0))
    changed = [{"key": "corpus.name", "old": "ptb", "new": "/home/me/letters"}]
    corpus = {"name": "letters/", "fingerprint": "ab" * 32}
    write_run(tmp_path / "other", "Small", 0, result("Small", 0, changed=changed, corpus=corpus))

    _, page = write_page(tmp_path / "runs", tmp_path)
    assert page.text.count("Tying · ptb") == 2  # the title of the window and the heading
    _, page = write_page(tmp_path / "runs", tmp_path, title="Tying on PTB")
    assert page.text.count("Tying on PTB") == 2

    title = recipe_title(collect_runs([tmp_path / "runs"]), "Small models, Penn Treebank")
    assert title == "Small models, Penn Treebank"
    title = recipe_title(collect_runs([tmp_path / "other"]), "Small models, Penn Treebank")
    _, page = write_page(tmp_path / "other", tmp_path, title=title)
    assert page.text.count("Recipe press2017/table6 · letters/") == 2
    assert "Penn Treebank" not in " ".join(page.text)


def test_malicious_text_is_escaped(tmp_path: Path) -> None:
    record = result("Small", 0, **LEARNED)
    numbers = {key: record[key] for key in ("format", "seed")}
    folder = write_run(tmp_path / "runs", "Small", 0, inject(record) | numbers)
    for name in ("config.json", "environment.json"):
        (folder / name).write_text(json.dumps(inject(json.loads((folder / name).read_text()))))
    path, page = write_page(tmp_path / "runs", tmp_path, title=MALICIOUS)
    assert "img" not in page.tags
    assert page.scripts == [(Path(reports.__path__[0]) / "page.js").read_text(encoding="utf-8")]
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert MALICIOUS in "".join(page.text)
    assert path.read_text(encoding="utf-8").count("</style>") == 1


def test_words_in_angle_brackets_are_shown(page: tuple[Path, PageParser]) -> None:
    _, parsed = page
    assert "<unk>" in parsed.text
    assert "<script>alert(1)</script>" in parsed.text


def test_invalid_unicode_is_replaced(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "Small", 0, result("Small", 0))
    (folder / "environment.json").write_text('{"cpu": "\\ud800"}')
    path, _ = write_page(tmp_path / "runs", tmp_path)
    assert "?" in path.read_text(encoding="utf-8")


def test_missing_files_leave_out_their_sections(tmp_path: Path) -> None:
    bare = {
        key: result("Small", 0)[key]
        for key in ("format", "task", "recipe", "row", "seed", "corpus", "parameters", "test")
    }
    folder = write_run(tmp_path / "runs", "Small", 0, bare)
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        (folder / name).unlink()
    _, page = write_page(tmp_path / "runs", tmp_path)
    assert {"results", "perplexity", "settings"} <= set(page.ids)
    assert not {"training", "frequency", "ends", "samples"} & set(page.ids)
    assert "paper" not in page.text


def test_unfinished_run_is_shown_with_its_last_metrics(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "Small", 0, result("Small", 0))
    write_run(tmp_path / "runs", "Small + WT")
    _, page = write_page(tmp_path / "runs", tmp_path)
    text = "".join(page.text)
    assert "unfinished" in text
    assert "not finished; last metrics: valid loss 4.7" in text
    assert "1 finished of 2" in text


def test_page_of_one_unfinished_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "Small")
    (folder / "metrics.jsonl").write_text("")
    _, page = write_page(tmp_path / "runs", tmp_path)
    assert "Not finished, without metrics so far: Small." in page.text


def test_rows_are_in_the_order_of_the_recipe(runs: Path, tmp_path: Path) -> None:
    rows = [TableRow(name) for name in reversed(ROWS)] + [TableRow("Large", {"test": 80.0}, quoted=True)]
    _, page = write_page(runs, tmp_path, rows=rows)
    text = "".join(page.text)
    assert text.index("Small + WT + PR") < text.index("Small + WT\n")
    assert "Large" in page.text


def test_same_results_give_the_same_bytes(page: tuple[Path, PageParser], tmp_path: Path) -> None:
    first, _ = page
    again, _ = write_page(first.parent / "runs", tmp_path / "new")
    assert again.read_bytes() == first.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["report.html"]


def test_output_path_must_not_be_a_folder(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is a folder"):
        write_report(collect_runs([runs]), tmp_path, title="x")


def test_extra_sections_follow_the_results(runs: Path, tmp_path: Path) -> None:
    sections = [Section("Figure 1 & 2", "<p>drawn <em>here</em></p>", "figure-1"), Section("More", "", "more")]
    path = write_report(collect_runs([runs]), tmp_path / "report.html", title="x", sections=sections)
    html = path.read_text(encoding="utf-8")
    assert '<a href="#figure-1">Figure 1 &amp; 2</a>' in html
    assert '<section id="figure-1">\n<h2>Figure 1 &amp; 2</h2>\n<p>drawn <em>here</em></p>\n</section>' in html
    assert (
        html.index('id="results"') < html.index('id="figure-1"') < html.index('id="more"') < html.index('id="training"')
    )


@pytest.mark.parametrize("anchor", ["results", "ends", "", "Figure", "a b", '"><script>'])
def test_invalid_anchor_is_rejected(anchor: str) -> None:
    with pytest.raises(SettingsError, match="invalid section anchor"):
        Section("Figure", "", anchor)


def test_reserved_anchors_are_those_of_the_template() -> None:
    template = "".join(path.read_text() for path in sorted(Path(reports.__path__[0]).glob("*.html")))
    assert set(re.findall('<section id="([a-z]+)"', template)) == set(page_module._ANCHORS)


def run_browser(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here (looked for {', '.join(names)})")
    offline = (
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *offline, f"--user-data-dir={profile}"]
    return subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)


def test_page_never_scrolls_sideways(runs: Path, tmp_path: Path) -> None:
    """The page is shown in frames, because a browser window has a minimum width."""
    long = "a" * 300
    wide = result("Small", 7, row=f"Small {long}", samples=[{"prompt": long, "text": long}], **LEARNED)
    write_run(runs, "Small", 7, wide)
    path, _ = write_page(runs, tmp_path, title="A long title with " + "x" * 120)
    html = path.read_text(encoding="utf-8").replace("<details>", "<details open>")
    html = re.sub("default-src 'none'; (.*?)script-src '.*?'", r"\1script-src 'unsafe-inline'", html)
    page = "document.documentElement"
    script = f"<script>parent.postMessage({page}.scrollWidth - {page}.clientWidth, '*')</script>"
    path.write_text(html.replace("</body>", script + "</body>"), encoding="utf-8")
    frames = tmp_path / "frames.html"
    frames.write_text(
        "<script>onmessage = message => document.title += `over by ${message.data};`</script>"
        + "".join(
            f'<iframe src="report.html" style="width: {width}px; height: 900px"></iframe>' for width in (390, 1200)
        )
    )
    seen = run_browser(frames, tmp_path / "profile", "--dump-dom", "--virtual-time-budget=5000")
    title = re.search("<title>(.*?)</title>", seen.stdout)
    assert title, seen.stdout + seen.stderr
    assert title[1] == "over by 0;over by 0;"


def test_browser_console_is_empty(page: tuple[Path, PageParser], tmp_path: Path) -> None:
    path, _ = page
    seen = run_browser(path, tmp_path / "profile", "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "Small + WT + PR" in seen.stdout
    assert "CONSOLE" not in seen.stderr


def allow_script(path: Path, script: str) -> Path:
    """Write a copy of a page with another script, which its policy allows by its hash, too."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = path.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ")
    copy = path.with_name("scripted.html")
    copy.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


CLICK = """
const shown = {};
for (const [name, table, column] of [["names", 0, 0], ["parameters", 0, 1], ["test", 0, 3], ["memory", 1, 5]]) {
  const heading = document.querySelectorAll("#results thead")[table].lastElementChild.cells[column];
  const body = document.querySelectorAll("#results tbody")[table];
  shown[name] = [];
  for (let click = 0; click < 3; click++) {
    heading.querySelector("button").click();
    shown[name].push([heading.getAttribute("aria-sort"), [...body.rows].map(row => row.cells[0].innerText)]);
  }
}
document.title = JSON.stringify(shown);
"""


def test_browser_sorts_tables(tmp_path: Path) -> None:
    for row, peak in (("Small", 700_000_000), ("Small + WT", 1_200_000_000), ("Small + WT + PR", 900_000_000)):
        record = result(row, 0)
        record["training"]["peak_memory_bytes"] = peak
        write_run(tmp_path / "runs", row, 0, record)
    names = [*ROWS, "Large"]
    rows = [TableRow(name) for name in ROWS] + [TableRow("Large", {"test": 80.0}, quoted=True)]
    path, _ = write_page(tmp_path / "runs", tmp_path, rows=rows)
    seen = run_browser(allow_script(path, CLICK), tmp_path / "profile", "--dump-dom", "--enable-logging=stderr")
    title = re.search("<title>(.*?)</title>", seen.stdout)
    assert title, seen.stdout + seen.stderr
    by_size = ["Small + WT", "Small + WT + PR", "Small"]
    by_score = ["Small + WT + PR", "Small + WT", "Small"]  # the cells are like "117.2 ± 0.7"
    by_memory = ["Small", "Small + WT + PR", "Small + WT"]  # the cells are like "700 MB" and "1.2 GB"
    assert json.loads(unescape(title[1])) == {
        "names": [["ascending", sorted(names)], ["descending", sorted(names, reverse=True)], [None, names]],
        # A row without a number comes last in both directions.
        "parameters": [["ascending", [*by_size, "Large"]], ["descending", [*by_size[::-1], "Large"]], [None, names]],
        "test": [["ascending", [*by_score, "Large"]], ["descending", [*by_score[::-1], "Large"]], [None, names]],
        "memory": [["ascending", by_memory], ["descending", by_memory[::-1]], [None, names[:3]]],
    }
    assert "CONSOLE" not in seen.stderr


def test_browser_runs_no_other_script(page: tuple[Path, PageParser], tmp_path: Path) -> None:
    path, _ = page
    injected = tmp_path / "injected.html"
    attack = "<script>document.title = 'attacked'</script><a id='x' href='javascript:1' onclick='1'>x</a>"
    injected.write_text(path.read_text(encoding="utf-8").replace("</body>", attack + "</body>"), encoding="utf-8")
    seen = run_browser(injected, tmp_path / "profile", "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "<title>Tying · ptb</title>" in seen.stdout
    assert "Content Security Policy" in seen.stderr
    assert 'aria-label="Results"' in seen.stdout  # the page itself is shown


COST = ["row", "epochs", "seconds", "s/epoch", "tokens/s", "memory", "seeds"]
SMALL_COST = ["Small", "13", "150", "11.6", "80,000", "700 MB", "1"]


def test_protocol_scores_are_shown_with_their_definition(tmp_path: Path) -> None:
    protocol = {"name": "awd", "definition": "divided by all rows", "test": {"perplexity": 111.25}}
    write_run(tmp_path / "runs", "Small", 0, result("Small", 0, protocol=protocol, train=result("Small", 0)["valid"]))
    _, parsed = write_page(tmp_path / "runs", tmp_path)
    scores = next(row for row in parsed.rows if row[0] == "Small")
    assert scores[-4:] == ["116.7", "111.2", "114.5", "−2.8 %"]
    assert any("training perplexity" in row for row in parsed.rows)
    assert parsed.rows[parsed.rows.index(COST) + 1] == SMALL_COST
    assert "protocol awd divided by all rows" in " ".join(" ".join(parsed.text).split())


def test_saved_evaluation_is_a_row_with_its_definition(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "Small", 0, result("Small", 0))
    write_evaluation(run, "dynamic", test=91.25)
    _, parsed = write_page(tmp_path / "runs", tmp_path)
    assert ["Small + dynamic evaluation", "0", "91.2"] in [row[:3] for row in parsed.rows]
    assert parsed.rows[parsed.rows.index(COST) + 1] == SMALL_COST
    assert "dynamic evaluation: segments of 5 tokens are scored" in " ".join(parsed.text)


def test_table_of_seconds_has_no_perplexities(tmp_path: Path) -> None:
    for row in ("Small", "Small + WT"):
        write_run(tmp_path / "runs", row, 0, result(row, 0))
    rows = [TableRow("Small", {"seconds": 20.0}), TableRow("Small + WT", {"seconds": 22.0})]
    _, parsed = write_page(tmp_path / "runs", tmp_path, rows=rows)
    titles = parsed.rows.index(["row", "parameters", "ours", "paper", "ours", "paper"])
    assert parsed.rows[titles + 1 : titles + 3] == [
        ["Small", "4,651,600", "11.6", "20", "1.00", "1.00"],
        ["Small + WT", "2,651,600", "11.6", "22", "1.00", "1.10"],
    ]
    assert "test perplexity" not in " ".join(" ".join(parsed.text).split())
