"""The head of a model that caps its logits keeps the cap: c tanh(score / c), as in Gemma 2."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from torch import Tensor, nn

import reefknot as rk
from hf.models import V, loss_and_gradients, make_batch, make_model

D = 16
CAP = 0.5
"""The cap of the tiny Gemma models."""
CAPPED = ["Gemma 2", "Gemma 3"]
BATCH = make_batch()
TOKENS = BATCH["input_ids"]


def input_table(model: Any) -> Any:
    return rk.WordTable.from_embedding(model.get_input_embeddings())


def make_capped_model(name: str, scale: float = 10.0) -> Any:
    """Build a capped model in float64, with scores that are larger than the cap."""
    model = make_model(name).double()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(scale)
    return model


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=TOKENS).logits
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", CAPPED)
def test_capped_model_starts_the_same(name: str, tmp_path: Path) -> None:
    original = make_capped_model(name)
    with torch.no_grad():
        logits = original(input_ids=TOKENS).logits
    assert CAP * 0.9 < logits.abs().max() <= CAP
    expected_loss, expected_gradients = loss_and_gradients(original, BATCH)
    generated = original.generate(TOKENS[:, :4], attention_mask=torch.ones(3, 4), max_new_tokens=4, do_sample=False)

    model = copy.deepcopy(original)
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(input_table(model), bias=False)), start="same")
    assert model.end.softcap == CAP
    torch.testing.assert_close(log_probs(model), logits.log_softmax(-1), rtol=0, atol=1e-9)
    loss, gradients = loss_and_gradients(model, BATCH)
    torch.testing.assert_close(loss.to(expected_loss), expected_loss)  # transformers computes the loss in float32
    expected_gradients = {f"language_model.{key}": gradient for key, gradient in expected_gradients.items()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-7)

    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.end.softcap == CAP
    torch.testing.assert_close(log_probs(loaded), log_probs(model))
    for capped in (model, loaded):
        result = capped.generate(TOKENS[:, :4], attention_mask=torch.ones(3, 4), max_new_tokens=4, do_sample=False)
        assert torch.equal(result, generated)


@pytest.mark.parametrize("name", CAPPED)
def test_new_head_keeps_the_cap(name: str, tmp_path: Path) -> None:
    model = make_capped_model(name)
    hidden_BTD = model.model(input_ids=TOKENS).last_hidden_state.detach()
    end = rk.Softmax(rk.Drill(rk.WordTable(V, D)), smoothing=0.1)
    model = rk.hf.replace_head(model, end)
    scores_BTV = hidden_BTD @ end.classifier.weight().T + end.classifier.bias
    expected_BTV = (CAP * torch.tanh(scores_BTV / CAP)).log_softmax(-1)
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected_BTV)
    labels = BATCH["labels"][:, 1:]
    expected = nn.functional.cross_entropy(expected_BTV[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model(**BATCH).loss, expected)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        log_probs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)), log_probs(model)
    )


def test_cap_of_the_end_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("Gemma 2", "Llama"):
        model = make_model(name)
        end = rk.Softmax(rk.Plain(rk.WordTable(V, D)), softcap=7.0)
        message = f"{type(model).__name__} .*, and the Softmax caps them at 7"
        with pytest.raises(rk.ArgumentError, match=message):
            rk.hf.replace_head(model, end, start="same")
        assert rk.hf.replace_head(model, end).end.softcap == 7.0
    assert not caplog.records
    assert rk.hf.replace_head(make_model("Llama"), rk.Softmax(rk.Plain(rk.WordTable(V, D)))).end.softcap is None


@pytest.mark.parametrize("activation", ["sigmoid", "relu", "tanh"])
def test_number_that_drill_adds_does_not_cancel_under_a_cap(activation: Any) -> None:
    model = make_model("Gemma 2")
    expected = log_probs(model)
    end = rk.Softmax(rk.Drill(rk.WordTable(V, D), activation=activation))
    if activation != "tanh":
        with pytest.raises(rk.ArgumentError, match='changes capped scores; make it with activation="tanh"'):
            rk.hf.replace_head(model, end, start="same")
        return
    torch.testing.assert_close(log_probs(rk.hf.replace_head(model, end, start="same")), expected, rtol=0, atol=1e-5)


def test_end_without_a_cap_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("Gemma 2")
    with caplog.at_level(logging.WARNING, "reefknot.hf"):
        rk.hf.replace_head(model, rk.MixtureOfSoftmaxes(rk.Plain(input_table(model)), D, experts=2))
    assert [record.message for record in caplog.records] == [
        "replace_head: the Gemma2ForCausalLM caps its logits at 0.5, and the MixtureOfSoftmaxes does not; a Softmax "
        "keeps the cap"
    ]


@pytest.mark.parametrize(("softcap", "scale"), [(30.0, 1.0), (15.0, 0.0625), (0.5, 3.0), (None, 0.25)])
def test_scaled_and_capped_logits_are_understood(softcap: float | None, scale: float) -> None:
    """Scores are scaled before they are capped."""

    class CohereForCausalLM(transformers.CohereForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits if softcap is None else softcap * torch.tanh(outputs.logits / softcap)
            return outputs

    model = CohereForCausalLM(make_model("Cohere").config).eval()
    model.logit_scale = scale
    torch.nn.init.normal_(model.lm_head.weight, std=20.0)
    expected = log_probs(model)
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(rk.WordTable(V, D))), start="same")
    assert (model.end.softcap, model.config.hidden_scale) == (softcap, scale)
    torch.testing.assert_close(log_probs(model), expected, rtol=0, atol=1e-4)


def test_logits_that_change_in_another_way_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits.relu()
            return outputs

    model = LlamaForCausalLM(make_model("Llama").config).eval()
    end = rk.Softmax(rk.Plain(rk.WordTable(V, D)))
    with pytest.raises(rk.ArgumentError, match="changes its logits in a way that no end does; use start"):
        rk.hf.replace_head(model, end, start="same")
    rk.hf.replace_head(model, end)
    assert [record.message for record in caplog.records] == [
        "replace_head: the LlamaForCausalLM changes its logits in a way that no end does"
    ]
