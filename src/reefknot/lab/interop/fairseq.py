"""Convert adaptive-input language models of fairseq (Baevski & Auli 2019) to run folders.

    reefknot import model.pt --dictionary dict.txt --out RUN

Start with `import_checkpoint`. It reads the files (`fairseq_files.py`), derives the settings of an equivalent model
(`fairseq_layout.py`), builds the model and copies the weights (`copy_weights`). The published models are
adaptive_lm_wiki103.v2 and adaptive_lm_gbw_huge.

An adaptive model has a head for frequent words and tails for rare words. A band is the group of words of the head or of
one tail. Words keep their ids in fairseq's dictionary, because a band is a range of ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.interop.fairseq_files import FairseqCheckpoint, read_checkpoint, read_dictionary
from reefknot.lab.interop.fairseq_layout import EMBEDDINGS, FINAL_NORM, HEAD, LAYERS, TAIL, VERSION, Layout, Options
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

_UNUSED_TENSORS = {
    VERSION,
    "decoder.version",
    "decoder.embed_positions._float_tensor",
    "decoder.embed_positions.weights",
    "decoder.embed_tokens._float_tensor",
    f"{HEAD}._float_tensor",
}
"""Names of tensors that are not copied: version numbers, and sinusoidal positions, which Reefknot's model computes."""


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
    # Read the files, and check that they belong together.
    fairseq_checkpoint = read_checkpoint(checkpoint)
    vocabulary = read_dictionary(dictionary)
    layout = Layout.from_checkpoint(fairseq_checkpoint)
    options = Options.from_checkpoint(fairseq_checkpoint)
    num_vectors = sum(layout.input_bands.sizes)
    if len(vocabulary) != num_vectors:
        raise DataError(
            f"{dictionary} has {len(vocabulary):,} words including special symbols, but {checkpoint} has "
            f"{num_vectors:,} vectors; pass the dictionary that the model was trained with"
        )

    # Build an equivalent model.
    settings = layout.to_settings(options, corpus or CorpusSettings(name="none"), checkpoint)
    experiment = check_experiment(settings, str(checkpoint))
    model = build_model(experiment, vocabulary)
    copy_weights(fairseq_checkpoint, model)

    # Write the run folder.
    corpus_fingerprint = None
    if corpus is not None:
        dataset = open_dataset(corpus, experiment.vocabulary, data=data, notify=notify, words=vocabulary)
        corpus_fingerprint = dataset.fingerprint
    config = {
        "recipe": "imported",
        "row": checkpoint.stem,
        "corpus": corpus_fingerprint,
        "settings": experiment.model_dump(mode="json"),
        "imported": {"program": "fairseq", "checkpoint": _hash_file(checkpoint), "dictionary": _hash_file(dictionary)},
    }
    with RunFolder.open_for_training(out, config) as run:
        vocabulary.save(run.vocabulary_path)
        run.write_environment(capture_environment())
        run.checkpoints.save(
            step=0, weights=named_weights(model), state_tensors={}, state_values={}, fingerprint=config_hash(config)
        )
        run.checkpoints.mark_best(0)
    num_parameters = sum(model.parameter_counts().values())
    notify(f"{out}: {num_parameters:,} parameters, {len(vocabulary):,} words, from {checkpoint}")
    return run


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def copy_weights(checkpoint: FairseqCheckpoint, model: LanguageModel) -> None:
    """Copy the tensors of a checkpoint to the parameters of a model with the same layout.

    Raises:
        DataError: A tensor is missing, has another shape, or belongs to no parameter.
    """
    copied_addresses: set[int] = set()
    uncopied_names = checkpoint.tensors.keys() - _UNUSED_TENSORS
    for name, parameters in _list_assignments(model, checkpoint):
        values = _split_rows(checkpoint, name, parameters)
        for parameter, value in zip(parameters, values, strict=True):
            # A parameter that both ends share is in the file under two names, with equal values.
            address = parameter.data_ptr()
            if address in copied_addresses and not torch.equal(parameter, value.to(parameter.dtype)):
                raise DataError(f"{checkpoint.path}: the ends share {name}, but the file has different values for them")
            parameter.copy_(value)
            copied_addresses.add(address)
        uncopied_names.discard(name)

    if uncopied_names:
        names = ", ".join(sorted(uncopied_names)[:3])
        if len(uncopied_names) > 3:
            names += f" and {len(uncopied_names) - 3} more"
        raise DataError(f"{checkpoint.path}: unsupported architecture: Reefknot's model has no parameters for {names}")


