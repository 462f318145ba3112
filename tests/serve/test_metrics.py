"""Figures: `/metrics`, `/info` and each response tell the same."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from running import Running
from tiny_pair import start_tiny

from bitdraft.serve.metrics import MOST_DOMAINS


@pytest.fixture
def copy(folders: Path) -> Iterator[Running]:
    with start_tiny(folders, str(folders / "target"), draft_format="w4a16") as running:
        yield running


def figures(running: Running) -> dict[str, float]:
    text = httpx.get(f"{running.url}/metrics").text
    return {m[1]: float(m[2]) for m in re.finditer(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


def test_counters_are_the_sums_of_the_responses_u91(copy: Running) -> None:
    before = figures(copy)
    asked = {"max_tokens": 30, "return_origins": True, "ignore_eos": True}
    answers = [
        copy.complete("hello world", **asked, domain="code"),
        copy.complete("12 12 12", **asked, temperature=1.0, seed=1, n=2),
        copy.complete("12", **asked, speculative={"enabled": False}),
    ]
    assert copy.idle()
    after = figures(copy)
    steps = [answer["metrics"]["speculative_decoding"] for answer in answers]
    drafted = [d for step in steps for d in step["per_step_drafted"]]
    accepted = [a for step in steps for a in step["per_step_accepted"]]
    for prefix in ("bitdraft_spec_decode", "vllm:spec_decode"):
        for name, count in (
            ("num_drafts", sum(1 for d in drafted if d)),
            ("num_draft_tokens", sum(drafted)),
            ("num_accepted_tokens", sum(accepted)),
        ):
            assert after[f"{prefix}_{name}_total"] - before[f"{prefix}_{name}_total"] == count
        for position in range(3):
            count = sum(1 for a in accepted if a > position)
            assert after[f'{prefix}_num_accepted_tokens_per_pos_total{{position="{position}"}}'] == count
    positions = [after[f'bitdraft_spec_decode_num_draft_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
    assert positions == sorted(positions, reverse=True)
    assert after["bitdraft_generation_tokens_total"] == sum(a["usage"]["completion_tokens"] for a in answers) == 120
    assert after['bitdraft_requests_total{finish="length"}'] == 4
    assert after["bitdraft_time_to_first_token_seconds_count"] == 4
    assert after["bitdraft_inter_token_latency_seconds_count"] > 0
    assert after['bitdraft_step_seconds_total{part="verify"}'] > 0
    code = after['bitdraft_tested_tokens_by_domain_total{domain="code"}']
    assert 0 < code <= sum(a + 1 for a in steps[0]["per_step_accepted"])
    assert after["bitdraft_requests_running"] == after["bitdraft_kv_blocks_used"] == 0
    for step in steps:
        assert sum(step["acceptance_histogram"]) == step["num_spec_steps"]


def test_acceptance_is_told_by_context_u27(copy: Running) -> None:
    copy.complete("1" * 200, max_tokens=20, ignore_eos=True)
    copy.complete("1" * 400, max_tokens=20, ignore_eos=True)
    shown = figures(copy)
    for bucket in ("<=256", "<=512"):
        tested = shown[f'bitdraft_tested_tokens_by_context_total{{context="{bucket}"}}']
        overlap = shown[f'bitdraft_overlap_by_context_total{{context="{bucket}"}}']
        told = httpx.get(f"{copy.url}/info").json()["speculative"]["conditional_acceptance"]["context"][bucket]
        assert 0 <= overlap / tested <= 1
        assert told == pytest.approx(overlap / tested)


def test_clients_cannot_make_labels_without_end_u91(copy: Running) -> None:
    for n in range(MOST_DOMAINS + 5):
        copy.complete("hello world", max_tokens=4, ignore_eos=True, domain=f"d{n}")
    domains = [name for name in figures(copy) if name.startswith("bitdraft_tested_tokens_by_domain_total")]
    assert len(domains) == MOST_DOMAINS + 1
    assert any('"other"' in name for name in domains)
