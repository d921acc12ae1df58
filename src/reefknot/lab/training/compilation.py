"""Compile the blocks of a transformer for training with `torch.compile` (`training.compile`).

    blocks = CompiledBlocks(model, settings, world)     # compiles, if the settings ask for it
    blocks.message                                      # what was done, or why not, for the log
    with blocks.use(inputs_BT.shape):                   # compiled blocks, if the inputs have the usual shape
        loss = model.loss(inputs_BT)
    loss.backward()

All blocks have equal shapes, so one compilation serves all of them. It happens in the constructor, before an update is
captured as a CUDA graph. Only complete micro-batches use compiled blocks. Whether a micro-batch is complete follows
from the settings, so a resumed run uses the same kernels for it. Validation and scoring never use compiled blocks.

Compiled dropout draws a seed from torch's generator of the device and derives its masks from the seed. The masks are
therefore a function of the generator's state, which checkpoints save and CUDA graphs advance. They differ from the
masks of blocks that are not compiled.

Shapes: B rows, T steps, D dimensions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from reefknot.errors import SettingsError, shorten
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import capture_states, restore_states
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.models.language_model import LanguageModel


class CompiledBlocks:
    """The blocks of an encoder, compiled for complete micro-batches if `training.compile` asks for it.

    Names and values of the parameters do not change, because the modules stay the same. `use` replaces only their
    `forward` methods, and only for a while.

    Args:
        model: The model, on its device.
        settings: The training settings.
        world: The processes that train together.
    """

    def __init__(self, model: LanguageModel, settings: TrainingSettings, world: World) -> None:
        self.message = ""
        """What was done, or why the blocks are not compiled although the settings ask for it. Empty if they do not."""
        self.seconds: float | None = None
        """How long compilation took. None if the blocks are not compiled."""
        self._shape = torch.Size((math.ceil(settings.batch / settings.accumulate), settings.steps))
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        if not _is_requested(settings, world):
            return
        obstacle = _find_obstacle(model.encoder, settings, world)
        if obstacle:
            self.message = f"the blocks are not compiled: {obstacle}"
            return
        self._compile(model.encoder, settings, world)

    @contextmanager
    def use(self, shape: torch.Size) -> Iterator[None]:
        """Use the compiled blocks inside the context, if inputs of this shape, (B, T), are a complete micro-batch."""
        if shape != self._shape:
            yield
            return
        for block, forward in self._forwards:
            setattr(block, "forward", forward)  # noqa: B010  (mypy rejects an assignment to a method)
        try:
            yield
        finally:
            for block, _ in self._forwards:
                delattr(block, "forward")

    def _compile(self, encoder: Encoder, settings: TrainingSettings, world: World) -> None:
        """Compile the blocks and measure how long it takes.

        If `torch.compile` fails, the blocks are not compiled. This is an error only if the settings set `compile`.
        """
        started_at = time.monotonic()
        # torch compiles a function for a limited number of shapes. Earlier models of this process must not count.
        torch.compiler.reset()
        for block in _get_blocks(encoder):
            self._forwards.append((block, torch.compile(block.forward, dynamic=False, fullgraph=True)))
        try:
            self._run_once(encoder, settings, world)
        except Exception as error:
            self._forwards = []
            reason = _describe_failure(error)
            if settings.compile:
                raise SettingsError(
                    f"training.compile = true: torch.compile failed on the blocks of the encoder ({reason}); "
                    "use training.compile=false"
                ) from error
            self.message = f"the blocks are not compiled: torch.compile failed ({reason})"
            return
        self.seconds = time.monotonic() - started_at
        self.message = f"compiled the blocks of the encoder in {self.seconds:.1f} s"

    def _run_once(self, encoder: Encoder, settings: TrainingSettings, world: World) -> None:
        """Run the encoder forward and backward on zeros, so that torch compiles now. Random numbers do not change."""
        generator_states = capture_states(world.device)
        was_training = encoder.training
        encoder.train()
        try:
            dtype = next(encoder.parameters()).dtype
            shape_BTD = (*self._shape, encoder.input_dim)
            inputs_BTD = torch.zeros(shape_BTD, dtype=dtype, device=world.device, requires_grad=True)
            state = encoder.initial_state(self._shape[0], world.device)
            with autocast(world.device, settings.precision), self.use(self._shape):
                hidden_BTD = encoder(inputs_BTD, state).output
            trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
            torch.autograd.grad(hidden_BTD.sum(), [inputs_BTD, *trained])
        finally:
            encoder.train(was_training)
            restore_states(generator_states, world.device)
        if world.device.type == "cuda":
            # Captured updates run on another stream, which cannot use the memory that torch has cached for this one.
            del inputs_BTD, hidden_BTD
            torch.cuda.empty_cache()


def _is_requested(settings: TrainingSettings, world: World) -> bool:
    """Return whether the settings ask for compilation. The default is to compile in bfloat16 on a GPU.

    The kernels of a GPU are chosen by trial, so a resumed run may round differently. `exact` therefore excludes them.
    """
    if settings.compile is not None:
        return settings.compile
    return world.device.type == "cuda" and settings.precision == "bfloat16" and settings.determinism != "exact"


def _find_obstacle(encoder: Encoder, settings: TrainingSettings, world: World) -> str:
    """Return the reason why the blocks cannot be compiled, or an empty string."""
    blocks = _get_blocks(encoder)
    if not blocks:
        return f"the encoder {type(encoder).__name__} does not consist of transformer blocks"
    if settings.batching not in ("streams", "blocks") or settings.random_steps is not None:
        return "the training windows have different shapes"
    if any(getattr(block, "recompute", False) for block in blocks):
        return "encoder.recompute = true"
    if world.size > 1:
        return "several processes train together"
    return ""


def _get_blocks(encoder: Encoder) -> list[nn.Module]:
    """Return the blocks of a transformer. Other encoders do not have blocks."""
    return list(getattr(encoder, "blocks", ()))


def _describe_failure(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return shorten(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, max_length=200)
