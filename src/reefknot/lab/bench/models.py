"""Measure training steps of Hugging Face models with several heads: `reefknot bench models`.

`measure_model` yields one row per model and competitor: transformers as it is, `rk.hf.logits_free`, Liger with its loss
alone and with all of its patches, and TRL's head.

The models have the shapes of published models and random weights, so nothing is downloaded. A step is the forward pass,
the loss and the backward pass with the gradients of all parameters. There is no optimiser and no gradient
checkpointing. Every competitor runs in its own process: a patch of one library cannot reach another competitor, and
the peak memory is the competitor's own.

The loss and two gradients are compared with those of the same model as it is, in float32. The row of transformers
shows how large these differences are for the data type alone.

Shapes: B sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reefknot.extras import import_extra
from reefknot.kernels.choice import using
from reefknot.lab.bench.measure import (
    MIB,
    OUT_OF_MEMORY,
    Measurement,
    Step,
    Unavailable,
    check_gradients,
    describe_error,
    describe_versions,
    divide,
    free_gpu_memory,
    measure_working_memory,
    time_steps,
)
from reefknot.lab.bench.packages import import_module

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4_864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-2-2b": (
        "Gemma2Config",
        {
            "vocab_size": 256_000,
            "hidden_size": 2_304,
            "intermediate_size": 9_216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4_096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "Qwen2Config",
        {
            "vocab_size": 512,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}
"""The models: a configuration class of transformers and its settings."""
DEFAULT_MODELS = {"cuda": ("qwen2.5-0.5b", "gemma-2-2b"), "cpu": ("tiny",)}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""The data type of weights and gradients."""
BASELINE = "transformers"
PACKAGES = ("transformers", "liger-kernel", "trl")
"""Packages whose versions are recorded."""
SEED = 11
"""The seed of weights and tokens."""
COMPARED_ROWS = 16
"""Of the gradient of the embedding, every row whose index is divisible by this number is compared."""


class Competitor(NamedTuple):
    """A way to compute the loss of a model."""

    family: str
    """A key of `FAMILIES`."""
    memory: float | None = None
    """Working memory of reefknot in MiB. None is the default."""

    def __str__(self) -> str:
        return self.family if self.memory is None else f"{self.family}, {self.memory:g} MiB"


@dataclass(frozen=True)
class Bench:
    """The settings of the benchmark."""

    device: str
    batch: int = 8
    length: int = 2048
    layers: int | None = None
    """Number of layers. None is the number that the model has."""
    attention: str | None = None
    """Implementation of attention, by its name in transformers. None is the default of transformers."""
    largest: int | None = None
    """Search for the largest batch that fits in memory, up to this number. None does not search."""
    seconds: float = 5.0
    """Duration of the timing, per competitor."""


@dataclass(frozen=True)
class Row(Measurement):
    """The measurements of a competitor for one model. `errors` are those of two gradients."""

    model: str
    batch: int
    length: int
    layers: int | None = None
    parameters: int | None = None
    attention: str | None = None
    """The implementation of attention."""
    tokens_per_second: float | None = None
    over_baseline: float | None = None
    """Tokens per second, divided by those of transformers as it is."""
    peak_mib: float | None = None
    """Peak memory of a step, with weights and gradients. Measured on a GPU only."""
    over_mib: float | None = None
    """Peak memory without weights and gradients."""
    largest_batch: int | None = None
    """The largest batch whose step fits in memory."""
    loss: float | None = None
    loss_error: float | None = None
    """Relative difference from the loss in float32."""

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self) | {"worst_error": self.worst_error}


