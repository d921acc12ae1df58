"""A user's mistake prints a message and sets an exit code, without a traceback."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]

MISTAKES = [
    ("train dmo", 2, "no recipe 'dmo'.*did you mean demo?"),
    ("train nowhere.toml", 2, "no recipe 'nowhere.toml'.*`reefknot ls recipes` lists the shipped recipes"),
    ("train demo --row tied --gpus 2", 2, "`reefknot train` has no --gpus: .* torchrun --nproc-per-node=GPUS"),
    ("train demo --row tied --nproc=2", 2, "`reefknot train` has no --nproc: .* torchrun --nproc-per-node=GPUS"),
    ("train {recipe}", 2, 'choose a row with --row; there are: "tied", "untied"'),
    ("train {recipe} --row teid", 2, 'no row "teid"; did you mean "tied"?'),
    ("train {recipe} --row qqq", 2, 'no row "qqq"; there are: "tied", "untied"'),
    ("train {recipe} --row quoted", 2, 'row "quoted" is quoted from another paper: there is nothing to train'),
    ("table {recipe} --row teid", 2, 'no row "teid"; did you mean "tied"?'),
    ("table {recipe} --row q*", 2, 'no row to train matches "q.*"; there are: "tied", "untied"'),
    ("table press2017/table6", 3, 'not run: "Small model", .*: ptb not found: expected'),
    (
        "sweep {recipe} training.clip=1,2 --row tied --start {tied}",
        2,
        'row "tied" does not start from a run; --start',
    ),
    ("train {recipe} --row tied training.epoch=3", 2, "training.epoch: no such setting; did you mean training.epochs?"),
    ("train {recipe} --row tied epochs=3", 2, "epochs: no such setting; did you mean training.epochs?"),
    ("train {recipe} --row tied training.epochs=0", 2, "training.epochs: .* greater than or equal to 1 .it is 0."),
    ("train {recipe} --row tied training.random_steps.least=999", 2, "random_steps.least = 999 is more than steps"),
    ("train {recipe} --row tied training.epochs=many", 2, "training.epochs: .*valid integer .it is 'many'."),
    ("train {recipe} --row tied epochs", 2, "'epochs' is not key=value"),
    (
        "train {recipe} --row tied encoder.hidden_dim=9",
        2,
        'row "tied": the encoder has dimension 9',
    ),
    ("params {recipe} encoder.hidden_dim=9", 2, '{recipe}, rows "tied", "untied": the encoder has dimension 9'),
    ("table {recipe} encoder.hidden_dim=9", 2, '{recipe}, rows "tied", "untied": the encoder has dimension 9'),
    ("table {recipe} corpus.name=nowhere", 3, '{recipe}, rows "tied", "untied": corpus .nowhere. is neither'),
    ("train {recipe} --row tied training.batch=100000", 3, "streams need at least 200,000"),
    ("train {recipe} --row tied corpus.name=nowhere", 3, "corpus 'nowhere' is neither a known corpus"),
    ("train demo --row tied corpus.name=wikitext2 --data {root}", 3, "'wikitext2' is neither .*mean wikitext-2?"),
    ("train {recipe} --row tied --device tpu", 2, "--device tpu: must be auto, cpu or cuda"),
    ("train {recipe} --row tied --out {recipe}", 2, "is a file, not a folder"),
    ("train {recipe} --row tied --out {corpus}", 2, "is not a run folder .* use another --out"),
    ("train {recipe} --row tied --seeds 0", 2, "--seeds"),
    ("train {recipe} --row tied --seeds many", 2, "--seeds"),
    ("train press2017/table6 --row small-wt", 3, "ptb not found: expected DIR/ptb/ptb.train.txt"),
    ("train press2017/table6 --row small-wt --data {corpus}", 3, "ptb not found in .*: expected .*ptb.train.txt"),
    ("table dmo", 2, "did you mean demo?"),
    ("table {recipe} --jobs 0", 2, "--jobs"),
    ("evaluate nowhere", 3, "nowhere is not a run folder: there is no such folder"),
    ("evaluate {recipe}", 3, "is not a run folder: it is a file"),
    ("evaluate {root}", 3, "is not a run folder: it has no config.json; .*tied/seed0: use one"),
    ("evaluate {tied} --split all", 2, "--split all: must be one of train, valid, test"),
    ("evaluate {tied} --streams 0", 2, "--streams"),
    ("evaluate {tied} --device tpu", 2, "--device tpu"),
    ("evaluate {long}", 3, "File name too long"),
    ("validate {long}", 2, "no recipe .aaa"),
    ("compare {tied}", 2, "at least two systems"),
    ("compare {tied} nowhere", 3, "nowhere: there is no such folder"),
    ("compare {root} {tied}", 2, "differ in more than the seed: tied; untied; a folder is read as one system"),
    ("compare {tied} {untied} --split train", 2, "a run stores scores of test and valid"),
    ("compare {tied} {untied} --by words", 2, "--by words: must be blocks or documents"),
    ("compare {tied} {tied}", 2, "tied/seed0 is in two of the systems; pass systems without common runs"),
    ("compare {untied} {tied} {root}/tied", 2, "tied/seed0 is in two of the systems"),
    (
        "compare {tied} {untied} --by documents --split valid",
        3,
        "too few documents to resample, 10: .* use --by blocks",
    ),
    (
        "compare {tied} {untied} --by documents --block 9",
        2,
        "--block has no effect with --by documents; leave one of them out",
    ),
    ("compare {tied} {untied} --bands --figure b.png", 2, "--figure b.png: .* use a name that ends in .svg"),
    ("report nowhere", 3, "nowhere: there is no such folder"),
    ("report {recipe}", 3, "this is a file; pass a run folder, or a folder that contains runs"),
    ("report {tied} -o scores.csv", 2, "-o scores.csv: without --csv, this is an HTML page; add --csv"),
    ("report {corpus}", 3, "no runs in this folder"),
    ("report {tied} -o {corpus}", None, "is a folder"),
    ("generate nowhere", 3, "no such folder"),
    ("generate {tied} --temperature nan", 2, "temperature"),
    ("generate {tied} --temperature inf", 2, "temperature inf: must be a number from 0"),
    ("generate {tied} --temperature -1", 2, "temperature"),
    ("generate {tied} --top-k 0", 2, "--top-k"),
    ("generate {tied} --top-p 2", 2, "--top-p"),
    ("generate {tied} --seed 99999999999999999999", 2, "--seed"),
    ("score nowhere text", 3, "no such folder"),
    ("vectors neighbors {tied} zebra green", 3, "not in the vocabulary of .*: zebra"),
    ("vectors neighbors {tied}", 2, "(?i)words"),
    ("params {recipe} --row teid", 2, 'no row "teid"'),
    ("params {recipe} tables.spare.kind=word tables.spare.dim=3", 2, "no end uses tables.spare"),
    ("params {recipe} input.table=wrods", 2, "no table 'wrods' in .tables.; there are: words"),
    ("validate nowhere", 2, "no recipe 'nowhere'"),
    (
        "validate demo a.b=1",
        2,
        "a.b=1 is a setting, not a recipe; .*`reefknot params RECIPE --row ROW a.b=1`\n$",
    ),
    ("ls nothing", 2, "no family 'nothing'; `reefknot ls` lists the families; no recipe 'nothing'.*: `?"),
    ("ls classifers", 2, "no family 'classifers'; did you mean classifiers?"),
    ("trian", 2, "No such command 'trian'; did you mean train?"),
    ("evalute runs/mine", 2, "No such command 'evalute'; did you mean evaluate?"),
    ("qqq", 2, "No such command 'qqq'"),
    ("vectors neighbours", 2, "No such command 'neighbours'; did you mean neighbors?"),
    ("train {recipe} --row tied --data {corpus}", 2, "--data has no effect: {recipe} reads .*, not a data folder"),
    ("train demo --row tied --seeds 2 --data {corpus}", 2, "--data has no effect: demo reads python-docs"),
    ("table {recipe} --data {corpus}", 2, "--data has no effect"),
    ("sweep {recipe} training.clip=1,2 --row tied --data {corpus}", 2, "--data has no effect"),
    ("params demo --data {corpus}", 2, "--data has no effect"),
    ("validate demo --data {corpus}", 2, "--data has no effect"),
    ("advise python-docs --data {corpus}", 2, "--data has no effect"),
    ("advise wikitext2 --data {corpus}", 3, "corpus 'wikitext2' is neither a known .*; did you mean wikitext-2?"),
    ("report {tied} --data {corpus}", 2, "--data has no effect without --figures"),
    ("report {tied} --figures", 2, "--figures has no effect: no figure .* is about these runs"),
    ("figure --device cpu", 2, "--device: no figure is given"),
    ("figure -o f.svg --data {corpus}", 2, "-o, --data: no figure is given"),
    ("figure inan2017/2 {tied} --device cpu", 2, "--device has no effect on inan2017/2, which reads results and"),
    ("figure press2017/table4 {tied} --data {corpus}", 2, "--data has no effect on press2017/table4, which reads wei"),
    ("ls --jsno", 2, "(?i)no such option.*--jsno"),
]


@pytest.fixture
def arguments(runs: Runs, recipe: Path, corpus: Path) -> dict[str, Path | str]:
    return {
        "recipe": recipe,
        "corpus": corpus,
        "root": runs.root,
        "tied": runs.tied,
        "untied": runs.untied,
        "long": "a" * 300,
    }


@pytest.mark.parametrize(("command", "code", "message"), MISTAKES, ids=[command for command, _, _ in MISTAKES])
def test_mistake_prints_a_short_message(
    cli: Cli,
    arguments: dict[str, Path | str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    code: int | None,
    message: str,
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    outcome = cli(*command.format(**arguments).split())
    assert re.search(message.replace("{recipe}", re.escape(str(arguments["recipe"]))), outcome.err), outcome.err
    assert outcome.code == code or (code is None and outcome.code in (2, 3))
    assert "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) <= 5
    assert outcome.out == "" or command.startswith(("table", "sweep"))
    assert list(tmp_path.iterdir()) == [] or command.startswith("train")


def test_many_mistakes_print_at_most_ten_lines(cli: Cli, recipe: Path) -> None:
    overrides = [f"training.wrong{index}=1" for index in range(30)]
    outcome = cli("params", recipe, *overrides)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) <= 10
    assert "and 22 more" in outcome.err


def test_run_without_weights_is_rejected(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs.tied, unfinished, ignore=shutil.ignore_patterns("best", "checkpoints", "result.json"))
    for verb, *words in (("evaluate",), ("generate",), ("score", "green"), ("vectors neighbors", "green")):
        outcome = cli(*verb.split(), unfinished, *words)
        assert outcome.code == 3
        assert "has no trained weights yet: finish its training first" in outcome.err
    outcome = cli("compare", runs.tied, unfinished)
    assert outcome.code == 3
    assert "training is not finished" in outcome.err


def test_run_whose_weights_were_deleted_is_rejected(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    """A record never has weights. In a finished run, the weights may be missing with or without the link `best`."""
    record, bare, dangling = tmp_path / "record", tmp_path / "bare", tmp_path / "dangling"
    weights = ("best", "checkpoints")
    shutil.copytree(runs.tied, record, ignore=shutil.ignore_patterns(*weights, "vocabulary.json"))
    shutil.copytree(runs.tied, bare, ignore=shutil.ignore_patterns(*weights))
    shutil.copytree(runs.tied, dangling, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    messages = {
        record: "is the record of a run, without weights; use the folder it was trained in",
        bare: "is finished, but its weights are gone: .* restore .* or train it again with another --out",
        dangling: "is finished, but its weights are gone: .* restore .* or train it again with another --out",
    }
    for folder, message in messages.items():
        for verb, *words in (
            ("vectors neighbors", "green"),
            ("vectors analogy", "green", "river", "house"),
            ("score", "green"),
        ):
            outcome = cli(*verb.split(), folder, *words)
            assert (outcome.code, outcome.out) == (3, "")
            assert re.search(f"{re.escape(str(folder))} {message}", outcome.err), outcome.err


def test_damaged_runs_are_rejected(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(runs.tied, damaged, symlinks=True)
    for path in damaged.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    outcome = cli("evaluate", damaged)
    assert outcome.code == 3
    assert "model.safetensors does not match the SHA-256" in outcome.err
    (damaged / "vocabulary.json").unlink()
    assert "vocabulary.json is missing" in cli("generate", damaged).err
    (damaged / "config.json").write_text("{}", encoding="utf-8")
    outcome = cli("evaluate", damaged)
    assert outcome.code == 3
    assert "config.json is damaged: it has 2 bytes instead of " in outcome.err
    (damaged / "MANIFEST.json").unlink()
    outcome = cli("evaluate", damaged)
    assert outcome.code == 3
    assert "config.json has no settings" in outcome.err
    assert cli("compare", damaged, runs.tied).code in (2, 3)
    (damaged / "config.json").write_text("[", encoding="utf-8")
    assert cli("evaluate", damaged).code == 3


def test_changed_settings_are_rejected(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    """The settings change in one digit. Runs from before manifests have the hash of their settings in checkpoints."""
    changed = tmp_path / "changed"
    shutil.copytree(runs.tied, changed, symlinks=True)
    config = (changed / "config.json").read_text(encoding="utf-8")
    (changed / "config.json").write_text(config.replace('"batch": 4', '"batch": 5'), encoding="utf-8")
    outcome = cli("evaluate", changed)
    assert outcome.code == 3
    assert "config.json is damaged: it does not match its SHA-256" in outcome.err
    (changed / "MANIFEST.json").unlink()
    outcome = cli("evaluate", changed)
    assert outcome.code == 3
    assert "config.json has changed since" in outcome.err


def test_run_from_before_manifests_is_accepted_with_a_message(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for copy in (old, new):
        shutil.copytree(runs.tied, copy, symlinks=True)
    (old / "MANIFEST.json").unlink()
    from_old, from_new = (cli("evaluate", run, "--json") for run in (old, new))
    assert from_old.json()["perplexity"] == from_new.json()["perplexity"]
    assert f"{old}: from before runs had a MANIFEST.json" in from_old.err
    assert "MANIFEST.json" not in from_new.err


def test_changed_corpus_is_rejected(cli: Cli, recipe: Path, corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    run = tmp_path / "run"
    assert cli("train", recipe, f"corpus.name={text}", "training.epochs=1", "--row", "tied", "--out", run).code == 0
    (text / "train.txt").write_text("other words entirely\n" * 50, encoding="utf-8")
    outcome = cli("evaluate", run)
    assert outcome.code == 3
    assert "has changed; restore it" in outcome.err


def test_wrong_model_size_is_rejected_before_training(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    text = recipe.read_text(encoding="utf-8")
    wrong.write_text(text.replace('name = "tied"\n', 'name = "tied"\nparameters = 9\n'), encoding="utf-8")
    for words in (("validate", wrong), ("train", wrong, "--row", "tied", "--out", tmp_path / "run")):
        outcome = cli(*words)
        assert outcome.code == 2
        assert "652 parameters" in outcome.err or "has 652" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError(), 5, "out of memory; try"),
        (torch.OutOfMemoryError("CUDA out of memory."), 5, "out of memory; try"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 5, "out of memory; try"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 5, "the disk is full ./x/y.; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 3, "/x/y: Permission denied"),
    ],
)
def test_full_disk_or_memory_prints_a_message(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("reefknot.lab.cli.ls._collect_families", fail)
    outcome = cli("ls")
    assert outcome.code == code
    assert re.search(message, outcome.err)


def test_closed_standard_output_is_an_error() -> None:
    """`>&-` closes standard output in a shell. All verbs share this check."""
    command = f"exec {shlex.quote(sys.executable)} -m reefknot ls >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr == "reefknot: standard output is closed; send it to a file, or to /dev/null\n"


def test_unexpected_error_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("reefknot.lab.cli.ls._collect_families", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        cli("ls")


def test_seeds_cannot_be_combined_with_a_seed_or_a_run_folder(
    cli: Callable[..., Outcome], runs: Runs, recipe: Path
) -> None:
    outcome = cli("train", recipe, "--row", "tied", "--seeds", 2, "training.seed=7")
    assert outcome.code == 2
    assert "leave training.seed out" in outcome.err
    outcome = cli("train", recipe, "--row", "tied", "--seeds", 2, "--out", runs.tied)
    assert outcome.code == 2
    assert "is a run; with --seeds" in outcome.err


def test_torchrun_cannot_train_several_runs(
    cli: Callable[..., Outcome], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = cli("train", recipe, "--row", "tied", "--seeds", 2, "--out", tmp_path / "runs")
    assert outcome.code == 2
    assert "start several runs without torchrun" in outcome.err


def test_unfinished_run_prints_a_warning(cli: Callable[..., Outcome], runs: Runs, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs.tied, unfinished, symlinks=True)
    (unfinished / "result.json").unlink()
    outcome = cli("generate", unfinished, "--length", 2, "--json")
    assert outcome.code == 0
    assert "training is not finished; these are its best weights so far" in outcome.err
    assert len(outcome.json()["tokens"]) == 2
