"""Import of fairseq's models: the probabilities are fairseq's, and unusable files raise clear errors."""

from __future__ import annotations

import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from interop.fairseq_models import CUTOFFS, DIM, LAYERS, WORDS, FairseqModel
from reefknot.errors import DataError
from reefknot.lab.interop.fairseq import import_checkpoint
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import open_run
from reefknot.lab.tasks.language_model import open_texts
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.vocabulary import Vocabulary

IDS = torch.tensor([[2, 4, 30, 9, 10, 3], [2, 17, 18, 25, 0, 1]])  # includes the first and last id of every band


def import_model(model: FairseqModel, folder: Path, **contents: Any) -> Path:
    """Save a model in fairseq's layout, import it, and return the run folder."""
    import_checkpoint(*model.save(folder / "files", **contents), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("tied", "tied_projections"), [(True, True), (True, False), (False, False)])
def test_log_probabilities_equal_fairseq(
    tied: bool, tied_projections: bool, joined: bool, final_norm: bool, tmp_path: Path
) -> None:
    theirs = FairseqModel(tied, tied_projections, joined, final_norm)
    model = open_run(import_model(theirs, tmp_path)).model
    assert model.tied == tied
    for kind, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model.to(kind)
        ours = model.output.log_probs(model(IDS).output.flatten(0, 1)).view(*IDS.shape, -1)
        torch.testing.assert_close(ours.double(), theirs.log_probs(IDS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tied_projections", [True, False])
def test_shared_parameters_are_stored_and_counted_once(tied_projections: bool, tmp_path: Path) -> None:
    theirs = FairseqModel(tied_projections=tied_projections)
    buffers = ("version", "_float_tensor")
    sizes = {t.data_ptr(): t.numel() for name, t in theirs.tensors.items() if not name.endswith(buffers)}
    model = open_run(import_model(theirs, tmp_path)).model
    assert sum(model.parameter_counts().values()) == sum(sizes.values())


def test_every_word_keeps_its_vector(tmp_path: Path) -> None:
    theirs = FairseqModel()
    trained = open_run(import_model(theirs, tmp_path))
    words = trained.vocabulary
    assert words.words[:4] == ("<s>", "<pad>", "<eos>", "<unk>")
    assert [words.id_of(word) for word in WORDS] == list(range(4, CUTOFFS[-1]))
    assert words.counts[4:6] == (100, 99)
    tables = trained.model.input.tables()
    for word in (WORDS[0], WORDS[6], WORDS[-1]):
        index = words.id_of(word)
        band = next(number for number, stop in enumerate(CUTOFFS) if index < stop)
        row = theirs[f"embed_tokens.embeddings.{band}.0.weight"][index - (0, *CUTOFFS)[band]]
        torch.testing.assert_close(tables[band].weight[index - (0, *CUTOFFS)[band]], row.float())


def test_options_become_settings(tmp_path: Path) -> None:
    settings = open_run(import_model(FairseqModel(), tmp_path)).experiment.model_dump()
    encoder, output = settings["encoder"], settings["output"]
    assert (encoder["layers"], encoder["heads"]) == (LAYERS, 4)
    assert (encoder["dropout"], encoder["dropout_attention"], encoder["dropout_relu"]) == (0.3, 0.1, 0.2)
    assert output["softmax_dropout"] == output["tail_dropout"] == 0.15
    assert settings["input"]["scale"] == DIM**0.5
    assert settings["training"]["steps"] == 6


def test_missing_options_have_fairseqs_defaults(tmp_path: Path) -> None:
    bare = Namespace(decoder_attention_heads=4)
    settings = open_run(import_model(FairseqModel(), tmp_path, args=bare)).experiment.model_dump()
    assert settings["training"]["steps"] == 1024
    assert settings["encoder"]["dropout"] == 0.1
    assert settings["output"]["tail_dropout"] == 0.0


def test_model_trained_on_sentences_is_scored_by_lines(tmp_path: Path) -> None:
    model = FairseqModel()
    arguments = Namespace(**model.arguments | {"sample_break_mode": "eos", "no_scale_embedding": True})
    settings = open_run(import_model(model, tmp_path, args=arguments)).experiment.model_dump()
    assert settings["evaluation"]["windows"] == {"kind": "lines"}
    assert settings["input"]["scale"] == 1.0


@pytest.mark.parametrize("section", [dict, lambda **options: Namespace(**options)])
def test_options_in_newer_files_are_read(section: Any, tmp_path: Path) -> None:
    model = FairseqModel()
    options = {**model.arguments, "activation_dropout": 0.25}
    length = options.pop("tokens_per_sample")
    config = {"model": section(**options), "task": {"tokens_per_sample": length}, "common": {"seed": 1}}
    settings = open_run(import_model(model, tmp_path, args=None, cfg=config)).experiment.model_dump()
    assert settings["encoder"]["dropout_relu"] == 0.25
    assert settings["training"]["steps"] == 6


def test_old_and_half_precision_files_are_read(tmp_path: Path) -> None:
    """The published checkpoints have the format of torch before 1.6. Some files have float16 tensors."""
    theirs = FairseqModel(joined=True)
    theirs.tensors = {name: tensor.half() for name, tensor in theirs.tensors.items()}
    checkpoint, dictionary = theirs.save(tmp_path)
    stored = {"model": theirs.tensors, "args": Namespace(**theirs.arguments)}
    torch.save(stored, checkpoint, _use_new_zipfile_serialization=False)
    import_checkpoint(checkpoint, dictionary, tmp_path / "run")
    model = open_run(tmp_path / "run").model.double()
    ours = model.output.log_probs(model(IDS).output.flatten(0, 1)).view(*IDS.shape, -1)
    torch.testing.assert_close(ours, theirs.log_probs(IDS), rtol=1e-10, atol=1e-10)


def test_training_meters_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early checkpoints contain them as objects of fairseq's classes."""
    module = ModuleType("fairseq.meters")
    module.AverageMeter = type("AverageMeter", (), {"__module__": "fairseq.meters"})  # type: ignore[attr-defined]
    meter = module.AverageMeter()
    meter.avg = 3.5
    model = FairseqModel()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
        patch.setitem(sys.modules, "fairseq.meters", module)
        files = model.save(tmp_path, args=Namespace(**model.arguments), extra_state={"train_meters": {"loss": meter}})
    assert import_checkpoint(*files, tmp_path / "run").imported


def test_import_is_idempotent_and_another_model_is_rejected(tmp_path: Path) -> None:
    files = FairseqModel().save(tmp_path / "one")
    import_checkpoint(*files, tmp_path / "run")
    before = (tmp_path / "run" / "best" / "MANIFEST.json").read_bytes()
    import_checkpoint(*files, tmp_path / "run")
    assert (tmp_path / "run" / "best" / "MANIFEST.json").read_bytes() == before
    with pytest.raises(Exception, match=r"holds a run with other settings .*imported\.checkpoint"):
        import_checkpoint(*FairseqModel(seed=1).save(tmp_path / "other"), tmp_path / "run")


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text("w3 w0 strange w26\n\nw1\n", encoding="utf-8")
    return folder


def test_text_is_encoded_with_the_dictionary(tmp_path: Path) -> None:
    files = FairseqModel().save(tmp_path / "files")
    corpus = CorpusSettings(name=str(write_texts(tmp_path / "text")))
    run = import_checkpoint(*files, tmp_path / "run", corpus=corpus)
    dataset = open_texts(run, None)
    assert dataset.splits["test"].ids.tolist() == [7, 4, 3, 30, 2, 2, 5, 2]
    assert dataset.vocabulary == Vocabulary.load(run.vocabulary_path)
    (tmp_path / "text" / "test.txt").write_text("w3\n", encoding="utf-8")
    with pytest.raises(DataError, match="has changed"):
        open_texts(run, None)


def test_model_imported_without_a_text_cannot_be_scored(tmp_path: Path) -> None:
    run = RunFolder.open(import_model(FairseqModel(), tmp_path))
    with pytest.raises(DataError, match=r"imported without a text; import it again with --corpus NAME"):
        open_texts(run, None)


# -- rejected files ----------------------------------------------------------------------------------------------------


class Malicious:
    """Creates a file if it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    model = FairseqModel()
    with pytest.raises(DataError, match=r"model\.pt contains (posix|os)\.system, .* only tensors"):
        import_model(model, tmp_path, args=Namespace(**model.arguments), extra_state=Malicious(mark))
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Malicious(mark)))
    with pytest.raises(DataError, match=r"plain\.pkl"):
        import_checkpoint(tmp_path / "plain.pkl", tmp_path / "files" / "dict.txt", tmp_path / "run")
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 torn", bytes(range(256)), b"\x80\x02}."])
def test_file_that_is_not_a_checkpoint_is_rejected(content: bytes, tmp_path: Path) -> None:
    _, dictionary = FairseqModel().save(tmp_path)
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"model\.pt: not a checkpoint of (torch|fairseq)"):
        import_checkpoint(tmp_path / "model.pt", dictionary, tmp_path / "run")


def test_truncated_or_missing_checkpoint_is_rejected(tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    whole = checkpoint.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 10):
        checkpoint.write_bytes(whole[:size])
        with pytest.raises(DataError, match="not a checkpoint of torch, or damaged"):
            import_checkpoint(checkpoint, dictionary, tmp_path / "run")
    with pytest.raises(DataError, match="file not found"):
        import_checkpoint(tmp_path / "gone.pt", dictionary, tmp_path / "run")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"args": None}, "neither 'args' nor a 'cfg'"),
        ({"model": [1]}, "no 'model' with named tensors"),
        ({"args": Namespace(dropout=0.1)}, "invalid option decoder_attention_heads: Field required"),
        ({"args": Namespace(decoder_attention_heads=4, dropout="x")}, "invalid option dropout"),
        ({"args": Namespace(decoder_attention_heads=4, activation_fn="gelu")}, r"activation_fn = gelu; only .* relu"),
        ({"args": Namespace(decoder_attention_heads=4, add_bos_token=True)}, "unsupported architecture: add_bos_token"),
        (
            {"cfg": {"model": {"decoder_attention_heads": 4, "decoder_normalize_before": False}}},
            "unsupported architecture: decoder_normalize_before = False; only models with True",
        ),
    ],
)
def test_unsupported_contents_are_rejected(contents: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    torch.save({"model": FairseqModel().tensors, **contents}, checkpoint)
    with pytest.raises(DataError, match=message):
        import_checkpoint(checkpoint, dictionary, tmp_path / "run")


def model_with(**tensors: torch.Tensor | None) -> FairseqModel:
    """Return a model with these tensors replaced, or removed if None."""
    model = FairseqModel()
    for name, tensor in tensors.items():
        model.tensors.pop(name, None)
        if tensor is not None:
            model.tensors[name] = tensor
    return model


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"decoder.embed_tokens.embeddings.0.0.weight": None},
            "unsupported architecture: only language models with adaptive input",
        ),
        ({"decoder.adaptive_softmax.version": None}, "fairseq from 2018"),
        (
            {"decoder.embed_positions.weight": torch.zeros(9, DIM)},
            r"no parameters for decoder\.embed_positions",
        ),
        ({"decoder.layers.1.fc2.bias": None}, r"tensor decoder\.layers\.1\.fc2\.bias is missing"),
        ({"decoder.layers.0.fc2.bias": torch.zeros(3)}, r"fc2\.bias is \(3,\), not \(16,\)"),
        ({"decoder.layers.0.fc1.weight": torch.zeros(3)}, r"fc1\.weight is not a matrix"),
        ({"decoder.adaptive_softmax.tail.1.2.weight": torch.zeros(13, 1)}, "the ends share .* different values"),
        ({"decoder.embed_tokens.embeddings.1.0.weight": torch.zeros(8, 7)}, r"dimensions of the bands, \(16, 7, 1\)"),
    ],
)
def test_unsupported_architecture_is_rejected(
    tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        import_model(model_with(**tensors), tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a 3\nb 2\n", r"has 6 words including special symbols, but .* has 31 vectors"),
        (b"a 3\nb\n", "line 2: not a dictionary: expected a word and its count, got 'b'"),
        (b"a 3\nb -2\n", "line 2: not a dictionary"),
        (b"a 3\na 2\n", "line 2: the word 'a' is repeated"),
        (b"<eos> 3\n", "line 1: the word '<eos>' is repeated or a special symbol"),
        (b"\xff 3\n", "byte 0 is not valid UTF-8"),
        (b"", "line 1: not a dictionary"),
        (None, "is missing"),
    ],
)
def test_invalid_dictionary_is_rejected(text: bytes | None, message: str, tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    dictionary.unlink()
    if text is not None:
        dictionary.write_bytes(text)
    with pytest.raises(DataError, match=message):
        import_checkpoint(checkpoint, dictionary, tmp_path / "run")
