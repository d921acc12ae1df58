"""transformers models have the same loss and gradients with `logits_free`, without storing their logits."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import reefknot as rk
from hf.models import ARCHITECTURES, V, loss_and_gradients, make_batch, make_model

every_architecture = pytest.mark.parametrize("name", list(ARCHITECTURES))


def check_equal(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-6, equal_nan=True)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class LargeTensors(TorchDispatchMode):
    """Records the operations that return a tensor of at least the size of the logits."""

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self.num_logits = num_logits
        self.makers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if type(result) is Tensor and not result.is_meta and result.numel() >= self.num_logits:
                self.makers.append(str(func))
        return results


@every_architecture
def test_loss_and_gradients_are_those_of_the_model(name: str) -> None:
    model, batch = make_model(name), make_batch()
    ignored = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    batches = [batch, ignored]
    if name not in ("T5", "T5 v1.1", "BART", "BERT"):  # these do not take it
        batches.append({**batch, "num_items_in_batch": torch.tensor(29)})
        batches.append({**batch, "num_items_in_batch": 7})
        batches.append({**ignored, "num_items_in_batch": torch.tensor(0)})
    expected = [loss_and_gradients(model, inputs) for inputs in batches]
    expected = [copy.deepcopy(result) for result in expected]
    patch = rk.hf.logits_free(model, min_logits=0)
    for inputs, result in zip(batches, expected, strict=True):
        check_equal(loss_and_gradients(model, inputs), result)
    assert patch.paths
    assert not [path for path in patch.paths if "real" in path or "usual" in path]


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_labels_but_a_count_of_zero_give_the_loss_of_the_model(count: Any) -> None:
    model, batch = make_model("Llama"), {**make_batch(), "num_items_in_batch": count}
    expected, gradients = copy.deepcopy(loss_and_gradients(model, batch))
    assert expected.isinf()
    rk.hf.logits_free(model, min_logits=0)
    loss, our_gradients = loss_and_gradients(model, batch)
    assert loss == expected
    assert our_gradients.keys() == gradients.keys()
    assert not any(gradient.isfinite().all() for gradient in our_gradients.values())


@every_architecture
def test_no_tensor_has_the_size_of_the_logits(name: str) -> None:
    model, batch = make_model(name), make_batch(rows=8, steps=64)
    num_logits = 8 * 64 * V
    rk.hf.logits_free(model, min_logits=0)
    with rk.using(memory=0.2), LargeTensors(num_logits) as large_tensors:
        model(**batch).loss.backward()
    assert large_tensors.makers == []


def test_counter_of_large_tensors_sees_the_logits_of_a_model_as_it_is() -> None:
    with LargeTensors(8 * 64 * V) as large_tensors:
        make_model("Llama")(**make_batch(rows=8, steps=64)).loss.backward()
    assert large_tensors.makers


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "BART"])
def test_generation_is_the_same(name: str) -> None:
    model, ids = make_model(name), make_batch()["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    beams = model.generate(ids, num_beams=3, **settings)
    rk.hf.logits_free(model, min_logits=0)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert torch.equal(model.generate(ids, num_beams=3, **settings), beams)


def test_undo_restores_the_model() -> None:
    model, batch = make_model("Llama"), make_batch()
    keys, own_loss = set(vars(model.lm_head)), model.loss_function
    patch = rk.hf.logits_free(model, min_logits=0)
    assert type(model(**batch).logits) is rk.hf.DeferredLogits
    patch.undo()
    assert type(model(**batch).logits) is Tensor
    assert model.loss_function is own_loss
    assert set(vars(model.lm_head)) == keys
    with rk.hf.logits_free(model, min_logits=0):
        patch.undo()  # undone before
        assert type(model(**batch).logits) is rk.hf.DeferredLogits
    assert type(model(**batch).logits) is Tensor


@pytest.mark.parametrize("fused", [False, True])
def test_logits_of_changed_weights_are_rejected(fused: bool) -> None:
    model = make_model("Llama")
    rk.hf.logits_free(model, min_logits=0)
    outputs = model(**make_batch())
    outputs.loss.backward()
    torch.optim.AdamW(model.parameters(), fused=fused).step()
    with pytest.raises(rk.ArgumentError, match=r"the weight of the output layer changed after these logits"):
        outputs.logits.softmax(-1)


def test_logits_of_freed_weights_are_rejected() -> None:
    model = make_model("Llama")
    rk.hf.logits_free(model, min_logits=0)
    logits = model(**make_batch()).logits
    model.lm_head.weight.untyped_storage().resize_(0)
    with pytest.raises(rk.ArgumentError, match=r"the weight of the output layer changed after these logits"):
        logits.softmax(-1)


def test_small_logits_are_computed_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make_model("Llama"), make_batch()
    with caplog.at_level(logging.INFO, "reefknot.hf"):
        patch = rk.hf.logits_free(model)
        assert type(model(**batch).logits) is Tensor
    assert patch.paths == ("logits as usual (they are smaller than min_logits)",)
    assert [record.message for record in caplog.records] == [f"LlamaForCausalLM: {patch.paths[0]}"]


def test_real_logits_are_the_same_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make_model("Gemma 2"), make_batch()
    expected = model(**batch).logits
    patch = rk.hf.logits_free(model, min_logits=0)
    for _ in range(2):
        assert torch.equal(model(**batch).logits.softmax(-1), expected.softmax(-1))
    assert patch.paths == ("loss without logits (loss_function)", "real logits (softmax)")
    assert [r.message for r in caplog.records if r.name == "reefknot.hf"] == [
        "Gemma2ForCausalLM: real logits (softmax)"
    ]


def test_copied_model_uses_its_own_weights() -> None:
    model, batch = make_model("Llama"), make_batch()
    rk.hf.logits_free(model, min_logits=0)
    clone = copy.deepcopy(model)
    nn.init.zeros_(clone.lm_head.weight)
    assert float(clone(**batch).loss.detach()) == pytest.approx(float(torch.tensor(float(V)).log()))


def load_again(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, load_again])
@pytest.mark.parametrize("name", ["Llama", "BART"])
def test_copied_and_loaded_models_are_logits_free_and_can_be_restored(name: str, make_copy: Any) -> None:
    model, batch = make_model(name), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch))
    patch = rk.hf.logits_free(model, min_logits=0)
    clone = make_copy(model)
    patch.undo()
    assert inspect.signature(clone.forward) == inspect.signature(model.forward)
    assert type(clone(**batch).logits) is rk.hf.DeferredLogits
    assert type(model(**batch).logits) is Tensor
    check_equal(loss_and_gradients(clone, batch), expected)
    own_patch = rk.hf.logits_free(clone, min_logits=0)
    check_equal(loss_and_gradients(clone, batch), expected)
    assert [path.split(" (")[0] for path in own_patch.paths] == ["loss without logits"]
    own_patch.undo()
    assert type(clone(**batch).logits) is Tensor
    assert vars(clone).keys() == vars(model).keys()
    assert clone.loss_function is model.loss_function
    assert not clone.base_model._forward_hooks


def replace_output_layer(model: Any) -> None:
    model.set_output_embeddings(nn.Linear(16, V))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [lambda model: model.resize_token_embeddings(V + 5), replace_output_layer])
def test_new_output_layers_are_logits_free(change: Any, compiled: bool) -> None:
    model, batch = make_model("Llama"), make_batch()
    old_head = model.lm_head
    patch = rk.hf.logits_free(model, min_logits=0)
    change(model)
    called = torch.compile(model, backend="eager") if compiled else model
    outputs = called(**batch)
    assert type(outputs.logits) is rk.hf.DeferredLogits
    assert patch.paths == ("loss without logits (loss_function)",)
    assert type(old_head(torch.ones(1, 16))) is Tensor
    patch.undo()
    real_outputs = model(**batch)
    assert type(real_outputs.logits) is Tensor
    torch.testing.assert_close(outputs.loss, real_outputs.loss)


def test_undo_keeps_the_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    calls = []

    class Hook(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    model, batch = make_model("Llama"), make_batch()
    patch = rk.hf.logits_free(model, min_logits=0)
    hooks.add_hook_to_module(model.lm_head, Hook())
    assert type(model(**batch).logits) is rk.hf.DeferredLogits
    patch.undo()
    assert type(model(**batch).logits) is Tensor
    assert calls == [model.lm_head] * 2


def test_model_that_accelerate_has_wrapped_is_unwrapped_copied_and_restored() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = make_model("Llama"), make_batch()
    expected = model(**batch).loss
    patch = rk.hf.logits_free(model, min_logits=0)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare(model)
        prepared(**batch).loss.backward()
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        torch.testing.assert_close(unwrapped(**batch).loss, expected)
        clone = copy.deepcopy(unwrapped)
        nn.init.zeros_(clone.lm_head.weight)
        assert float(clone(**batch).loss.detach()) == pytest.approx(float(torch.tensor(float(V)).log()))
        patch.undo()
        unwrapped.resize_token_embeddings(V + 5)
        assert type(unwrapped(**batch).logits) is Tensor
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def make_replica(module: nn.Module) -> Any:
    """Copy a module as `nn.DataParallel` does for another device."""
    replica: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, make_replica(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.clone())
    return replica


def test_replicas_of_data_parallel_models_use_their_own_weights() -> None:
    model, batch = make_model("Llama"), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch))
    patch = rk.hf.logits_free(model, min_logits=0)
    replicas = [make_replica(model) for _ in range(2)]
    nn.init.zeros_(model.lm_head.weight)  # the replicas have the weight from before
    for replica in replicas:
        model.zero_grad()
        outputs = replica(**batch)
        outputs.loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        check_equal((outputs.loss.detach(), gradients), expected)
        assert type(outputs.logits) is rk.hf.DeferredLogits
    assert patch.paths == ("loss without logits (loss_function)",)


def test_new_output_layer_that_is_not_linear_is_logged() -> None:
    model, batch = make_model("Llama"), make_batch()
    patch = rk.hf.logits_free(model, min_logits=0)
    model.lm_head = nn.Sequential(nn.Identity())
    assert type(model(input_ids=batch["input_ids"]).logits) is Tensor
    assert patch.paths == ("logits as usual (the output layer now has the type Sequential)",)


@pytest.mark.parametrize("compiled", [False, True])
def test_targets_made_without_gradients_get_none(compiled: bool) -> None:
    model = make_model("Llama")
    ids, other_ids = (make_batch(seed)["input_ids"] for seed in (2, 3))

    def gradients(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.no_grad():
            targets = model(input_ids=other_ids).logits
        nn.functional.mse_loss(model(input_ids=ids).logits.float(), targets.float()).backward()
        return {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}

    expected = copy.deepcopy(gradients(model))
    rk.hf.logits_free(model, min_logits=0)
    actual = gradients(torch.compile(model, backend="eager") if compiled else model)
    check_equal((torch.zeros(()), actual), (torch.zeros(()), expected))


def test_bfloat16_and_autocast_are_close_to_float32() -> None:
    model, batch = make_model("Granite"), make_batch()
    loss = model(**batch).loss
    rk.hf.logits_free(model, min_logits=0)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**batch)
    assert outputs.logits.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.loss, loss, atol=2e-2, rtol=0)
    loss_in_bfloat16 = model.bfloat16()(**batch).loss
    assert loss_in_bfloat16.dtype == torch.float32
    torch.testing.assert_close(loss_in_bfloat16, loss, atol=2e-2, rtol=0)


def test_gradient_checkpointing_has_the_same_gradients() -> None:
    model, batch = make_model("Llama").train(), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch))
    rk.hf.logits_free(model, min_logits=0)
    model.gradient_checkpointing_enable()
    check_equal(loss_and_gradients(model, batch), expected)


def count_graph_breaks(model: Any, batch: dict[str, Any]) -> tuple[int, tuple[Tensor, dict[str, Tensor]]]:
    """Return the number of places at which a compiled model breaks its graph, and its loss and gradients."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["graph_break"]
    counters.clear()
    loss, gradients = loss_and_gradients(torch.compile(model, backend="eager"), batch)
    result = loss, {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}
    return len(counters), copy.deepcopy(result)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "BART", "BERT"])
