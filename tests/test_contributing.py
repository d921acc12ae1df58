"""The example in CONTRIBUTING.md works as it stands: one file, one line, and the contract holds."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from reefknot.parts import LABELS
from reefknot.tables import WordTable

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_example_labels_work_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unit.py"
    file.write_text(TEXT.split("```python\n")[1].split("```")[0], encoding="utf-8")
    line = TEXT.split("```python\n")[2].split("```")[0]
    kind, home = (word.strip(' "\n,') for word in line.split('": "'))
    spec = importlib.util.spec_from_file_location("reefknot.outputs.labels.unit", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(LABELS._parts, kind, home)

    settings = LABELS.settings_of(kind).model_validate({"kind": kind, "table": "words", "length": 2.0})
    table = WordTable(11, 4)
    labels = LABELS.build(settings, {"tables": {"words": table}})
    assert torch.allclose(labels.weight().norm(dim=-1), torch.full((11,), 2.0))
    labels.weight().square().sum().backward()
    assert table.weight.grad is not None
