"""Convert adaptive-input language models of fairseq (Baevski & Auli 2019) to run folders.

    reefknot import model.pt --dictionary dict.txt --out RUN

The published models are adaptive_lm_wiki103.v2 and adaptive_lm_gbw_huge. Words keep their ids in fairseq's dictionary,
because bands are ranges of ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.interop.fairseq_files import FairseqCheckpoint, read_checkpoint, read_dictionary
from reefknot.lab.interop.fairseq_layout import HEAD, LAST_NORM, LAYERS, TAIL, VERSION, WORDS, Layout, Options
from reefknot.lab.runs.environment import capture_environment
from reefknot.lab.runs.folder import RunFolder, config_hash
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.training.state import named_weights
from reefknot.nn.encoders.transformer import Block, Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.storage.progress import Notify, silent

Assignment = tuple[str, Sequence[Tensor]]
"""The name of a tensor in the checkpoint, and the parameters that its rows are copied to, in this order."""

_UNUSED = {
    VERSION,
    "decoder.version",
    "decoder.embed_positions._float_tensor",
    "decoder.embed_positions.weights",
    "decoder.embed_tokens._float_tensor",
    f"{HEAD}._float_tensor",
}
"""Tensors that are not copied: version numbers, and sinusoidal positions, which our model computes."""


def import_checkpoint(
    checkpoint: Path,
    dictionary: Path,
    out: Path,
    *,
    corpus: CorpusSettings | None = None,
    data: Path | None = None,
    notify: Notify = silent,
) -> RunFolder:
    """Create a run folder from a checkpoint of fairseq.

    Repeating an import completes it if it was interrupted, and changes nothing otherwise.

    Args:
        checkpoint: The file model.pt.
        dictionary: The file dict.txt that the model was trained with.
        out: The run folder to create.
        corpus: A text that the run can be evaluated on. Without it, the run has no text.
        data: The folder of the corpora.
        notify: Called with lines about progress and a summary.
    """
    source, vocabulary = read_checkpoint(checkpoint), read_dictionary(dictionary)
    layout, options = Layout.from_checkpoint(source), Options.from_checkpoint(source)
    rows = sum(layout.words.sizes)
    if len(vocabulary) != rows:
        raise DataError(
            f"{dictionary} has {len(vocabulary):,} words including special symbols, but {checkpoint} has {rows:,} "
            "vectors; pass the dictionary that the model was trained with"
        )
    settings = layout.settings(options, corpus or CorpusSettings(name="none"), checkpoint)
    experiment = check_experiment(settings, str(checkpoint))
    model = build_model(experiment, vocabulary)
    copy_weights(source, model)
    fingerprint = None
    if corpus is not None:
        fingerprint = open_dataset(
            corpus, experiment.vocabulary, data=data, notify=notify, words=vocabulary
        ).fingerprint
    config = {
        "recipe": "imported",
        "row": checkpoint.stem,
        "corpus": fingerprint,
        "settings": experiment.model_dump(mode="json"),
        "imported": {"program": "fairseq", "checkpoint": _sha256(checkpoint), "dictionary": _sha256(dictionary)},
    }
    with RunFolder.open_for_training(out, config) as run:
        vocabulary.save(run.vocabulary_path)
        run.write_environment(capture_environment())
        run.checkpoints.save(0, named_weights(model), {}, {}, fingerprint=config_hash(config))
        run.checkpoints.mark_best(0)
    total = sum(model.parameter_counts().values())
    notify(f"{out}: {total:,} parameters, {len(vocabulary):,} words, from {checkpoint}")
    return run


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@torch.no_grad()
def copy_weights(checkpoint: FairseqCheckpoint, model: LanguageModel) -> None:
    """Copy the tensors of a checkpoint to the parameters of a model with the same layout."""
    copied: set[int] = set()
    remaining = checkpoint.tensors.keys() - _UNUSED
    for name, parameters in _assignments(model, checkpoint):
        tensor = checkpoint.get(name)
        shape = (sum(map(len, parameters)), *parameters[0].shape[1:])
        if tensor.shape != shape:
            raise DataError(f"{checkpoint.path}: the shape of the tensor {name} is {tuple(tensor.shape)}, not {shape}")
        parts = torch.split(tensor, [len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            address = parameter.data_ptr()
            if address in copied and not torch.equal(parameter, part.to(parameter.dtype)):
                raise DataError(f"{checkpoint.path}: the ends share {name}, but the file has different values for them")
            parameter.copy_(part)
            copied.add(address)
        remaining.discard(name)
    if remaining:
        names, more = ", ".join(sorted(remaining)[:3]), f" and {len(remaining) - 3} more" if len(remaining) > 3 else ""
        raise DataError(
            f"{checkpoint.path}: unsupported architecture: Reefknot's model has no parameters for {names}{more}"
        )


def _assignments(model: LanguageModel, checkpoint: FairseqCheckpoint) -> Iterator[Assignment]:
    """Yield the assignments of tensors to parameters. A parameter that the ends share is yielded under both names."""
    source, output = cast(AdaptiveLookup, model.input), cast(AdaptiveSoftmax, model.output)
    encoder = cast(Transformer, model.encoder)
    for band, table in enumerate(source.tables()):
        yield f"{WORDS}.{band}.0.weight", [table.weight]
        yield f"{WORDS}.{band}.1.weight", [source.projections.bands[band]]
    for number, block in enumerate(encoder.blocks):
        yield from _block_assignments(cast(Block, block), f"{LAYERS}.{number}", checkpoint)
    if encoder.final_norm is not None:
        yield from ((f"{LAST_NORM}.{name}", [parameter]) for name, parameter in encoder.final_norm.named_parameters())
    head, *tails = output.tables()
    clusters = cast(Tensor, output.clusters)
    if model.tied:
        yield f"{HEAD}.word_proj.weight", [head.weight]
        yield f"{HEAD}.class_proj.weight", [clusters]
    else:
        yield f"{HEAD}.weight", [head.weight, clusters]
    shared = output.projections is source.projections
    for number, table in enumerate(tails):
        # A separate projection of the output maps from the hidden state to the band in fairseq. Ours maps from the band
        # to the hidden state, like a projection of the input.
        matrix = source.projections.bands[number + 1] if shared else output.projections.bands[number].T
        yield f"{TAIL}.{number}.0.weight", [matrix]
        yield f"{TAIL}.{number}.2.weight", [table.weight]


def _block_assignments(block: Block, name: str, checkpoint: FairseqCheckpoint) -> Iterator[Assignment]:
    layers = {
        "self_attn_layer_norm": block.attention_norm,
        "self_attn.out_proj": block.attention_out,
        "final_layer_norm": block.ffn_norm,
        "fc1": block.ffn_in,
        "fc2": block.ffn_out,
    }
    for layer_name, layer in layers.items():
        yield from ((f"{name}.{layer_name}.{kind}", [parameter]) for kind, parameter in layer.named_parameters())
    for kind, parameter in block.attention_in.named_parameters():
        joined = (
            f"{name}.self_attn.in_proj_{kind}"  # older files have one layer for queries, keys and values, not three
        )
        if joined in checkpoint.tensors:
            yield joined, [parameter]
        else:
            yield from (
                (f"{name}.self_attn.{part}_proj.{kind}", [rows])
                for part, rows in zip("qkv", parameter.chunk(3), strict=True)
            )
