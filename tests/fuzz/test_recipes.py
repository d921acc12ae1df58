"""Damaged recipes give an exit code and a short message, and never a traceback, a hang or a leftover folder.

    HYPOTHESIS_PROFILE=campaign pytest tests/fuzz --timeout 0        many more examples

The settings to damage are read from the schema of an experiment, so that new settings are included.
"""

from __future__ import annotations

import copy
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reefknot.lab.cli.main import main
from reefknot.lab.recipes.file import FOLDER
from reefknot.lab.tasks.language_model import LanguageModelExperiment

LINES, SECONDS = 10, 60.0


def keys(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every dotted setting of an experiment from its schema."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for branch in [*node.get("oneOf", []), *node.get("anyOf", [])]:
        yield from keys(schema, branch, prefix)
    if isinstance(node.get("additionalProperties"), dict):  # named entries, such as tables
        yield from keys(schema, node["additionalProperties"], f"{prefix}words.")
    for name, child in node.get("properties", {}).items():
        yield prefix + name
        yield from keys(schema, child, f"{prefix}{name}.")


SCHEMA = LanguageModelExperiment.model_json_schema()
KEYS = sorted(set(keys(SCHEMA, SCHEMA)))
SHIPPED = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.toml")}


def test_settings_are_read_from_the_schema() -> None:
    expected = {"tables.words.dim", "encoder.hidden_dim", "output.classifier.penalty", "training.schedule.hold"}
    assert expected <= set(KEYS)
    assert len(SHIPPED) >= 2


# -- damage ----------------------------------------------------------------------------------------------------------


class Raw(str):
    """A value that is already TOML text, valid or not."""


def toml(value: Any) -> str:
    """Return the TOML text of a parsed recipe that may contain raw values."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(name)} = {toml(child)}" for name, child in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value).lower()


def recipe(tree: dict[str, Any]) -> str:
    """Return the TOML text of a whole recipe."""
    return "\n".join(f"{quoted(name)} = {toml(value)}" for name, value in tree.items())


def quoted(text: str) -> str:
    """Return a TOML string without lone surrogates."""
    valid_recipe = text.encode("utf-8", "ignore").decode()
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in valid_recipe) + '"'


def put(tree: dict[str, Any], names: list[str], value: str) -> None:
    """Set a value in a tree, and replace values that are not tables on the way to it."""
    for name in names[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[names[-1]] = Raw(value)


names = st.one_of(
    st.sampled_from(["kind", "words", "dim", "__class__", "model_config", "learnig_rate", ""]),
    st.text(max_size=12),
    st.text("\n\r\t\x00\u202e\u2028", min_size=1, max_size=30),
    st.just("x" * 5000),
)
scalars = st.one_of(
    st.integers(-3, 10**12).map(str),
    st.sampled_from(["-1", "0", "0.0", "-0.0", "1e308", "-1e308", "1e-320", "nan", "-nan", "inf", "-inf", "1e999"]),
    st.sampled_from(["0x" + "f" * 6000, "9" * 400, "9" * 6000, "1" + "_0" * 50, "true", "false"]),
    st.sampled_from(["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "", "'", "[", "{"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.one_of(st.text(max_size=20), st.just("y" * 10_000), st.just("\n" * 50), st.just("../../etc")).map(quoted),
    st.sampled_from(["word", "lookup", "lstm", "plain", "softmax", "sgd", "decay", "constant"]).map(quoted),
)
arrays = st.lists(scalars, max_size=4).map(lambda items: f"[{', '.join(items)}]")
inline = st.dictionaries(names, scalars, max_size=4).map(lambda items: toml({k: Raw(v) for k, v in items.items()}))
nested = st.builds(
    lambda pair, depth, value: pair[0] * depth + value + pair[1] * depth,
    st.sampled_from([("[", "]"), ("{a = ", "}")]),
    st.sampled_from([1, 5, 90, 400, 5000]),
    scalars,
)
values = st.one_of(scalars, arrays, inline, nested)

# -- the command, in this process -------------------------------------------------------------------------------------

Run = Callable[..., int]
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a verb on the text of a recipe, check how it fails, and return the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)

    def command(verb: str, text: str | bytes, *arguments: str) -> int:
        path = tmp_path / "damaged.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        started = time.monotonic()
        monkeypatch.setattr(sys, "argv", ["reefknot", verb, path.name, *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert time.monotonic() - started < SECONDS
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert len(message.splitlines()) <= LINES, message
        assert (exit_info.value.code == 0) == (message == ""), message
        assert [file.name for file in tmp_path.iterdir()] == [path.name], "the command has left files"
        return int(exit_info.value.code or 0)

    return command


@pytest.fixture
def valid_recipe(tiny_recipe: Callable[..., Path]) -> dict[str, Any]:
    """Return a valid recipe with one row on a small text."""
    path = tiny_recipe()
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return {**tree, "rows": [{"name": "tied", "set": {"encoder": {"biases": 2}}}]}


def validate_and_train(run: Run, text: str | bytes) -> int:
    """Run `validate`. If it rejects the recipe, check that `train` does too, before it makes a folder."""
    code = run("validate", text)
    assert code in (0, 2, 3)  # 3: missing corpus
    if code:
        assert run("train", text) == code
    return code


def test_undamaged_recipe_is_valid(run: Run, valid_recipe: dict[str, Any]) -> None:
    assert validate_and_train(run, recipe(valid_recipe)) == 0


@quick
@given(key=st.sampled_from(KEYS), value=values, in_row=st.booleans())
@example(key="training.epochs", value="0x" + "f" * 6000, in_row=False)
@example(key="training.epochs", value="9" * 6000, in_row=False)
def test_changed_values_never_crash(run: Run, valid_recipe: dict[str, Any], key: str, value: str, in_row: bool) -> None:
    tree = copy.deepcopy(valid_recipe)
    put(tree["rows"][0]["set"] if in_row else tree["base"], key.split("."), value)
    validate_and_train(run, recipe(tree))


@quick
@given(section=st.sampled_from(["", *KEYS]), unknown=st.lists(names, min_size=1, max_size=4), value=values)
@example(section="tables", unknown=["a\nb"], value="{}")
@example(section="tables", unknown=["\n" * 20], value='{kind = "word", dim = 8}')
@example(section="", unknown=["a"] * 200, value="1")
def test_unknown_settings_never_crash(
    run: Run, valid_recipe: dict[str, Any], section: str, unknown: list[str], value: str
) -> None:
    tree = copy.deepcopy(valid_recipe)
    put(tree["base"], [*filter(None, section.split(".")), *unknown], value)
    validate_and_train(run, recipe(tree))


@quick
@given(
    section=st.sampled_from(["title", "paper", "base", "rows", "extra", "row"]),
    key=st.sampled_from(["name", "quoted", "parameters", "paper", "set", "nmae"]),
    value=values,
)
@example(section="row", key="name", value=quoted("\n" * 50))
@example(section="row", key="parameters", value="7")
def test_damaged_titles_and_rows_never_crash(
    run: Run, valid_recipe: dict[str, Any], section: str, key: str, value: str
) -> None:
    tree = copy.deepcopy(valid_recipe)
    if section == "row":
        put(tree["rows"][0], [key], value)
    else:
        put(tree, [section], value)
    validate_and_train(run, recipe(tree))


def test_thousands_of_unknown_settings_are_rejected(run: Run, valid_recipe: dict[str, Any]) -> None:
    valid_recipe["base"]["training"] |= {f"unknown{number}": Raw("1") for number in range(20_000)}
    assert validate_and_train(run, recipe(valid_recipe)) == 2


def test_thousands_of_invalid_rows_are_rejected(run: Run, valid_recipe: dict[str, Any]) -> None:
    valid_recipe["rows"] = [{"name": f"row {number}", "set": {"training": {"batch": -1}}} for number in range(2000)]
    assert validate_and_train(run, recipe(valid_recipe)) == 2


@pytest.mark.parametrize("depth", [100, 1000, 3000])
def test_deeply_nested_settings_are_rejected(run: Run, valid_recipe: dict[str, Any], depth: int) -> None:
    """Dotted keys nest without brackets, so the TOML parser does not reject them."""
    dotted = ".".join(["a"] * depth)
    text = f'title = "deep"\nbase.{dotted} = 1\n[[rows]]\nname = "tied"\nset.{dotted} = 2\n'
    assert validate_and_train(run, text) == 2


@quick
@given(data=st.data(), name=st.sampled_from(sorted(SHIPPED)), junk=st.one_of(values, st.text()))
def test_cut_and_patched_text_never_crashes(
    run: Run, valid_recipe: dict[str, Any], data: st.DataObject, name: str, junk: str
) -> None:
    text = SHIPPED[name].replace('"python-docs"', quoted(valid_recipe["base"]["corpus"]["name"]))
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.sampled_from([0, 1, 2, 10, 100, len(text)]))
    # Not trained, because only some rows may be damaged.
    assert run("validate", text[:start] + junk + text[start + length :]) in (0, 2, 3)


@quick
@given(data=st.data(), junk=st.binary(max_size=8))
def test_replaced_bytes_never_crash(run: Run, valid_recipe: dict[str, Any], data: st.DataObject, junk: bytes) -> None:
    text = recipe(valid_recipe).encode()
    start = data.draw(st.integers(0, len(text)))
    validate_and_train(run, text[:start] + junk + text[start + len(junk) :])


@quick
@given(key=st.one_of(st.sampled_from(KEYS), names, st.just(".")), equals=st.sampled_from(["=", "", "=="]), value=values)
@example(key="training.epochs", equals="=", value="9" * 6000)
@example(key="training.epochs", equals="=", value="1\nvalue = 2")
@example(key="training" + ".a" * 20_000, equals="=", value="1")
def test_damaged_overrides_never_crash(
    run: Run, valid_recipe: dict[str, Any], key: str, equals: str, value: str
) -> None:
    text = recipe(valid_recipe)
    override = f"{key}{equals}{value}".replace("\0", "0")  # a command line cannot contain NUL
    if override.startswith("-"):
        override = f" {override}"  # so that it is not read as an option
    code = run("params", text, "--row", "tied", override)
    assert code in (0, 2, 3)  # 3: missing corpus
    if code == 2:
        assert run("train", text, "--row", "tied", override) == 2


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\nb", "press2017/table66", "/"])
def test_missing_recipe_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reefknot", "validate", name])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= LINES
