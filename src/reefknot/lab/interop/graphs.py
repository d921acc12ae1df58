"""Export a language model as a graph of plain operators: ONNX, or a program of `torch.export`.

    FOLDER/model.onnx or model.pt2    the graph with its weights
    FOLDER/vocabulary.json            the words, in the order of their ids (and tokenizer.json for sub-words)
    FOLDER/README.md                  the model card

The graph is an `rk.Scorer`: its kinds are the inputs and outputs of the graph. The state of a step has one input and
one output per tensor: `state.h` and `next_state.h`, for example.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reefknot.errors import DataError
from reefknot.lab.interop.model_card import write_card
from reefknot.lab.interop.tokenizer import build_tokenizer
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.nn.models.scorer import Scorer, ScorerKind
from reefknot.storage.progress import Notify, silent

MAX_DIFFERENCE = 1e-4
"""Largest difference between the log-probabilities of ONNX Runtime and of torch that an export accepts."""
_CHECKED_STREAMS = 2
"""Number of streams with which an exported graph is checked. The export itself uses another number."""
_OUTPUT_NAMES = {"log_probs": ["log_probs"], "targets": ["log_probs"], "topk": ["log_probs", "ids"]}


def export_graph(
    trained: TrainedRun[Any, Any, Any], folder: Path, format: str, kind: str | None, k: int, notify: Notify = silent
) -> dict[str, Any]:
    """Write a language model into an existing folder. Return more about the graph, by name.

    Args:
        trained: The run of a language model.
        folder: The folder to write into.
        format: `onnx` or `pt2`.
        kind: Kind of the scorer. By default `step` for recurrent encoders and `log_probs` for transformers.
        k: Number of best words, for the kind `topk`.
        notify: Called with messages about progress.
    """
    if kind is None:
        kind = "step" if trained.model.encoder.carries_state else "log_probs"
    scorer = Scorer(trained.model, cast(ScorerKind, kind), k)
    input_names, output_names = _name_tensors(scorer)
    notify(f"exporting the graph ({kind})")
    details: dict[str, Any] = {"kind": kind}
    with _without_warnings():
        program = torch.export.export(scorer, scorer.example_inputs(), dynamic_shapes=scorer.dynamic_shapes())
        if format == "pt2":
            torch.export.save(program, folder / "model.pt2")
        else:
            notify("converting it to ONNX")
            _write_onnx(program, folder / "model.onnx", input_names, output_names)
            details["difference"] = _compare_with_torch(scorer, folder / "model.onnx", input_names)
    if not trained.vocabulary.has_exact_tokenizer:
        notify(
            f"{folder}: no tokenizer is written, because the sub-words of this vocabulary are restricted (bpe with "
            "min_count or max_size); encode texts with Reefknot"
        )
    elif trained.vocabulary.bpe is not None:
        # The run's tokenizer.json has other ids.
        build_tokenizer(trained.vocabulary).save(str(folder / "tokenizer.json"))
    replace(trained.vocabulary, bpe=None, split_words=None).save(folder / "vocabulary.json")
    write_card(trained, folder, _describe_graph(format, kind, input_names, output_names))
    return details


def _name_tensors(scorer: Scorer) -> tuple[list[str], list[str]]:
    """Return the names of the graph's inputs and outputs."""
    if scorer.kind == "step":
        names = list(scorer.initial_state(1))
        inputs = ["tokens", *(f"state.{name}" for name in names)]
        return inputs, ["log_probs", *(f"next_state.{name}" for name in names)]
    inputs = ["tokens", "targets"] if scorer.kind == "targets" else ["tokens"]
    return inputs, _OUTPUT_NAMES[scorer.kind]


def _write_onnx(program: Any, path: Path, input_names: list[str], output_names: list[str]) -> None:
    """Convert an exported program to ONNX. Every weight is stored once."""
    import onnx

    # The optimiser would store transposed copies of tied tables. ONNX Runtime optimises the graph when it loads it.
    converted = torch.onnx.export(
        program, input_names=input_names, output_names=output_names, optimize=False, verbose=False
    )
    assert converted is not None
    model = converted.model_proto
    # Metadata such as stack traces would name the files of this machine.
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    _name_dimensions(model.graph, input_names)
    onnx.save(model, path)


def _name_dimensions(graph: Any, input_names: list[str]) -> None:
    """Give the dynamic dimensions readable names: streams, steps and cached_steps."""
    names: dict[str, str] = {}
    for value in graph.input:
        dimensions = [dimension.dim_param for dimension in value.type.tensor_type.shape.dim]
        if value.name in ("tokens", "targets"):
            readable = ["streams", "steps"]
        else:
            readable = ["layers", "streams", "heads", "cached_steps", "head_dim"]
        names |= {old: new for old, new in zip(dimensions, readable, strict=False) if old}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in names:
                dimension.dim_param = names[dimension.dim_param]


def _compare_with_torch(scorer: Scorer, path: Path, input_names: list[str]) -> float:
    """Run the graph in ONNX Runtime. Return its largest difference from torch; raise an error if it is too large."""
    import onnxruntime

    inputs = scorer.example_inputs(_CHECKED_STREAMS, steps=5 if scorer.model.encoder.carries_state else 7)
    with torch.no_grad():
        expected: list[Tensor] = tree_leaves(scorer(*inputs))
    session = onnxruntime.InferenceSession(path)
    feeds = {name: tensor.numpy() for name, tensor in zip(input_names, tree_leaves(inputs), strict=True)}
    actual = session.run(None, feeds)
    differences = [
        float((torch.from_numpy(array) - tensor).abs().max())
        for array, tensor in zip(actual, expected, strict=True)
        if tensor.is_floating_point()
    ]
    difference = max(differences)
    if not difference <= MAX_DIFFERENCE:
        raise DataError(f"the ONNX graph differs from the model by {difference:.1g}; use --format pt2")
    return difference


def _describe_graph(format: str, kind: str, input_names: list[str], output_names: list[str]) -> str:
    """Return the part of the model card about the graph."""
    return (
        f"`model.{format}` is a graph of the kind `{kind}`, with the inputs {_quote(input_names)} and the outputs "
        f"{_quote(output_names)}. The position of a word in `vocabulary.json` is its id."
    )


def _quote(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide warnings of the exporters, which are about packages and operators that these graphs do not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
