"""Adaptive-input language models that fairseq has trained (Baevski & Auli 2019), as run folders.

    reefknot import model.pt --dictionary dict.txt --out RUN

The published ones are adaptive_lm_wiki103.v2 and adaptive_lm_gbw_huge. Ids stay fairseq's, because its bands are ranges
of them; so every word keeps its vector.
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
from reefknot.lab.runs.environment import capture
from reefknot.lab.runs.folder import RunFolder, config_hash
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.training.state import weights
from reefknot.nn.encoders.transformer import Block, Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.storage.progress import Say, silent

Place = tuple[str, Sequence[Tensor]]
"""The name of a tensor, and the parameters that its rows go to, one after the other."""

_UNUSED = {
    VERSION,
    "decoder.version",
    "decoder.embed_positions._float_tensor",
    "decoder.embed_positions.weights",
    "decoder.embed_tokens._float_tensor",
    f"{HEAD}._float_tensor",
}
"""Marks of the program, and sines, which are computed."""


def import_checkpoint(
    checkpoint: Path,
    dictionary: Path,
    out: Path,
    *,
    corpus: CorpusSettings | None = None,
    data: Path | None = None,
    say: Say = silent,
) -> RunFolder:
    """Make a run folder of a checkpoint; with a corpus, one that can be evaluated on it.

    The same command again changes nothing, or goes on where it was stopped.
    """
    found, vocabulary = read_checkpoint(checkpoint), read_dictionary(dictionary)
    layout, options = Layout.of(found), Options.of(found)
    rows = sum(layout.words.sizes)
    if len(vocabulary) != rows:
        raise DataError(
            f"{dictionary} has {len(vocabulary):,} words, the special ones included, but {checkpoint} has vectors for "
            f"{rows:,}: it is the dictionary of another model"
        )
    settings = layout.settings(options, corpus or CorpusSettings(name="none"), checkpoint)
    experiment = check_experiment(settings, str(checkpoint))
    model = build_model(experiment, vocabulary)
    fill(model, found)
    fingerprint = None
    if corpus is not None:
        fingerprint = open_dataset(corpus, experiment.vocabulary, data=data, say=say, words=vocabulary).fingerprint
    config = {
        "recipe": "imported",
        "row": checkpoint.stem,
        "corpus": fingerprint,
        "settings": experiment.model_dump(mode="json"),
        "imported": {"program": "fairseq", "checkpoint": _sha256(checkpoint), "dictionary": _sha256(dictionary)},
    }
    with RunFolder.open_for_training(out, config) as run:
        vocabulary.save(run.vocabulary_path)
        run.write_environment(capture())
        run.checkpoints.save(0, weights(model), {}, {}, fingerprint=config_hash(config))
        run.checkpoints.mark_best(0)
    total = sum(model.parameter_counts().values())
    say(f"{out}: {total:,} parameters, {len(vocabulary):,} words, from {checkpoint}")
    return run


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@torch.no_grad()
def fill(model: LanguageModel, checkpoint: FairseqCheckpoint) -> None:
    """Give the parameters of a model, which has the layout of the checkpoint, the numbers in it."""
    filled: set[int] = set()
    left = checkpoint.tensors.keys() - _UNUSED
    for name, parameters in _places(model, checkpoint):
        tensor = checkpoint.get(name)
        shape = (sum(map(len, parameters)), *parameters[0].shape[1:])
        if tensor.shape != shape:
            raise DataError(f"{checkpoint.path}: the tensor {name} is {tuple(tensor.shape)}, where {shape} fits")
        parts = torch.split(tensor, [len(each) for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            where = parameter.data_ptr()
            if where in filled and not torch.equal(parameter, part.to(parameter.dtype)):
                raise DataError(f"{checkpoint.path}: the ends share {name}, but it is not the same at both")
            parameter.copy_(part)
            filled.add(where)
        left.discard(name)
    if left:
        names, more = ", ".join(sorted(left)[:3]), f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise DataError(f"{checkpoint.path}: another architecture: there is no place here for {names}{more}")


def _places(model: LanguageModel, checkpoint: FairseqCheckpoint) -> Iterator[Place]:
    """Where every tensor goes. What the ends share has two names, and comes twice."""
    source, output = cast(AdaptiveLookup, model.input), cast(AdaptiveSoftmax, model.output)
    encoder = cast(Transformer, model.encoder)
    for band, table in enumerate(source.tables()):
        yield f"{WORDS}.{band}.0.weight", [table.weight]
        yield f"{WORDS}.{band}.1.weight", [source.projections.bands[band]]
    for number, block in enumerate(encoder.blocks):
        yield from _block_places(cast(Block, block), f"{LAYERS}.{number}", checkpoint)
    if encoder.final_norm is not None:
        yield from ((f"{LAST_NORM}.{name}", [each]) for name, each in encoder.final_norm.named_parameters())
    head, *tails = output.tables()
    clusters = cast(Tensor, output.clusters)
    if model.tied:
        yield f"{HEAD}.word_proj.weight", [head.weight]
        yield f"{HEAD}.class_proj.weight", [clusters]
    else:
        yield f"{HEAD}.weight", [head.weight, clusters]
    own = output.projections is not source.projections
    for number, table in enumerate(tails):
        # A projection of its own is a layer that maps down; ours maps up, as that of the input does.
        matrix = output.projections.bands[number].T if own else source.projections.bands[number + 1]
        yield f"{TAIL}.{number}.0.weight", [matrix]
        yield f"{TAIL}.{number}.2.weight", [table.weight]


def _block_places(block: Block, name: str, checkpoint: FairseqCheckpoint) -> Iterator[Place]:
    layers = {
        "self_attn_layer_norm": block.attention_norm,
        "self_attn.out_proj": block.attention_out,
        "final_layer_norm": block.ffn_norm,
        "fc1": block.ffn_in,
        "fc2": block.ffn_out,
    }
    for theirs, layer in layers.items():
        yield from ((f"{name}.{theirs}.{kind}", [each]) for kind, each in layer.named_parameters())
    for kind, each in block.attention_in.named_parameters():
        joined = f"{name}.self_attn.in_proj_{kind}"  # queries, keys and values: one layer in older files, else three
        if joined in checkpoint.tensors:
            yield joined, [each]
        else:
            yield from (
                (f"{name}.self_attn.{part}_proj.{kind}", [rows])
                for part, rows in zip("qkv", each.chunk(3), strict=True)
            )
