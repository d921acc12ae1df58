"""`reefknot train --text` and `reefknot new --text`: from the bytes of any text to a trained model and a page."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.lab.runs.folder import RunFolder

from .conftest import Outcome

Cli = Callable[..., Outcome]
MODEL = ("tables.words.dim=8", "encoder.hidden_dim=8", "encoder.layers=1", "training.epochs=1")
TINY = (*MODEL, "vocabulary.bpe.merges=40")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "🙂", "café", "naïve", "שלום", "größe"]


def make_lines(count: int = 300) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=8)) for _ in range(count)]


LINES = make_lines()
TEXT = "\n".join(LINES) + "\n"
LATIN_TEXT = TEXT.replace("🙂", "smile").replace("שלום", "hello")


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def jsonl(field: str = "text") -> bytes:
    return "".join(json.dumps({field: line}, ensure_ascii=False) + "\n" for line in LINES).encode()


def write_parquet(path: Path) -> None:
    table = pytest.importorskip("pyarrow").table({"text": LINES})
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


def write_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "a.txt").write_text("\n".join(LINES[:100]), encoding="utf-8")
    (path / "b.md.gz").write_bytes(gzip.compress("\n".join(LINES[100:200]).encode()))
    (path / "sub" / "c.jsonl").write_bytes(jsonl())
    (path / "picture.png").write_bytes(b"\x89PNG\0")


def write_named(path: Path) -> None:
    path.mkdir()
    for name, lines in (("train-0001", LINES[:200]), ("dev", LINES[200:250]), ("test", LINES[250:])):
        (path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def write_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


INPUTS: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...], str]] = {
    # kind: name, function that writes it, options, what is printed
    "plain": ("a.txt", write_bytes(TEXT.encode()), (), "blocks of consecutive lines are held out"),
    "gzip named txt": ("a.txt", write_bytes(gzip.compress(TEXT.encode())), (), "one file, 300 lines"),
    "xz": ("a.txt.xz", write_bytes(lzma.compress(TEXT.encode())), (), "one file, 300 lines"),
    "zst json": ("a.jsonl.zst", write_bytes(zstd(jsonl("body"))), ("--field", "body"), "Whole documents are held out"),
    "parquet": ("a.parquet", write_parquet, (), "Whole documents are held out"),
    "folder": ("texts", write_folder, (), "1 files are skipped, such as picture.png"),
    "named splits": ("named", write_named, (), "The names of the files say which"),
    "utf-16 crlf": ("a.txt", write_bytes(TEXT.replace("\n", "\r\n").encode("utf-16")), (), "one file, 300 lines"),
    "cp1252": ("a.txt", write_bytes(LATIN_TEXT.encode("cp1252")), ("--encoding", "cp1252"), "one file, 300 lines"),
    "one line": ("a.txt", write_bytes(TEXT.replace("\n", " ").encode()), (), "one file, 1 lines"),
    "no spaces": ("a.txt", write_bytes("天地玄黃宇宙洪荒日月盈昃".encode() * 300), (), "one file, 1 lines"),
    "words": ("a.txt", write_bytes(TEXT.encode()), ("--tokens", "words"), "occur at least twice"),
}


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REEFKNOT_CACHE", str(tmp_path / "cache"))


def tiny(options: tuple[str, ...]) -> tuple[str, ...]:
    return MODEL if "words" in options else TINY


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_text_gives_a_model_and_a_page(cli: Cli, tmp_path: Path, kind: str) -> None:
    name, write, options, message = INPUTS[kind]
    write(tmp_path / name)
    outcome = cli("train", "--text", name, *options, "--out", "runs/mine", "--device", "cpu", *tiny(options))
    assert outcome.code == 0, outcome.err
    assert message in outcome.out
    run = RunFolder.open(tmp_path / "runs" / "mine")
    result = run.result
    assert result is not None
    assert result.test is not None
    assert 1 < result.test.perplexity < 1e4
    assert result.corpus.name.removesuffix("/") == name
    assert run.config["settings"]["corpus"]["text"]["split"] in ("lines", "documents", "names")
    page = (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    assert f"Language model of {result.corpus.name}" in page

    # The same command finds the finished run, and its text is scored again.
    again = cli("train", "--text", name, *options, "--out", "runs/mine", "--device", "cpu", *tiny(options))
    assert "done already" in again.out
    evaluation = cli("evaluate", "runs/mine", "--json")
    assert evaluation.code == 0, evaluation.err


def test_standard_input_is_saved_next_to_the_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, ending in ((TEXT.encode(), ".txt"), (gzip.compress(jsonl()), ".jsonl")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        outcome = cli("train", "--text", "-", "--out", f"runs/from{ending[1:]}", "--device", "cpu", *TINY)
        assert outcome.code == 0, outcome.err
        saved = tmp_path / "runs" / f"from{ending[1:]}{ending}"
        assert saved.read_bytes() == data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"another text\n")))
    outcome = cli("train", "--text", "-", "--out", "runs/fromtxt", "--device", "cpu", *TINY)
    assert outcome.code == 2
    assert "is another text; use another --out" in outcome.err


def test_empty_standard_input_is_not_saved(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    outcome = cli("train", "--text", "-", "--device", "cpu", *TINY)
    assert outcome.code == 3
    assert "standard input is empty" in outcome.err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the text has 0 words"),
        (b"only a few words\n", "the text has 4 words (17 characters), which is too little"),
        (gzip.compress(TEXT.encode())[:-100], "cannot be unpacked"),
        (b"\x7fELF\x02\x01\x01\0\0\0" * 500, "NUL byte; is this a text file?"),
        (TEXT.encode() + "Größe".encode("cp1252"), "line 301: byte 0xf6 is not valid UTF-8, but most of the text is"),
        (LATIN_TEXT.encode("cp1252"), "is not valid UTF-8; pass the encoding of the text, perhaps --encoding cp1252"),
    ],
    ids=["empty", "short", "damaged", "binary", "mixed", "windows-1252"],
)
def test_a_text_that_cannot_be_used_leaves_nothing_behind(cli: Cli, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    outcome = cli("train", "--text", "a.txt", "--device", "cpu", *TINY)
    assert outcome.code == 3
    assert message in outcome.err
    assert not (tmp_path / "runs").exists()


def test_new_writes_the_recipe_that_train_uses(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "My Text.txt").write_text(TEXT, encoding="utf-8")
    outcome = cli("new", "--text", "My Text.txt", "--device", "cpu")
    assert outcome.code == 0
    assert "trains in about ten seconds (10 epochs on " in outcome.out
    assert "For a quicker look" not in outcome.out  # it would not be quicker
    recipe = (tmp_path / "my-text.toml").read_text(encoding="utf-8")
    assert "# Ends: a softmax tied to the input" in recipe
    assert tomllib.loads(recipe)["base"]["corpus"]["name"] == str(tmp_path / "My Text.txt")
    assert cli("validate", "my-text.toml").code == 0

    outcome = cli("train", "--text", "My Text.txt", "--device", "cpu", *TINY)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "runs" / "my-text.toml").read_text(encoding="utf-8") == recipe
    assert (tmp_path / "runs" / "my-text" / "model" / "seed0" / "result.json").exists()
    assert (tmp_path / "runs" / "my-text" / "report.html").exists()

    # Training longer writes the page again, with the same heading.
    page = tmp_path / "runs" / "my-text" / "report.html"
    run = Path("runs/my-text/model/seed0")
    page.write_text("<title>Mine &amp; yours</title>", encoding="utf-8")
    outcome = cli("train", run, "--device", "cpu", "training.epochs=2", "--withhold-test")
    assert outcome.code == 0, outcome.err
    assert f"{page} shows the earlier result" in outcome.out
    outcome = cli("train", run, "--device", "cpu", "training.epochs=3")
    assert outcome.code == 0, outcome.err
    assert f"report: {page}" in outcome.out
    content = page.read_text(encoding="utf-8")
    assert "<h1>Mine &amp; yours" in content
    result = RunFolder.open(run).result
    assert result is not None
    assert result.test is not None
    assert f"{result.test.per_word:,.1f}" in content

    # A recipe that the user has edited is not overwritten.
    (tmp_path / "my-text.toml").write_text(recipe.replace("dropout = 0.3", "dropout = 0.1"), encoding="utf-8")
    outcome = cli("new", "--text", "My Text.txt", "--device", "cpu")
    assert outcome.code == 2
    message = " ".join(outcome.err.split())
    assert "my-text.toml exists and is another recipe: it was edited, or written with other options" in message
    assert "differs in base.encoder.dropout; train it with" in message


def test_the_message_about_another_recipe_gives_the_reason(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    assert cli("new", "--text", "a.txt", "--device", "cpu").code == 0
    (tmp_path / "a.txt").write_text(TEXT + "one more line\n", encoding="utf-8")
    outcome = cli("new", "--text", "a.txt", "--device", "cpu")
    assert outcome.code == 2
    assert "the text has changed (it was a.txt: one file, 300 lines" in " ".join(outcome.err.split())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text(TEXT, encoding="utf-8")
    outcome = cli("new", "--text", "b/a.txt", "--device", "cpu")
    assert outcome.code == 2
    assert f"it is for another text, {tmp_path / 'a.txt'}" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "a.txt", "training.epoch=3"), "epoch"),
        (("demo", "--text", "a.txt"), "demo and --text were given"),
        (("--text", "a.txt", "--out", "a.txt"), "a.txt is a file, not a folder"),
        (("--text", "a.txt", "--data", "."), "--data has no effect"),
    ],
)
def test_a_command_that_fails_leaves_no_recipe(cli: Cli, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    outcome = cli("train", *words, "--device", "cpu")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["a.txt"]

    # A recipe that existed before is kept.
    assert cli("new", "--text", "a.txt", "--out", "runs/a.toml", "--device", "cpu").code == 0
    assert cli("train", *words, "--device", "cpu").code == 2
    assert (tmp_path / "runs" / "a.toml").exists()


def test_large_vocabulary_of_words_gets_adaptive_ends(cli: Cli, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(31_000)] * 2
    lines = [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert cli("new", "--text", "a.txt", "--tokens", "words", "--device", "cpu").code == 0
    assert tomllib.loads((tmp_path / "a.toml").read_text("utf-8"))["base"]["output"]["kind"] == "adaptive"
    assert cli("validate", "a.toml").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train",), "train needs a recipe or a text"),
        (("train", "demo", "--field", "body"), "--field has no effect without --text"),
        (("train", "--text", "a.txt", "--field", "body"), "--field body has no effect on a.txt, which is plain text"),
        (("train", "--text", "a.txt", "--row", "tied"), "--row has no effect with --text"),
        (("train", "--text", "missing.txt"), "missing.txt does not exist"),
        (("train", "--text", "a.txt", "--encoding", "klingon"), "Python does not know this encoding"),
        (("train", "--text", "a.txt", "--device", "mps"), "--device mps: Apple GPUs are not supported, because"),
        (("new",), "new needs a text"),
        (("train", "demo", "--row", "tied", "corpus.name=a.txt"), "it is a file: use `reefknot train --text FILE`"),
        (("train", "demo", "--row", "tied", "corpus.name=ptb", "--data", "nowhere"), "nowhere does not exist"),
    ],
)
def test_mistakes_are_explained(cli: Cli, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    outcome = cli(*words)
    assert outcome.code in (2, 3)
    assert message in " ".join(outcome.err.split())
