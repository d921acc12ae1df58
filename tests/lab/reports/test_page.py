"""The HTML page: complete, self-contained, safe with any text, and usable on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from made_results import ROWS, result, write_evaluation, write_run, write_runs
from reefknot.errors import SettingsError
from reefknot.lab import reports
from reefknot.lab.reports import page as page_module
from reefknot.lab.reports.page import Section, write_report
from reefknot.lab.reports.results import collect_runs
from reefknot.lab.reports.rows import TableRow

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
    links = [value for name, value in parsed.attributes if name == "href"]
    assert len(links) > 6
    assert {link.removeprefix("#") for link in links} <= set(parsed.ids)


def test_page_is_self_contained(page: tuple[Path, PageParser]) -> None:
    path, parsed = page
    html = path.read_text(encoding="utf-8")
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?:|\bsrc=|@import|url\((?!#)", html)
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "src"]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in parsed.attributes


def test_malicious_text_is_escaped(tmp_path: Path) -> None:
    record = result("Small", 0, **LEARNED)
    numbers = {key: record[key] for key in ("format", "seed")}
    folder = write_run(tmp_path / "runs", "Small", 0, inject(record) | numbers)
    for name in ("config.json", "environment.json"):
        (folder / name).write_text(json.dumps(inject(json.loads((folder / name).read_text()))))
    path, page = write_page(tmp_path / "runs", tmp_path, title=MALICIOUS)
    assert not page.tags & {"script", "img"}
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
    assert "Not finished (the last metrics are shown): Small." in page.text


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
    html = html.replace("default-src 'none';", "script-src 'unsafe-inline';")
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
