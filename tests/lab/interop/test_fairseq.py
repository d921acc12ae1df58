"""Import of fairseq's models: log-probabilities equal those of fairseq, and unusable files raise clear errors."""

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

from interop.fairseq_models import BAND_STARTS, CUTOFFS, DIM, LAYERS, WORDS, FairseqModel, find_band
from reefknot.errors import DataError
from reefknot.lab.interop.fairseq import import_checkpoint
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import open_run
from reefknot.lab.tasks.language_model import open_texts
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel

IDS_BT = torch.tensor([[2, 4, 30, 9, 10, 3], [2, 17, 18, 25, 0, 1]])  # includes the first and last id of every band


def import_model(fairseq_model: FairseqModel, folder: Path, **entries: Any) -> Path:
    """Save a model in fairseq's layout, import it, and return the run folder.

    Args:
        fairseq_model: The model.
        folder: The folder of the files and of the run folder.
        entries: Entries of the checkpoint; see `FairseqModel.save`.
    """
    checkpoint, dictionary = fairseq_model.save(folder / "files", **entries)
    import_checkpoint(checkpoint, dictionary, folder / "run")
    return folder / "run"


def import_and_dump_settings(fairseq_model: FairseqModel, folder: Path, **entries: Any) -> dict[str, Any]:
    """Import a model, and return the settings of its run."""
    run_folder = import_model(fairseq_model, folder, **entries)
    return open_run(run_folder).experiment.model_dump()


def compute_log_probs(model: LanguageModel) -> torch.Tensor:
    """Return the log-probabilities of all words after each step of `IDS_BT`, computed by an imported model."""
    hidden_ND = model(IDS_BT).output.flatten(0, 1)
    return model.output.log_probs(hidden_ND).view(*IDS_BT.shape, -1)


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("tied", "tied_projections"), [(True, True), (True, False), (False, False)])
def test_log_probabilities_equal_fairseq(
    tied: bool, tied_projections: bool, joined: bool, final_norm: bool, tmp_path: Path
) -> None:
    fairseq_model = FairseqModel(tied, tied_projections, joined, final_norm)
    expected = fairseq_model.log_probs(IDS_BT)
    model = open_run(import_model(fairseq_model, tmp_path)).model
    assert model.tied == tied
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model.to(dtype)
        log_probs = compute_log_probs(model)
        torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tied_projections", [True, False])
def test_shared_parameters_are_stored_and_counted_once(tied_projections: bool, tmp_path: Path) -> None:
    fairseq_model = FairseqModel(tied_projections=tied_projections)
    buffer_endings = ("version", "_float_tensor")
    parameters = [tensor for name, tensor in fairseq_model.tensors.items() if not name.endswith(buffer_endings)]
    size_by_address = {parameter.data_ptr(): parameter.numel() for parameter in parameters}
    model = open_run(import_model(fairseq_model, tmp_path)).model
    assert sum(model.parameter_counts().values()) == sum(size_by_address.values())


def test_every_word_keeps_its_vector(tmp_path: Path) -> None:
    fairseq_model = FairseqModel()
    trained_run = open_run(import_model(fairseq_model, tmp_path))
    vocabulary = trained_run.vocabulary
    assert vocabulary.words[:4] == ("<s>", "<pad>", "<eos>", "<unk>")
    assert [vocabulary.id_of(word) for word in WORDS] == list(range(4, CUTOFFS[-1]))
    assert vocabulary.counts[4:6] == (100, 99)

    tables = trained_run.model.input.tables()
    for word in (WORDS[0], WORDS[6], WORDS[-1]):
        word_id = vocabulary.id_of(word)
        band = find_band(word_id)
        row = word_id - BAND_STARTS[band]
        expected_vector = fairseq_model[f"embed_tokens.embeddings.{band}.0.weight"][row]
        torch.testing.assert_close(tables[band].weight[row], expected_vector.float())


