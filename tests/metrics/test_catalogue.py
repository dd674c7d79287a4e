from __future__ import annotations

import re
from pathlib import Path

from kvmosaic.metrics import Family, catalogue, own_names, vllm_names
from kvmosaic.metrics.family import TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "server" / "metrics.md").read_text()


def row(family: Family) -> str:
    labels = [label for label in family.labels if label not in ("model_name", "engine")]
    return f"| `{family.name}` | {family.kind} | {', '.join(labels)} | {family.meaning} |"


def test_every_name_is_there_once() -> None:
    names = [family.name for family in catalogue()]
    assert len(names) == len(set(names)) > 40


def test_names_labels_and_buckets_are_well_formed() -> None:
    for family in catalogue():
        assert re.fullmatch(r"(vllm|kvmosaic):[a-z0-9_]+", family.name)
        assert not family.name.endswith(("_total", "_sum", "_count", "_bucket", "_created"))
        assert (family.kind == "histogram") == bool(family.buckets)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert family.labels[0] == "model_name" and "le" not in family.labels
        assert family.meaning.endswith(".")


def test_a_query_uses_the_suffixes_of_the_kind() -> None:
    assert vllm_names.PROMPT_TOKENS.series == ("vllm:prompt_tokens_total",)
    assert vllm_names.KV_CACHE_USAGE.series == ("vllm:kv_cache_usage_perc",)
    assert own_names.CHUNK_LOOKUP_SECONDS.series == (
        "kvmosaic:chunk_lookup_seconds_sum",
        "kvmosaic:chunk_lookup_seconds_count",
    )
    assert "vllm:time_to_first_token_seconds_bucket" in vllm_names.TIME_TO_FIRST_TOKEN.series


def test_names_of_vllm_have_its_labels() -> None:
    for family in catalogue():
        assert family.name.startswith("vllm:") == (family.labels[:2] == ("model_name", "engine"))


def test_token_buckets_are_those_of_vllm() -> None:
    assert TOKENS[:8] == (1, 2, 5, 10, 20, 50, 100, 200)
    assert TOKENS[-1] == 5_000_000


def test_the_page_says_what_the_code_says() -> None:
    missing = [row(family) for family in catalogue() if row(family) not in PAGE.splitlines()]
    assert not missing, "docs/server/metrics.md needs these lines:\n" + "\n".join(missing)


def test_the_page_names_no_metric_that_does_not_exist() -> None:
    described = re.findall(r"^\| `([^`]+)` \| (?:counter|gauge|histogram|summary) \|", PAGE, re.MULTILINE)
    assert sorted(described) == sorted(family.name for family in catalogue())