class _Assignment(NamedTuple):
    """A tensor of the checkpoint, and the parameters of the model that get its values."""

    name: str
    """Name of the tensor in the checkpoint."""
    parameters: Sequence[Tensor]
    """The parameters that its rows are copied to, in this order.

    Usually there is one parameter. The untied head is one tensor in fairseq and two parameters in Reefknot.
    """


def _split_rows(checkpoint: FairseqCheckpoint, name: str, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the rows of a tensor for each of its parameters, or raise a DataError if the shapes do not match."""
    tensor = checkpoint.get(name)
    num_rows = [len(parameter) for parameter in parameters]
    expected_shape = (sum(num_rows), *parameters[0].shape[1:])
    if tensor.shape != expected_shape:
        raise DataError(
            f"{checkpoint.path}: the shape of the tensor {name} is {tuple(tensor.shape)}, not {expected_shape}"
        )
    return torch.split(tensor, num_rows)


def _list_assignments(model: LanguageModel, checkpoint: FairseqCheckpoint) -> Iterator[_Assignment]:
    """Yield the assignments of tensors to parameters.

    A parameter that the input end (embedding) and the output end (classifier and loss) share is yielded under the names
    that it has at both ends.
    """
    input_end = cast(AdaptiveLookup, model.input)
    encoder = cast(Transformer, model.encoder)
    output_end = cast(AdaptiveSoftmax, model.output)

    for band, table in enumerate(input_end.tables()):
        yield _Assignment(f"{EMBEDDINGS}.{band}.0.weight", [table.weight])
        yield _Assignment(f"{EMBEDDINGS}.{band}.1.weight", [input_end.projections.bands[band]])
    for index, block in enumerate(encoder.blocks):
        yield from _list_block_assignments(cast(Block, block), f"{LAYERS}.{index}", checkpoint)
    if encoder.final_norm is not None:
        for parameter_name, parameter in encoder.final_norm.named_parameters():
            yield _Assignment(f"{FINAL_NORM}.{parameter_name}", [parameter])
    yield from _list_output_assignments(input_end, output_end, is_tied=model.tied)


def _list_block_assignments(block: Block, block_name: str, checkpoint: FairseqCheckpoint) -> Iterator[_Assignment]:
    """Yield the assignments of one transformer block, whose tensors have `block_name` as their prefix in fairseq."""
    layers = {
        "self_attn_layer_norm": block.attention_norm,
        "self_attn.out_proj": block.attention_out,
        "final_layer_norm": block.ffn_norm,
        "fc1": block.ffn_in,
        "fc2": block.ffn_out,
    }
    for layer_name, layer in layers.items():
        for parameter_name, parameter in layer.named_parameters():
            yield _Assignment(f"{block_name}.{layer_name}.{parameter_name}", [parameter])

    # Older files have one layer for queries, keys and values, like Reefknot. Newer files have three layers.
    for parameter_name, parameter in block.attention_in.named_parameters():
        joint_name = f"{block_name}.self_attn.in_proj_{parameter_name}"
        if joint_name in checkpoint.tensors:
            yield _Assignment(joint_name, [parameter])
        else:
            for letter, rows in zip("qkv", parameter.chunk(3), strict=True):
                yield _Assignment(f"{block_name}.self_attn.{letter}_proj.{parameter_name}", [rows])


def _list_output_assignments(
    input_end: AdaptiveLookup, output_end: AdaptiveSoftmax, *, is_tied: bool
) -> Iterator[_Assignment]:
    """Yield the assignments of the adaptive softmax: the head, then the tails.

    The head has one class vector for each frequent word and one class vector for each tail, its cluster vector.
    """
    head_table, *tail_tables = output_end.tables()
    clusters = cast(Tensor, output_end.clusters)
    if is_tied:
        yield _Assignment(f"{HEAD}.word_proj.weight", [head_table.weight])
        yield _Assignment(f"{HEAD}.class_proj.weight", [clusters])
    else:
        yield _Assignment(f"{HEAD}.weight", [head_table.weight, clusters])

    has_shared_projections = output_end.projections is input_end.projections
    for tail, table in enumerate(tail_tables):
        # In fairseq, a separate projection of the output maps from the hidden state to the band. In Reefknot, it maps
        # from the band to the hidden state, like a projection of the input.
        if has_shared_projections:
            projection = input_end.projections.bands[tail + 1]  # the first band is the head
        else:
            projection = output_end.projections.bands[tail].T
        yield _Assignment(f"{TAIL}.{tail}.0.weight", [projection])
        yield _Assignment(f"{TAIL}.{tail}.2.weight", [table.weight])
