"""The public interface: exported names, exit codes, packaged files, and no unsafe code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import reefknot

SOURCE = Path(reefknot.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

EXPORTED_BY_HF = {
    "DeferredLogits",
    "EmbeddingBands",
    "LogitsFree",
    "ReefknotHeadConfig",
    "ReefknotHeadForCausalLM",
    "ReefknotHeadForMaskedLM",
    "ReefknotHeadForSeq2SeqLM",
    "ReefknotHeadMaskedLMConfig",
    "ReefknotHeadSeq2SeqConfig",
    "logits_free",
    "replace_head",
    "score_tokens",
}

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
    "LinearCrossEntropyLoss",
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
    "Scorer",
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
    "linear_divergence",
    "linear_log_probs",
    "linear_topk",
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


def test_names_of_the_hugging_face_package_are_frozen() -> None:
    pytest.importorskip("transformers")
    assert set(reefknot.hf.__all__) == EXPORTED_BY_HF


def test_type_checkers_see_every_exported_name() -> None:
    (guarded,) = [node for node in tree(SOURCE / "__init__.py").body if isinstance(node, ast.If)]
    imported = {alias.asname for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == EXPORTED | {"hf"}  # a module, imported when it is first used


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Hardmax'"):
        _ = reefknot.Hardmax


def test_exit_codes_are_frozen() -> None:
    assert {name: getattr(reefknot, name).exit_code for name in EXIT_CODES} == EXIT_CODES


@pytest.mark.parametrize(
    "name", ["py.typed", "lab/recipes/demo.toml", "lab/recipes/press2017/table6.toml", "lab/reports/page.html"]
)
def test_data_files_are_in_the_package(name: str) -> None:
    assert files("reefknot").joinpath(name).is_file()


def test_every_exported_name_has_a_docstring() -> None:
    assert [name for name in EXPORTED if not getattr(reefknot, name).__doc__] == []


def test_source_files_cannot_run_untrusted_input() -> None:
    """No pickle, no eval and no shell: checkpoints and recipes of other people cannot run code."""
    assert [f"{path.relative_to(SOURCE)}: {problem}" for path in MODULES for problem in dangers(tree(path))] == []


def dangers(module: ast.Module) -> Iterator[str]:
    """Yield imports and calls that could run code of a file."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & BANNED_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0]} & BANNED_IMPORTS
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield from {name} & BANNED_CALLS
            keywords = {keyword_node.arg: ast.unparse(keyword_node.value) for keyword_node in node.keywords}
            if name == "torch.load" and keywords.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            for keyword in ("allow_pickle", "shell"):
                if keywords.get(keyword, "False") != "False":
                    yield f"{name}({keyword}={keywords[keyword]})"


def test_check_for_untrusted_input_finds_every_danger() -> None:
    bad = ["import pickle", "from dill import x", "eval(x)", "torch.load(x)", "np.load(x, allow_pickle=True)"]
    assert [code for code in bad if not list(dangers(ast.parse(code)))] == []
