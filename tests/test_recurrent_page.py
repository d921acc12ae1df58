"""What docs/recurrent.md says is true: recipes, sizes, commands, paths, tests, settings and figures of the code."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer

from reefknot.cli.main import app
from reefknot.evaluation.cache import CacheSettings
from reefknot.evaluation.dynamic import DEFAULTS, ETA_FACTORS, LAMBDA_FACTORS, SEGMENT, DynamicSettings
from reefknot.evaluation.protocols import ProtocolName
from reefknot.parts import ENCODERS, SCHEDULES
from reefknot.recipe import EvaluationSettings, Experiment, build_model, load_recipe
from reefknot.recipes import shipped
from reefknot.training.averaging import AveragingSettings
from reefknot.training.settings import TrainingSettings
from reefknot.training.stopping import StoppingSettings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/recurrent.md").read_text(encoding="utf-8")
WORDS = 10_000  # the Penn Treebank's, which the page's recipes name
SECTIONS = dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
"""The text below every heading, down to the next one."""
ENCODER_HEADINGS = [heading for heading in SECTIONS if heading.startswith("`")]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _snippets(heading: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", SECTIONS[heading], re.DOTALL)


(FRAME,) = _snippets("How to read this page")
TRAININGS = _snippets("Training")
(FINETUNING,) = _snippets("Second sessions")
(SCORING,) = _snippets("Perplexity: ours and the papers'")


def _experiments(folder: Path, *snippets: str) -> dict[str, Experiment]:
    """The experiments of a recipe as the page says to make it: the frame, and snippets below it."""
    path = folder / "mine.toml"
    path.write_text("\n".join([FRAME, *snippets]), encoding="utf-8")
    return dict(load_recipe(str(path)).experiments)


def _commands() -> list[list[str]]:
    """Every command line of the page, without the program's name."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(reefknot \w+ [^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    return [shlex.split(line)[1:] for line in lines if line.strip()]


def test_every_encoder_has_a_section() -> None:
    named = [kind for heading in ENCODER_HEADINGS for kind in re.findall(r"`(\w+)`", heading)]
    assert named == [*ENCODERS]


@pytest.mark.parametrize("heading", ENCODER_HEADINGS)
def test_a_section_has_all_it_should(heading: str) -> None:
    section = SECTIONS[heading]
    order = ["```text\n", "- **Masks**", "- **Settings**", "- **Source**", "```toml\n"]
    places = [section.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "](../src/reefknot/encoders/" in section


@pytest.mark.parametrize("heading", ENCODER_HEADINGS)
def test_an_encoder_builds_and_has_the_size_it_claims(heading: str, tmp_path: Path) -> None:
    (snippet,) = _snippets(heading)
    (kind,) = re.findall(r'^\[base\.encoder\]\nkind = "(\w+)"', snippet, re.MULTILINE)
    assert heading.startswith(f"`{kind}`")
    (experiment,) = _experiments(tmp_path, snippet, TRAININGS[0]).values()
    with torch.device("meta"):
        counts = build_model(experiment, WORDS).parameter_counts()
    assert re.findall(r"^# ([\d,]+) parameters", snippet, re.MULTILINE) == [f"{sum(counts.values()):,}"]


def test_encoders_and_trainings_go_together(tmp_path: Path) -> None:
    assert len(TRAININGS) == 2
    for heading, training in product(ENCODER_HEADINGS, TRAININGS):
        assert _experiments(tmp_path, *_snippets(heading), training, SCORING).keys() == {"mine"}


def test_finetuning_begins_with_the_first_row(tmp_path: Path) -> None:
    awd = next(heading for heading in ENCODER_HEADINGS if "awd" in heading)
    found = _experiments(tmp_path, *_snippets(awd), TRAININGS[1], FINETUNING)["finetuned"].training
    assert found.start is not None
    assert found.averaging is not None
    assert found.random_steps is not None
    assert (found.start.row, found.averaging.start, found.random_steps.most) == ("mine", "at_once", 80)


def test_every_command_is_understood() -> None:
    commands = _commands()
    assert {"train", "table", "sweep", "evaluate", "predict", "rank", "compare", "bench"} <= {
        each[0] for each in commands
    }
    for verb, *words in commands:
        VERBS[verb].make_context(verb, words)  # a word that the verb does not know raises here


def test_verbs_and_options_that_are_named_exist() -> None:
    assert set(re.findall(r"`reefknot (\w+)", PAGE)) <= set(VERBS)
    options = {each for verb in VERBS.values() for parameter in verb.params for each in parameter.opts}
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) <= options