def test_options_become_settings(tmp_path: Path) -> None:
    settings = import_and_dump_settings(FairseqModel(), tmp_path)
    encoder = settings["encoder"]
    output = settings["output"]
    assert (encoder["layers"], encoder["heads"]) == (LAYERS, 4)
    assert (encoder["dropout"], encoder["dropout_attention"], encoder["dropout_relu"]) == (0.3, 0.1, 0.2)
    assert output["softmax_dropout"] == output["tail_dropout"] == 0.15
    assert settings["input"]["scale"] == DIM**0.5
    assert settings["training"]["steps"] == 6


def test_missing_options_have_fairseqs_defaults(tmp_path: Path) -> None:
    only_required_options = Namespace(decoder_attention_heads=4)
    settings = import_and_dump_settings(FairseqModel(), tmp_path, args=only_required_options)
    assert settings["training"]["steps"] == 1024
    assert settings["encoder"]["dropout"] == 0.1
    assert settings["output"]["tail_dropout"] == 0.0


def test_model_trained_on_sentences_is_scored_by_lines(tmp_path: Path) -> None:
    fairseq_model = FairseqModel()
    options = fairseq_model.arguments | {"sample_break_mode": "eos", "no_scale_embedding": True}
    settings = import_and_dump_settings(fairseq_model, tmp_path, args=Namespace(**options))
    assert settings["evaluation"]["windows"] == {"kind": "lines"}
    assert settings["input"]["scale"] == 1.0


@pytest.mark.parametrize("section_type", [dict, Namespace])
def test_options_in_newer_files_are_read(section_type: Any, tmp_path: Path) -> None:
    fairseq_model = FairseqModel()
    model_options = {**fairseq_model.arguments, "activation_dropout": 0.25}
    task_options = {"tokens_per_sample": model_options.pop("tokens_per_sample")}
    config = {"model": section_type(**model_options), "task": task_options, "common": {"seed": 1}}
    settings = import_and_dump_settings(fairseq_model, tmp_path, args=None, cfg=config)
    assert settings["encoder"]["dropout_relu"] == 0.25
    assert settings["training"]["steps"] == 6


def test_old_and_half_precision_files_are_read(tmp_path: Path) -> None:
    """The published checkpoints have the format of torch before 1.6. Some files have float16 tensors."""
    fairseq_model = FairseqModel(joined=True)
    fairseq_model.tensors = {name: tensor.half() for name, tensor in fairseq_model.tensors.items()}
    checkpoint, dictionary = fairseq_model.save(tmp_path)
    entries = {"model": fairseq_model.tensors, "args": Namespace(**fairseq_model.arguments)}
    torch.save(entries, checkpoint, _use_new_zipfile_serialization=False)
    import_checkpoint(checkpoint, dictionary, tmp_path / "run")
    model = open_run(tmp_path / "run").model.double()
    torch.testing.assert_close(compute_log_probs(model), fairseq_model.log_probs(IDS_BT), rtol=1e-10, atol=1e-10)


def test_training_meters_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early checkpoints contain meters, objects of fairseq's classes that measured the training."""
    meters_module = ModuleType("fairseq.meters")
    meter_class = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    meters_module.AverageMeter = meter_class  # type: ignore[attr-defined]
    meter = meter_class()
    meter.avg = 3.5  # type: ignore[attr-defined]
    fairseq_model = FairseqModel()
    options = Namespace(**fairseq_model.arguments)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
        patch.setitem(sys.modules, "fairseq.meters", meters_module)
        checkpoint, dictionary = fairseq_model.save(
            tmp_path, args=options, extra_state={"train_meters": {"loss": meter}}
        )
    assert import_checkpoint(checkpoint, dictionary, tmp_path / "run").imported


