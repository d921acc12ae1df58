"""The model card (README.md) of an exported run: its row of the result table, its unknown words, and its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reefknot.lab.reports.table import rows_in_recipe_order, to_markdown
from reefknot.lab.runs.definition import format_unknown_share, warn_of_unknown_words
from reefknot.lab.runs.loading import load_run
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.storage.files import write_text

_CAUSAL_EXAMPLE = """import reefknot.hf
import transformers

pipe = transformers.pipeline("text-generation", model="FOLDER")
print(pipe("PROMPT", max_new_tokens=20)[0]["generated_text"])
"""
_TRANSLATION_EXAMPLE = """import reefknot.hf
import transformers

model = transformers.AutoModelForSeq2SeqLM.from_pretrained("FOLDER")
tokenizer = transformers.AutoTokenizer.from_pretrained("FOLDER")TARGET
sources = tokenizer(["a sentence of the source"], return_tensors="pt", padding=True, return_token_type_ids=False)
print(TARGET_NAME.batch_decode(model.generate(**sources), skip_special_tokens=True))
"""


def write_card(trained: TrainedRun[Any, Any, Any], folder: Path, usage: str | None = None) -> None:
    """Write the model card of an exported run.

    Args:
        trained: The run.
        folder: The folder of the exported model.
        usage: How to use the model. By default, an example for transformers.
    """
    write_text(folder / "README.md", build_card(trained, usage))


def build_card(trained: TrainedRun[Any, Any, Any], usage: str | None = None) -> str:
    """Return the model card of a run as Markdown. The arguments are those of `write_card`."""
    result = load_run(trained.run.path)
    is_translator = trained.run.task == "translation"
    pipeline = "translation" if is_translator else "text-generation"
    title = " / ".join(part for part in (result.recipe, result.row, f"seed {result.seed}") if part)
    lines = []
    if usage is None:
        lines += ["---", "library_name: transformers", f"pipeline_tag: {pipeline}", "tags:", "- reefknot", "---", ""]
    lines += [f"# {title}", ""]
    kind = "translator" if is_translator else "language model"
    corpus = result.record.corpus.name if result.record else trained.experiment.corpus.name
    lines += [f"A {kind} trained with Reefknot on {Path(corpus).name}.", ""]
    if usage is None:
        usage = f"```python\n{_example(trained)}```\n\n`logits` are log-probabilities."
    lines += [usage, "", "A line break of a text is the token `<eos>`.", ""]
    if result.record is None:
        lines += ["This run has no result: its training is not finished, or it was imported.", ""]
        return "\n".join(lines)

    lines += ["## Result", "", to_markdown(rows_in_recipe_order([result]))]
    lines += ["## Unknown words", "", *_describe_unknown(result.record.valid, result.record.test), ""]
    score = result.record.test or result.record.valid
    if score is not None:
        lines += ["## How the perplexity is defined", "", "```text", score.definition, "```", ""]
    return "\n".join(lines)


def _example(trained: TrainedRun[Any, Any, Any]) -> str:
    """Return a short program that uses the model."""
    if trained.run.task != "translation":
        words = [word for word in trained.vocabulary.words if word.isalpha()]
        return _CAUSAL_EXAMPLE.replace("PROMPT", words[0] if words else "")
    target, name = "", "tokenizer"
    if not trained.words.joint:
        target = '\ntarget = transformers.AutoTokenizer.from_pretrained("FOLDER", subfolder="target")'
        name = "target"
    return _TRANSLATION_EXAMPLE.replace("TARGET_NAME", name).replace("TARGET", target)


def _describe_unknown(*scores: TextScore | None) -> list[str]:
    """Return one line per split with its share of unknown words."""
    lines = []
    for score in scores:
        if score is None or score.text is None or score.unknown_share is None:
            continue
        split = score.text.split
        share = format_unknown_share(score.unknown_share)
        lines.append(f"- {split}: {score.text.unknown:,} unknown words, {share} of {score.words:,} words and line ends")
        warning = warn_of_unknown_words(score.unknown_share, split, subwords=score.uses_subwords)
        if warning:
            lines.append(f"  ({warning.replace('<unk>', '`<unk>`')})")
    return lines or ["Not recorded."]
