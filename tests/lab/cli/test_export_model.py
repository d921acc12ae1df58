"""`reefknot export`: ONNX Runtime and torch.export against the model, the model card, and mistakes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reefknot as rk
from contract.combinations import LANGUAGE_MODEL_ENCODERS, WORDS, Case
from reefknot.lab.interop.export import Exported, ExportRequest
from reefknot.lab.tasks import open_run
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from untrained import make_run

from .conftest import Runs, run_command

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ENDS = {
    "plain": ("lookup", "softmax", "plain"),
    "drill": ("lookup", "softmax", "drill"),
    "dual": ("lookup", "softmax", "dual"),
    "mixture": ("lookup", "mixture", "plain"),
    "adaptive": ("adaptive", "adaptive", None),
}
FEW = [("lstm", "plain", "step"), ("transformer", "drill", "log_probs"), ("transformer", "adaptive", "targets")]
"""An export takes seconds, so CI has few combinations; `--combinations all` has all."""
OTHER_SHAPES = [(1, 1), (2, 9), (6, 2)]
"""Streams and steps that the export did not see."""


def all_combinations() -> list[tuple[str, str, str]]:
    kinds = {encoder: ["step"] for encoder in LANGUAGE_MODEL_ENCODERS}
    kinds["transformer"] = ["log_probs", "targets", "topk", "step"]
    return [(encoder, end, kind) for encoder in kinds for end in ENDS for kind in kinds[encoder]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        combinations = all_combinations() if metafunc.config.getoption("--combinations") == "all" else FEW
        metafunc.parametrize("combination", combinations, ids=lambda parts: "-".join(map(str, parts)))


def make(folder: Path, encoder: str, end: str = "plain") -> Path:
    input_kind, output, classifier = ENDS[end]
    case = Case(input_kind, encoder, output, classifier, tied=True)
    return make_run(folder / "run", case.settings(), WORDS)


def random_inputs(scorer: rk.Scorer, streams: int, steps: int) -> tuple[Any, ...]:
    """Return random tokens with a random target or state."""
    if scorer.kind == "step":
        tokens_B = torch.randint(len(WORDS), (streams,))
        _, state = scorer.example_inputs(streams, steps)
        return tokens_B, state
    tokens = torch.randint(len(WORDS), (2, streams, steps))
    if scorer.kind != "targets":
        return (tokens[0],)
    tokens[1, 0, 0] = -100
    return tuple(tokens)


@torch.no_grad()
def test_onnx_runtime_equals_torch_at_other_shapes(combination: tuple[str, str, str], tmp_path: Path) -> None:
    import onnx

    encoder, end, kind = combination
    run = make(tmp_path, encoder, end)
    options = ["--k", "3"] if kind == "topk" else []
    done = run_command("export", run, "--format", "onnx", "-o", tmp_path / "out", "--kind", kind, "--json", *options)
    assert done.json()["difference"] < 1e-5
    scorer = rk.Scorer(open_run(run).model, kind, k=3)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    for shape in OTHER_SHAPES:
        inputs = random_inputs(scorer, *shape)
        expected = torch.utils._pytree.tree_leaves(scorer(*inputs))
        tensors = torch.utils._pytree.tree_leaves(inputs)
        feeds = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), tensors, strict=True)}
        for array, tensor in zip(session.run(None, feeds), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(array), tensor, rtol=1e-5, atol=1e-5)

    # Every weight is stored once, and nothing names a file of this machine.
    model = onnx.load(tmp_path / "out" / "model.onnx")
    weights = dict.fromkeys(scorer.state_dict(keep_vars=True).values())
    large = sum(
        int(np.prod(value.dims)) for value in model.graph.initializer if value.data_type == onnx.TensorProto.FLOAT
    )
    assert large == sum(weight.numel() for weight in weights)
    assert str(Path(rk.__file__).parent).encode() not in (tmp_path / "out" / "model.onnx").read_bytes()


def test_file_is_as_large_as_the_parameters(tmp_path: Path) -> None:
    """With a vocabulary of some size, the file is hardly larger than its weights."""
    import onnx

    from reefknot.lab.interop.graphs import _write_onnx

    words = rk.WordTable(20_000, 16)
    model = rk.LanguageModel(rk.Lookup(words), rk.LSTM(16, 16, layers=1), rk.Softmax(rk.Drill(words, depth=1)))
    scorer = rk.Scorer(model, "step")
    program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
    _write_onnx(program, tmp_path / "model.onnx", ["tokens", "state.h", "state.c"], ["log_probs", "next.h", "next.c"])
    num_bytes = 4 * sum(weight.numel() for weight in dict.fromkeys(scorer.state_dict(keep_vars=True).values()))
    assert num_bytes <= (tmp_path / "model.onnx").stat().st_size < 1.03 * num_bytes
    inputs = {value.name: value for value in onnx.load(tmp_path / "model.onnx").graph.input}
    assert inputs["state.h"].type.tensor_type.shape.dim[1].dim_param == "streams"
    torch.export.save(program, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size < 1.03 * num_bytes


@torch.no_grad()
def test_program_of_torch_export(tmp_path: Path) -> None:
    run = make(tmp_path, "transformer")
    done = run_command("export", run, "--format", "pt2", "--kind", "topk", "--k", 4, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert "kind topk" in done.out
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    scorer = rk.Scorer(open_run(run).model, "topk", k=4)
    tokens_BT = torch.randint(len(WORDS), (2, 9))
    for actual, expected in zip(program(tokens_BT), scorer(tokens_BT), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    vocabulary = json.loads((tmp_path / "out" / "vocabulary.json").read_text(encoding="utf-8"))
    assert vocabulary["words"] == list(WORDS.words)


def test_tokenizer_of_a_graph_has_the_ids_of_the_graph(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    settings = VocabularySettings(bpe={"merges": 4})  # type: ignore[arg-type]
    words = Vocabulary.from_counts({"low": 5, "lower": 3, "newest": 6, "<eos>": 4}, settings)
    case = Case("lookup", "lstm", "softmax", "plain", tied=True)
    run = make_run(tmp_path / "run", case.settings(), words)
    done = run_command("export", run, "--format", "pt2", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    expected = [words.eos, *words.encode(["newest", "löw", "low"]), words.eos, *words.encode(["lower"])]
    assert tokenizer.encode("newest löw low\nlower").ids == expected
    vocabulary = Vocabulary.load(tmp_path / "out" / "vocabulary.json")
    assert vocabulary.words == words.words


def test_model_card_of_a_trained_run(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    done = run_command("export", runs.tied, "--format", "hf", "-o", tmp_path / "hf")
    assert (done.code, done.err) == (0, "")
    result = open_run(runs.tied).run.result
    assert result is not None
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert "| row | parameters | valid |" in card
    assert f"| {result.test.perplexity:.1f} |" in card
    assert result.test.definition in card
    text = result.test.text
    assert f"- test: {text.unknown:,} unknown words, " in card


def test_hf_model_and_tokenizer_of_a_trained_run(runs: Runs, tmp_path: Path) -> None:
    """Model and tokenizer together generate the tokens that `reefknot generate` prints."""
    transformers = pytest.importorskip("transformers", minversion="5")
    assert run_command("export", runs.untied, "--format", "hf", "-o", tmp_path / "hf").code == 0
    options = ["--prompt", "green river", "--temperature", 0, "--length", 12, "--json"]
    printed = run_command("generate", runs.untied, *options).json()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer("green river", return_tensors="pt")
    generated = model.generate(**batch, max_new_tokens=12)[0]
    assert tokenizer.convert_ids_to_tokens(generated) == ["<eos>", "green", "river", *printed["tokens"]]
    outcome = run_command("export", tmp_path / "hf", "--format", "pt2", "-o", tmp_path / "again")
    assert "is an exported model and not a run; use the run that it was exported from" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "word2vec"], "must be one of hf, onnx, pt2; `reefknot vectors export` writes word vectors"),
        (["--format", "onnx", "--kind", "best"], "--kind best: must be one of log_probs, targets, topk, step"),
        (["--format", "onnx", "--kind", "log_probs"], "is recurrent, so its graph has one token at a time; use --kind"),
        (["--format", "onnx", "--k", "3"], "--k has no effect without --kind topk"),
        (["--format", "hf", "--kind", "step"], "--kind has no effect with --format hf; leave --kind out"),
    ],
)
def test_mistakes_are_explained(runs: Runs, options: list[str], message: str, tmp_path: Path) -> None:
    outcome = run_command("export", runs.tied, *options, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_not_overwritten(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    outcome = run_command("export", runs.tied, "--format", "pt2", "-o", tmp_path)
    assert outcome.code == 2
    assert "exists already; choose another folder" in outcome.err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_failed_export_leaves_nothing(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", fail)
    outcome = run_command("export", runs.tied, "--format", "pt2", "-o", tmp_path / "out")
    assert outcome.code == 5
    assert "free some space" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_exports_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in ("out", "notes"):
        (tmp_path / f"{name}.tmp-{ended.pid}").mkdir()
    done = run_command("export", make(tmp_path, "lstm"), "--format", "pt2", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", f"notes.tmp-{ended.pid}"}


@pytest.mark.parametrize("format", ["onnx", "hf"])
def test_missing_package_is_explained(
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
) -> None:
    find_spec = importlib.util.find_spec
    package = {"onnx": "onnxscript", "hf": "transformers"}[format]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    outcome = run_command("export", runs.tied, "--format", format, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"--format {format} needs {package}; install it with: pip install 'reefknot[{format}]'" in outcome.err


def test_old_transformers_is_explained(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.3")
    outcome = run_command("export", runs.tied, "--format", "hf", "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--format hf needs transformers 5, but transformers 4.57.3 is installed" in outcome.err


def test_translators_and_word_vectors_name_the_right_format(tmp_path: Path) -> None:
    case = Case("lookup", "attention_gru", "softmax", "plain", tied=True)
    run = make_run(tmp_path / "run", case.settings(), VocabularyPair(WORDS, WORDS))
    outcome = run_command("export", run, "--format", "onnx", "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "is a translator, which also reads a source; use --format hf" in outcome.err


def test_difference_from_torch_is_readable() -> None:
    request = ExportRequest(format="onnx", output=Path("mine"))
    exported = Exported(request, 1_000, {"kind": "step", "difference": 3.814697265625e-06})
    assert exported.text() == "mine: onnx, 1,000 parameters, kind step, difference 4e-06 from torch"
    assert exported.record()["difference"] == 3.814697265625e-06