def measure_model(
    bench: Bench, model: str, competitors: Sequence[Competitor], notify: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the rows of a model, the baseline first. Competitors run one after the other, each in a new process."""
    notify(model)
    baseline_speed = None
    for competitor in sorted(competitors, key=lambda competitor: competitor.family != BASELINE):
        notify(f"  {competitor}")
        row = _measure_in_process(bench, model, competitor)
        if competitor.family == BASELINE:
            baseline_speed = row.tokens_per_second
        yield replace(row, over_baseline=divide(row.tokens_per_second, baseline_speed))


def describe_machine(device: str) -> dict[str, Any]:
    """Return the versions and the data type that the measurements depend on."""
    return {**describe_versions(PACKAGES), "dtype": str(DTYPES[device]).removeprefix("torch.")}


def _measure_in_process(bench: Bench, model: str, competitor: Competitor) -> Row:
    """Measure a competitor in a new process, and return its row.

    The process is forked from one that has imported transformers but has never used the GPU, which saves start-up time.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.modeling_utils", "transformers.models.auto.modeling_auto"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(measure_competitor, bench, model, competitor).result()
        except BrokenProcessPool:
            note = "its process was killed, perhaps because the machine has too little memory"
            return Row(model, bench.batch, bench.length, competitor=str(competitor), note=note)


# -- one competitor --------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """Loss and gradients of a model as it is, in float32."""

    loss: float
    gradients: dict[str, Tensor]


def measure_competitor(bench: Bench, model_name: str, competitor: Competitor) -> Row:
    """Measure a competitor in this process. Patches of its library stay in effect."""
    row = Row(model_name, bench.batch, bench.length, competitor=str(competitor))
    try:
        patch = FAMILIES[competitor.family](bench.device)
        reference = compute_reference(bench, model_name)
        if bench.device == "cuda":
            free_gpu_memory()
        model = build_model(bench, model_name)
        row = replace(
            row,
            layers=model.config.num_hidden_layers,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            attention=model.config._attn_implementation,
        )
        compute_loss = patch(model)
    except Exception as error:  # the other competitors are still measured
        return replace(row, note=describe_error(error))

    build = partial(build_step, model, compute_loss, bench, competitor.memory)
    notes = []
    try:
        row = _measure_step(row, build(bench.batch), reference, bench)
    except Exception as error:
        notes.append(f"{describe_error(error)} with {bench.batch} sequences")
    if bench.largest:
        try:
            estimate = _estimate_largest_batch(row)
            largest_batch = find_largest_batch(partial(_fits, build), estimate, bench.largest)
            row = replace(row, largest_batch=largest_batch)
            notes += [f"the largest batch has {largest_batch}"] if notes else []
        except Exception as error:
            notes.append(f"no largest batch: {describe_error(error)}")
    return replace(row, note="; ".join(notes))


def _measure_step(row: Row, step: Step, reference: Reference, bench: Bench) -> Row:
    """Return the row with the errors, the memory and the time of a step."""
    loss = float(step.run())  # also compiles kernels, whose memory does not count
    row = check_gradients(row, step, reference.gradients)
    over_bytes = measure_working_memory(step, bench.device)
    peak_bytes = torch.cuda.max_memory_allocated() if bench.device == "cuda" else None
    (milliseconds,) = time_steps([step], bench.device, bench.seconds)
    ms = median(milliseconds)
    return replace(
        row,
        ms=ms,
        repeats=len(milliseconds),
        tokens_per_second=1e3 * bench.batch * bench.length / ms,
        peak_mib=divide(peak_bytes, MIB),
        over_mib=over_bytes / MIB,
        loss=loss,
        loss_error=abs(loss - reference.loss) / reference.loss,
    )


def build_model(bench: Bench, name: str) -> Any:
    """Build a model of transformers with random weights. Equal calls give equal weights."""
    transformers = import_extra("transformers", "reefknot bench models")
    config_class, settings = PRESETS[name]
    if bench.layers is not None:
        settings = settings | {"num_hidden_layers": bench.layers}
    config = getattr(transformers, config_class)(**settings, use_cache=False)
    attention = {"attn_implementation": bench.attention} if bench.attention else {}
    torch.manual_seed(SEED)
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[bench.device], **attention)
    return model.train()


def make_tokens(vocab_size: int, batch: int, length: int) -> Tensor:
    """Return random tokens. They are the targets, too."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def compute_reference(bench: Bench, name: str) -> Reference:
    """Compute loss and gradients of a model in float32, one sequence at a time.

    The model is built and freed here, so that the memory of the competitor is as without a reference.
    """
    model = build_model(bench, name)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()  # the buffers are in float32 already
    tokens_BT = make_tokens(model.config.vocab_size, bench.batch, bench.length).to(bench.device)
    loss = 0.0
    for tokens_1T in tokens_BT[:, None]:
        sequence_loss = _call_model(model, tokens_1T) / bench.batch
        torch.autograd.backward(sequence_loss)
        loss += float(sequence_loss.detach())
    gradients = {gradient_name: gradient.double() for gradient_name, gradient in _compared_gradients(model).items()}
    return Reference(loss, gradients)


def _compared_gradients(model: Any) -> dict[str, Tensor]:
    """Return two gradients on the CPU: of the tied embedding, and of the first layer's queries."""
    embedding = model.get_input_embeddings().weight
    queries = model.get_decoder().layers[0].self_attn.q_proj.weight
    return {"embedding": embedding.grad[::COMPARED_ROWS].cpu(), "first layer": queries.grad.cpu()}


