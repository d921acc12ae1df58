"""`score_tokens` computes the loss of every token of a text, in sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import reefknot as rk
from hf.models import V, make_model
from reefknot.storage.token_scores import read_token_scores

TEXT = torch.randint(V, (23,), generator=torch.Generator().manual_seed(6))


def make_adaptive() -> Any:
    model = make_model("Llama")
    table = rk.hf.EmbeddingBands(model.get_input_embeddings(), torch.rand(V), sizes=[30])
    return rk.hf.replace_head(model, rk.AdaptiveSoftmax(table, rk.BandProjections(table, 16, head=False)))


@pytest.mark.parametrize("make", [lambda: make_model("GPT-2"), make_adaptive], ids=["GPT-2", "adaptive"])
def test_losses_are_those_of_windows(make: Any, tmp_path: Path) -> None:
    model = make().train()
    file = tmp_path / "new" / "scores.safetensors"
    losses = rk.hf.score_tokens(model, TEXT, context=5, stride=4, file=file)
    assert model.training
    model.eval()
    expected = []
    for target in range(1, len(TEXT)):
        window_start = (target - 1) // 4 * 4
        inputs = TEXT[max(window_start - 5, 0) : target]
        with torch.no_grad():
            logits = model(input_ids=inputs[None]).logits[0, -1]
        expected.append(-logits.log_softmax(-1)[TEXT[target]])
    torch.testing.assert_close(losses, torch.stack(expected))
    scores = read_token_scores(file)
    assert torch.equal(scores.nll, losses)
    assert torch.equal(scores.targets, TEXT[1:])
    assert scores.windows.tolist() == [5, 4]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": TEXT[None]}, r"tokens is \(1, 23\) and torch.int64; pass the ids of one text"),
        ({"tokens": TEXT[:1]}, "at least two tokens"),
        ({"tokens": [1, 2]}, "tokens is list"),
        ({"tokens": torch.tensor([1, V])}, f"token {V} at position 1 is not an id of the model, which has {V} tokens"),
        ({"tokens": torch.tensor([-100, 1])}, "token -100 at position 0"),
        ({"stride": 0}, "stride = 0"),
        ({"context": -1}, "context = -1"),
        (
            {"tokens": torch.ones(1_100, dtype=torch.long), "context": 1_000, "stride": 50},
            r"windows have 1050 tokens .* "
            r"a GPT2LMHeadModel has only 1024 positions",
        ),
        ({"file": "scores.txt"}, "must end in .safetensors"),
    ],
)
def test_wrong_arguments_are_reported(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(rk.ArgumentError, match=message):
        rk.hf.score_tokens(make_model("GPT-2"), **{"tokens": TEXT, **wrong})


def test_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "scores.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(rk.ArgumentError, match="exists already; choose another file"):
        rk.hf.score_tokens(make_model("GPT-2"), TEXT, file=file)
    assert file.read_bytes() == b"mine"
