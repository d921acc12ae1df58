"""`reefknot rank` on a softmax of dimension 8 over 12 words."""

from __future__ import annotations

from collections.abc import Callable

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


def test_rank_is_within_the_bound_of_a_softmax(cli: Cli, runs: Runs) -> None:
    record = cli("rank", runs.untied, "--tolerance", 1e6, "--json").json()
    assert (record["contexts"], record["classes"], record["width"]) == (449, 12, 8)
    ranks = {rank["whose"]: rank for rank in record["ranks"]}
    assert ranks["numpy's"]["rank"] <= 10
    assert ranks["numpy's"]["tolerance"] > 0
    assert ranks["the paper's"] == {"whose": "the paper's", "tolerance": 1.0, "rank": ranks["the paper's"]["rank"]}
    assert ranks["the paper's"]["rank"] <= ranks["numpy's"]["rank"]
    assert ranks["your own"]["rank"] == 0
    assert record["memory_bytes"] == 4 * 8 * 24 * 12
    text = cli("rank", runs.untied).out
    assert text.startswith(
        "log-probabilities of 12 words after all 449 contexts of the test text (every token but the last"
    )
    assert f"rank {ranks['numpy' + chr(39) + 's']['rank']} with numpy's tolerance" in text
    assert "with yours" not in text
    assert record["bound"] == 10
    assert "dimension of the hidden state 8; the rank of this end is at most 10\n" in text
    assert "MiB" in text


def test_too_few_contexts_are_mentioned(cli: Cli, runs: Runs) -> None:
    text = cli("rank", runs.tied, "--contexts", 5, "--split", "train").out
    assert "after the first 5 contexts of the train text" in text
    assert "the rank of this end is at most 10, and 5 with this few contexts\n" in text
    enough = cli("rank", runs.tied, "--contexts", 11).out
    assert "few contexts" not in enough
    assert "after all 449 contexts" in (more := cli("rank", runs.tied, "--contexts", 10**6).out)
    assert "; 1,000,000 were requested" in more
    assert cli("rank", runs.tied, "--split", "nope").code == 2