def build_step(
    model: Any, compute_loss: Callable[[Tensor], Tensor], bench: Bench, memory: float | None, batch: int
) -> Step:
    """Return a step of the model: forward pass, loss and backward pass."""
    tokens_BT = make_tokens(model.config.vocab_size, batch, bench.length).to(bench.device)
    return Step(
        compute_loss=partial(compute_loss, tokens_BT),
        leaves=list(model.parameters()),
        get_gradients=lambda: dict(_compared_gradients(model)),
        context=partial(using, memory=memory),
    )


# -- the largest batch -----------------------------------------------------------------------------------------------


def find_largest_batch(fits: Callable[[int], bool], estimate: int, maximum: int) -> int:
    """Return the largest batch that fits, or a batch that is less than 1/8 smaller; 0 if not even 1 fits.

    Args:
        fits: Returns whether a batch fits in memory.
        estimate: The batch to try first. If it is about right, a few trials are enough.
        maximum: The largest batch to try.
    """
    largest, too_large = 0, maximum + 1
    batch = min(estimate, maximum)
    factor = 9 / 8  # of the next trial; it grows while the answer is far from the estimate
    while too_large - largest > max(1, largest // 8):
        if fits(batch):
            largest = batch
            batch = max(batch + 1, int(batch * factor))
        else:
            too_large = batch
            batch = min(batch - 1, int(batch / factor))
        factor *= factor
        if not largest < batch < too_large:
            batch = (largest + too_large) // 2
    return largest


def _estimate_largest_batch(row: Row) -> int:
    """Return the batch that fills the memory of the GPU if the memory of a step is proportional to its batch."""
    if row.peak_mib is None or not row.over_mib:
        return max(1, row.batch // 2)
    total_mib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / MIB
    return max(1, int(row.batch * (total_mib - row.peak_mib + row.over_mib) / row.over_mib))


def _fits(build: Callable[[int], Step], batch: int) -> bool:
    """Return whether a step with this batch fits in the memory of the GPU."""
    step = build(batch)
    step.zero_grad()
    free_gpu_memory()
    try:
        step.run()
    except Exception as error:
        if describe_error(error) != OUT_OF_MEMORY:
            raise
        return False
    finally:
        step.zero_grad()
    return True


# -- competitors -----------------------------------------------------------------------------------------------------

LossFunction = Callable[[Tensor], Tensor]
"""Computes the mean loss of tokens (B, T)."""
Patch = Callable[[Any], LossFunction]
"""Changes a model, and returns the function that computes its loss."""


def _call_model(model: Any, tokens_BT: Tensor, **arguments: Any) -> Tensor:
    """Return the loss that a model computes."""
    loss: Tensor = model(input_ids=tokens_BT, labels=tokens_BT, **arguments).loss
    return loss


def _load_transformers(device: str) -> Patch:
    """Use the model as it is."""
    return lambda model: partial(_call_model, model)


def _load_reefknot(device: str) -> Patch:
    """Use `rk.hf.logits_free`, for small logits too."""
    from reefknot.hf import logits_free

    def patch(model: Any) -> LossFunction:
        logits_free(model, min_logits=0)
        return partial(_call_model, model)

    return patch


def _load_liger(device: str, loss_alone: bool) -> Patch:
    """Use Liger's patches of the model's class: its fused loss alone, or those that are on by default."""
    liger = import_module("liger_kernel.transformers")
    if device != "cuda":
        raise Unavailable("needs a GPU")

    def patch(model: Any) -> LossFunction:
        apply_patches = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
        switches: dict[str, bool] = {}
        if loss_alone:
            names = [name for name in signature(apply_patches).parameters if name != "model"]
            switches = {name: name == "fused_linear_cross_entropy" for name in names}
        apply_patches(**switches, model=model)
        return partial(_call_model, model)

    return patch


def _load_trl(device: str) -> Patch:
    """Use TRL's head with its default output, the loss. Its `SFTTrainer` also computes entropies and accuracies."""
    trl = import_module("trl.trainer.utils")
    if not hasattr(trl, "add_fused_lm_head"):
        raise Unavailable("this release does not have add_fused_lm_head; TRL 1.16 has it")

    def patch(model: Any) -> LossFunction:
        trl.add_fused_lm_head(model)
        return partial(_call_model, model, fused_lm_head=True)

    return patch


FAMILIES: dict[str, Callable[[str], Patch]] = {
    BASELINE: _load_transformers,
    "reefknot": _load_reefknot,
    "liger-loss": partial(_load_liger, loss_alone=True),
    "liger": partial(_load_liger, loss_alone=False),
    "trl": _load_trl,
}
"""The competitors. Each function imports a library for a device and returns its patch, or raises `Unavailable`."""
