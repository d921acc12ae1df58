"""`logits_free` in several processes: DDP, FSDP2 and output layers that are divided among processes.

Two processes (gloo, on the CPU) start once and check all cases. Each process has its own batch.
"""

from __future__ import annotations

import copy
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reefknot as rk
from hf.models import loss_and_gradients, make_batch, make_model

WITHOUT_LOGITS = ("loss without logits (loss_function)",)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(model: Any, expected: tuple[Tensor, dict[str, Tensor]], batch: dict[str, Tensor]) -> None:
    """Check the loss, and the gradients of all processes, twice, with a weight update in between."""
    loss, gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, expected[0], atol=1e-6, rtol=1e-6)
    assert len(gradients) == len(expected[1])
    for (name, gradient), expected_gradient in zip(gradients.items(), expected[1].values(), strict=True):
        torch.testing.assert_close(
            whole(gradient), whole(expected_gradient), atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def case_data_parallel(rank: int) -> None:
    batch = make_batch(rank)
    for name in ("Llama, tied", "BART"):
        expected = copy.deepcopy(loss_and_gradients(nn.parallel.DistributedDataParallel(make_model(name)), batch))
        model = make_model(name)
        patch = rk.hf.logits_free(model, min_logits=0)
        check_equal(nn.parallel.DistributedDataParallel(model), expected, batch)
        assert len(patch.paths) == 1
        assert "without" in patch.paths[0]


def shard(model: Any, own_unit: bool) -> Any:
    """Divide the parameters of a model among the processes."""
    for layer in model.model.layers:
        fully_shard(layer)
    if own_unit:
        fully_shard(model.lm_head)
    return fully_shard(model)


def check_fully_sharded(rank: int, name: str, own_unit: bool) -> None:
    batch = make_batch(rank)
    sharded = shard(make_model(name), own_unit)
    losses, gradients = [], []
    for _ in range(2):
        loss, grads = loss_and_gradients(sharded, batch)
        losses.append(loss)
        gradients.append({name: whole(gradient).clone() for name, gradient in grads.items()})
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    model = make_model(name)
    patch = rk.hf.logits_free(model, min_logits=0)
    model = shard(model, own_unit)
    for loss, grads in zip(losses, gradients, strict=True):
        check_equal(model, (loss, grads), batch)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model(**batch)
    assert patch.paths == WITHOUT_LOGITS


def case_fully_sharded(rank: int) -> None:
    check_fully_sharded(rank, "Llama", own_unit=False)
    check_fully_sharded(rank, "Llama, tied", own_unit=False)


def case_output_layer_is_its_own_unit(rank: int) -> None:
    check_fully_sharded(rank, "Llama", own_unit=True)


def case_divided_output_layer_computes_its_logits(rank: int) -> None:
    batch = make_batch()
    model = make_model("Llama")
    expected = model(**batch).loss.detach()
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    model.lm_head.weight = weight
    model.lm_head.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh),))
    model.lm_head.register_forward_hook(lambda _, args, logits: logits.full_tensor())
    patch = rk.hf.logits_free(model, min_logits=0)
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, atol=1e-6, rtol=1e-6)
    assert weight.grad is not None
    assert patch.paths == ("logits as usual (the weight or the hidden state is not a plain tensor)",)


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


def check_all_cases(rank: int, folder: str) -> None:
    """Run every case in one of the processes, and write its errors to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)  # noqa: PTH118
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    for name, case in CASES.items():
        try:
            case(rank)
            error = ""
        except Exception:
            error = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(error)
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of all cases, in both processes."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(check_all_cases, (str(folder),), nprocs=2)
    return {name: "".join(Path(folder, f"{name}.{rank}").read_text() for rank in range(2)) for name in CASES}


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]