def test_import_is_idempotent_and_another_model_is_rejected(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    checkpoint, dictionary = FairseqModel().save(tmp_path / "files")
    import_checkpoint(checkpoint, dictionary, run_folder)
    manifest = (run_folder / "best" / "MANIFEST.json").read_bytes()
    import_checkpoint(checkpoint, dictionary, run_folder)
    assert (run_folder / "best" / "MANIFEST.json").read_bytes() == manifest

    other_checkpoint, other_dictionary = FairseqModel(seed=1).save(tmp_path / "other_files")
    with pytest.raises(Exception, match=r"holds a run with other settings .*imported\.checkpoint"):
        import_checkpoint(other_checkpoint, other_dictionary, run_folder)


def write_texts(folder: Path) -> Path:
    """Write the three texts of a corpus, and return the folder."""
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text("w3 w0 strange w26\n\nw1\n", encoding="utf-8")
    return folder


def test_text_is_encoded_with_the_dictionary(tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path / "files")
    corpus = CorpusSettings(name=str(write_texts(tmp_path / "text")))
    run = import_checkpoint(checkpoint, dictionary, tmp_path / "run", corpus=corpus)
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
    created_file = tmp_path / "created"
    malicious = Malicious(created_file)
    fairseq_model = FairseqModel()
    options = Namespace(**fairseq_model.arguments)
    with pytest.raises(DataError, match=r"model\.pt contains (posix|os)\.system, .* only tensors"):
        import_model(fairseq_model, tmp_path, args=options, extra_state=malicious)

    plain_pickle = tmp_path / "plain.pkl"
    plain_pickle.write_bytes(pickle.dumps(malicious))
    with pytest.raises(DataError, match=r"plain\.pkl"):
        import_checkpoint(plain_pickle, tmp_path / "files" / "dict.txt", tmp_path / "run")
    assert not created_file.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 torn", bytes(range(256)), b"\x80\x02}."])
def test_file_that_is_not_a_checkpoint_is_rejected(content: bytes, tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    checkpoint.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.pt: not a checkpoint of (torch|fairseq)"):
        import_checkpoint(checkpoint, dictionary, tmp_path / "run")


def test_truncated_or_missing_checkpoint_is_rejected(tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    content = checkpoint.read_bytes()
    for num_bytes in (100, len(content) // 2, len(content) - 10):
        checkpoint.write_bytes(content[:num_bytes])
        with pytest.raises(DataError, match="not a checkpoint of torch, or damaged"):
            import_checkpoint(checkpoint, dictionary, tmp_path / "run")
    with pytest.raises(DataError, match="file not found"):
        import_checkpoint(tmp_path / "gone.pt", dictionary, tmp_path / "run")


@pytest.mark.parametrize(
    ("entries", "message"),
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
def test_unsupported_entries_are_rejected(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    fairseq_model = FairseqModel()
    checkpoint, dictionary = fairseq_model.save(tmp_path)
    torch.save({"model": fairseq_model.tensors, **entries}, checkpoint)
    with pytest.raises(DataError, match=message):
        import_checkpoint(checkpoint, dictionary, tmp_path / "run")


def build_changed_model(changed_tensors: dict[str, torch.Tensor | None]) -> FairseqModel:
    """Return a model with these tensors replaced or added, or removed if None."""
    fairseq_model = FairseqModel()
    for name, tensor in changed_tensors.items():
        fairseq_model.tensors.pop(name, None)
        if tensor is not None:
            fairseq_model.tensors[name] = tensor
    return fairseq_model


@pytest.mark.parametrize(
    ("changed_tensors", "message"),
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
    changed_tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        import_model(build_changed_model(changed_tensors), tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 3\nb 2\n", r"has 6 words including special symbols, but .* has 31 vectors"),
        (b"a 3\nb\n", "line 2: not a dictionary: expected a word and its count, got 'b'"),
        (b"a 3\nb -2\n", "line 2: not a dictionary"),
        (b"a 3\nb " + 5000 * b"9", "line 2: not a dictionary: expected a word and its count, got 'b 999"),
        (b"a 3\na 2\n", "line 2: the word 'a' is repeated"),
        (b"<eos> 3\n", "line 1: the word '<eos>' is repeated or a special symbol"),
        (b"\xff 3\n", "byte 0 is not valid UTF-8"),
        (b"", "line 1: not a dictionary"),
        (None, "is missing"),
    ],
)
def test_invalid_dictionary_is_rejected(content: bytes | None, message: str, tmp_path: Path) -> None:
    checkpoint, dictionary = FairseqModel().save(tmp_path)
    dictionary.unlink()
    if content is not None:
        dictionary.write_bytes(content)
    with pytest.raises(DataError, match=message):
        import_checkpoint(checkpoint, dictionary, tmp_path / "run")
