"""What others rely on and what readers were promised: exported names, cheap import, types, sizes, no pickle."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import reefknot

SOURCE = Path(reefknot.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in MODULES]
Function = ast.FunctionDef | ast.AsyncFunctionDef

EXPORTED = {
    "AWDLSTM",
    "AdaptiveLookup",
    "AdaptiveSoftmax",
    "ArgumentError",
    "AttentionGRU",
    "Augmented",
    "BandProjections",
    "BandedTable",
    "BayesianLSTM",
    "Bilinear",
    "CharCNN",
    "CorpusSettings",
    "DataError",
    "Drill",
    "Dual",
    "EncoderDecoder",
    "GRU",
    "LSTM",
    "LanguageModel",
    "Lookup",
    "MixtureOfSoftmaxes",
    "NonFiniteError",
    "Plain",
    "Projected",
    "RNN",
    "RecurrentHighway",
    "ReefknotError",
    "RegularisationSettings",
    "ResourceError",
    "SampledSoftmax",
    "SettingsError",
    "SkipGram",
    "Softmax",
    "Stopped",
    "Transformer",
    "Translator",
    "VariationalLSTM",
    "VocabularySettings",
    "WordTable",
    "WordVectors",
    "linear_cross_entropy",
    "load_recipe",
    "open_dataset",
    "open_run",
    "open_vectors",
    "read_vectors",
    "spell",
    "using",
    "write_vectors",
}
EXIT_CODES = {
    "ReefknotError": 1,
    "SettingsError": 2,
    "ArgumentError": 2,
    "DataError": 3,
    "NonFiniteError": 4,
    "ResourceError": 5,
    "Stopped": 75,
}
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "__import__", "torch.save", "os.system", "os.popen"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_exported_names_are_frozen() -> None:
    assert set(reefknot.__all__) == EXPORTED
    assert set(dir(reefknot)) == EXPORTED
    for name in EXPORTED:
        assert getattr(reefknot, name).__name__ == name


def test_type_checkers_see_every_exported_name() -> None:
    (guarded,) = [node for node in tree(SOURCE / "__init__.py").body if isinstance(node, ast.If)]
    imported = {alias.asname for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == EXPORTED


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Hardmax'"):
        _ = reefknot.Hardmax


def test_importing_the_package_costs_nothing() -> None:
    script = "import sys, reefknot; print({'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_exit_codes_are_frozen() -> None:
    assert {name: getattr(reefknot, name).exit_code for name in EXIT_CODES} == EXIT_CODES


@pytest.mark.parametrize(
    "name", ["py.typed", "recipes/demo.toml", "recipes/press2017/table6.toml", "reports/page.html"]
)
def test_files_beside_the_code_are_shipped(name: str) -> None:
    assert files("reefknot").joinpath(name).is_file()


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path))


def test_every_exported_name_says_what_it_is() -> None:
    assert [name for name in EXPORTED if not getattr(reefknot, name).__doc__] == []


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_files_and_functions_stay_readable(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600
    long = [
        node.name
        for node in ast.walk(tree(path))
        if isinstance(node, Function) and node.end_lineno is not None and node.end_lineno - node.lineno >= 80
    ]
    assert long == []


def test_the_median_file_is_short() -> None:
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    assert lengths[len(lengths) // 2] <= 200


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_every_function_is_typed(path: Path) -> None:
    if path.name.startswith("triton_") and path.name.endswith("kernels.py"):
        pytest.skip("what a kernel is given has triton's types, which are its own")
    bare = []
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [a for a in arguments if a.arg not in ("self", "cls")]
            if node.returns is None or any(a.annotation is None for a in named):
                bare.append(node.name)
    assert bare == []


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_nothing_runs_what_a_file_says(path: Path) -> None:
    """No pickle, no eval, no shell: a checkpoint or a recipe from a stranger can be wrong but cannot run code."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & BANNED_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in BANNED_IMPORTS
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS
            if ast.unparse(node.func) == "torch.load":
                assert {each.arg: ast.unparse(each.value) for each in node.keywords}.get("weights_only") == "True"
            for keyword in node.keywords:
                assert keyword.arg not in ("allow_pickle", "shell") or ast.unparse(keyword.value) == "False"