def test_compiled_model_needs_at_most_one_more_graph_break(name: str) -> None:
    model, batch = make_model(name), make_batch(rows=8, steps=64)
    num_breaks, expected = count_graph_breaks(model, batch)
    patch = rk.hf.logits_free(model, min_logits=0)
    num_patched_breaks, actual = count_graph_breaks(model, batch)
    check_equal(actual, expected)
    assert num_patched_breaks <= num_breaks + 1
    with rk.using(memory=0.2), LargeTensors(8 * 64 * V) as large_tensors:
        outputs = torch.compile(model, backend="eager")(**batch)
        outputs.loss.backward()
    assert large_tensors.makers == []
    assert [path for path in patch.paths if "real" in path] == []
    assert type(outputs.logits) is rk.hf.DeferredLogits
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(rk.ArgumentError, match="changed after these logits were deferred"):
        outputs.logits.softmax(-1)


def test_compiled_model_can_be_passed() -> None:
    model, batch = make_model("Llama"), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch)[0])
    compiled = torch.compile(model, backend="eager")
    with rk.hf.logits_free(compiled, min_logits=0) as patch:
        outputs = compiled(**batch)
        torch.testing.assert_close(outputs.loss.detach(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(outputs.logits.softmax(-1).sum(), torch.tensor(33.0))
    assert patch.paths == ("loss without logits (loss_function)", "real logits (softmax)")
    assert type(compiled(**batch).logits) is Tensor


# -- errors -------------------------------------------------------------------------------------------------------


def test_model_without_output_layer_is_rejected() -> None:
    with pytest.raises(rk.ArgumentError, match=r"LlamaModel has no output layer .* such as AutoModelForCausalLM"):
        rk.hf.logits_free(make_model("Llama").model)


def test_other_modules_are_rejected() -> None:
    with pytest.raises(rk.ArgumentError, match="model is a Linear; pass a transformers model"):
        rk.hf.logits_free(nn.Linear(2, 2))


def test_second_call_is_rejected() -> None:
    model = make_model("Llama")
    rk.hf.logits_free(model)
    with pytest.raises(rk.ArgumentError, match="LlamaForCausalLM is logits-free already"):
        rk.hf.logits_free(model)


def test_negative_min_logits_is_rejected() -> None:
    with pytest.raises(rk.ArgumentError, match="min_logits = -1: must be 0 or more"):
        rk.hf.logits_free(make_model("Llama"), min_logits=-1)


def test_type_of_a_layer_of_another_library_is_named_in_full() -> None:
    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model = make_model("Llama")
    model.lm_head = Linear(16, V)
    with pytest.raises(rk.ArgumentError, match=r"has the type hf\.test_logits_free\.Linear; it must be an nn.Linear"):
        rk.hf.logits_free(model)


def test_output_layer_that_is_not_linear_is_rejected() -> None:
    model = make_model("Llama")
    model.lm_head = nn.Sequential(nn.Identity())
    with pytest.raises(
        rk.ArgumentError, match=r"the output layer of LlamaForCausalLM has the type Sequential; it must be an nn.Linear"
    ):
        rk.hf.logits_free(model)


WITHOUT_LAB = """
import sys
sys.modules.update(dict.fromkeys(("pydantic", "rich", "jinja2", "matplotlib", "scipy", "sacrebleu", "reefknot.lab")))
import reefknot as rk
assert "transformers" not in sys.modules and "torch" not in sys.modules
from hf.models import make_batch, make_model
model = make_model("Llama")
assert "reefknot.hf" not in sys.modules
patch = rk.hf.logits_free(model, min_logits=0)
model(**make_batch()).loss.backward()
assert patch.paths == ("loss without logits (loss_function)",)
"""


def test_only_the_library_and_transformers_are_needed() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_LAB], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