def test_every_option_of_an_evaluation_is_named() -> None:
    ours = {"--help", "--device", "--data"}
    asked = {each for parameter in VERBS["evaluate"].params for each in parameter.opts if each.startswith("--")}
    assert [option for option in sorted(asked - ours) if option not in PAGE] == []


def test_rows_and_settings_of_commands_exist() -> None:
    for verb, recipe, *words in _commands():
        if recipe in shipped():
            row: Any = words[words.index("--row") + 1] if "--row" in words else None
            row = [row] if row and verb == "table" else row
            changes = [each.partition(",")[0] for each in words if verb == "sweep" and "=" in each]
            assert load_recipe(recipe, changes, row).experiments


def test_every_recipe_of_the_papers_is_in_the_table() -> None:
    section = SECTIONS["The papers' recipes"]
    rows = dict(re.findall(r"^\| `reefknot table (\S+) --data DIR` \| (\d+) \|", section, re.MULTILINE))
    assert rows.keys() == {name for name in shipped() if "/" in name}
    assert {name: int(count) for name, count in rows.items()} == {
        name: len(load_recipe(name).experiments) for name in rows
    }


@pytest.mark.parametrize(
    "name",
    [
        *(f"training.{key}" for key in ("divisor", "random_steps", "schedule", "averaging", "stop", "start")),
        *(f"training.{key}" for key in ("capture", "determinism", "precision", "accumulate", "batch", "steps")),
        *(f"evaluation.{key}" for key in EvaluationSettings.model_fields),
    ],
)
def test_settings_are_named(name: str) -> None:
    section, key = name.split(".")
    known = TrainingSettings if section == "training" else EvaluationSettings
    assert key in known.model_fields
    assert re.search(rf"`{re.escape(name)}\b", PAGE)


def test_every_choice_of_a_setting_is_named() -> None:
    choices = [
        *SCHEDULES,
        *get_args(ProtocolName),
        *get_args(TrainingSettings.model_fields["determinism"].annotation),
    ]
    assert [choice for choice in choices if f"`{choice}`" not in PAGE] == []
    quoted = [
        *(f'`start = "{each}"`' for each in get_args(AveragingSettings.model_fields["start"].annotation)),
        *(f'`rule = "{each}"`' for each in get_args(StoppingSettings.model_fields["rule"].annotation)),
        *(f'`"{each}"`' for each in get_args(TrainingSettings.model_fields["divisor"].annotation)),
        *(f"`{each}`" for each in ("weight_decay", "decoupled_decay", "probability", "deviation", "least", "most")),
    ]
    assert [choice for choice in quoted if choice not in PAGE] == []


def test_the_numbers_of_the_evaluations_are_those_of_the_code() -> None:
    section = SECTIONS["Dynamic evaluation"]
    for scale, rates in DEFAULTS.items():
        (row,) = re.findall(rf"^\| `{scale}`.*$", section, re.MULTILINE)
        found = tuple(float(each) for each in re.findall(r"\| ([\d.e-]+) (?=\|)", row))
        assert found == (rates.eta, rates.decay, rates.epsilon)
    assert f"{min(ETA_FACTORS):g} to {max(ETA_FACTORS):g} times" in section
    assert f"{min(LAMBDA_FACTORS):g} to {max(LAMBDA_FACTORS):g} times" in section
    assert f"{SEGMENT} tokens" in section
    assert DynamicSettings().scale == "mean"
    cache = CacheSettings()
    assert f"`--weight` {cache.weight:g}, `--theta` {cache.theta:g}, `--window` {cache.window}" in SECTIONS["Cache"]


def test_links_and_paths_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    named = re.findall(r"`((?:src|docs|script|tests)/[^`]+)`", PAGE)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_tests_that_are_named_exist() -> None:
    """In the table names stand before the files that have them; elsewhere a name may stand alone."""
    rows = [line for line in SECTIONS["What runs on what"].splitlines() if "`test_" in line]
    assert len(rows) > 5
    for row in rows:
        for names, files in re.findall(r"((?:`test_\w+`,? )+)in ((?:`tests/\S+`(?:, )?)+)", row):
            for file, name in product(re.findall(r"`(\S+)`", files), re.findall(r"`(\w+)`", names)):
                assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
    everything = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", PAGE) if f"def {name}(" not in everything] == []


def test_anchors_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    asked = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(anchors) == len(set(anchors))
    assert asked <= set(anchors)
