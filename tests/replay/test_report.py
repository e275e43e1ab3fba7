from __future__ import annotations

import io
import json
from array import array
from pathlib import Path

import pytest
from rich.console import Console

from kvcr_actors.core.accounting import PrefixOutcome, settle
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.replay.plot import draw_hits
from kvcr_actors.replay.report import DevicePages, HitSeries, ReplayReport, Timing
from kvcr_actors.replay.summary import render
from kvcr_actors.types import MissReason, SkipReason, Tier


def healthy_report() -> ReplayReport:
    """Two requests: one found 1, 2 and 3 of its 10 blocks in the three tiers, one found nothing of 4."""
    report, stats = ReplayReport(), ControllerStats()
    for outcome in (
        PrefixOutcome(total=10, device=1, host=3, ready=6, used=6, miss=MissReason.ABSENT),
        PrefixOutcome(total=4, device=0, host=0, ready=0, used=0, miss=MissReason.CANCELLED),
    ):
        account = settle(outcome)
        stats.settle(account)
        report.count_request(outcome.total, outcome.device, account)
    stats.backup.nodes, stats.backup.steps, stats.backup.submits = 5, 2, 2
    stats.backup.skipped[SkipReason.NO_HOST_MEMORY] += 1
    stats.deposit.deposited = 7
    report.take_stats(stats)
    report.verify.pages = 5
    report.claims.taken = report.claims.released = 9
    report.device = DevicePages(capacity=6, free=1, held=3, in_flight=2)
    report.events.index_matches = True
    report.timing = Timing(2.0, array("q", [1_000, 3_000, 2_000]))
    report.peak_bytes = 3 << 20
    return report


def test_a_sound_run_is_healthy_and_its_books_balance() -> None:
    report = healthy_report()
    assert report.identities() == []
    assert report.healthy


def test_the_json_form_has_the_documented_keys() -> None:
    made = json.loads(json.dumps(healthy_report().to_json()))
    assert made == {
        "requests": 2,
        "blocks": 14,
        "hits": {"device": 1, "host": 2, "store": 3},
        "reasons": {"absent": 4, "cancelled": 4},
        "tiers": {
            "device": {"queried": 14, "used": 1, "reasons": {"absent": 13}},
            "host": {"queried": 13, "used": 2, "reasons": {"absent": 11}},
            "store": {"queried": 11, "used": 3, "reasons": {"absent": 4, "cancelled": 4}},
        },
        "backup": {
            "nodes": 5,
            "steps": 2,
            "submits": 2,
            "slices": 0,
            "bytes": 0,
            "skipped": {"no_host_memory": 1},
        },
        "prefetch": {"started": 0, "used": 0, "cancelled": 0, "failed": 0},
        "store": {"deposited": 7, "failed": 0, "evicted": 0, "skipped": {}},
        "verify": {"pages": 5, "mismatches": 0},
        "claims": {"taken": 9, "released": 9, "open": 0, "quarantined": 0},
        "device_pages": {"capacity": 6, "free": 1, "held": 3, "in_flight": 2},
        "events": {"published": 0, "index_matches": True},
        "timing": {"wall_s": 2.0, "blocks_per_s": 7.0, "scheduler_us_per_step": {"p50": 2.0, "p99": 3.0}},
        "memory": {"peak_bytes": 3 << 20},
    }


def break_blocks(report: ReplayReport) -> None:
    report.blocks += 1


def break_reasons(report: ReplayReport) -> None:
    report.reasons[MissReason.ABSENT] -= 1


def break_host(report: ReplayReport) -> None:
    report.tiers[Tier.HOST].queried += 1


def break_hits(report: ReplayReport) -> None:
    report.hits[Tier.HOST] -= 1
    report.hits[Tier.STORE] += 1


def break_claims(report: ReplayReport) -> None:
    report.claims.released -= 1


def break_device(report: ReplayReport) -> None:
    report.device.held -= 1


def break_quarantine(report: ReplayReport) -> None:
    report.claims.quarantined = 1


def break_submits(report: ReplayReport) -> None:
    report.backup.submits += 1


def break_verification(report: ReplayReport) -> None:
    report.verify.pages -= 1


@pytest.mark.parametrize(
    "damage",
    [
        break_blocks,
        break_reasons,
        break_host,
        break_hits,
        break_claims,
        break_device,
        break_quarantine,
        break_submits,
        break_verification,
    ],
)
def test_each_broken_identity_is_named_and_makes_the_run_unhealthy(damage) -> None:
    report = healthy_report()
    damage(report)
    assert report.identities()
    assert not report.healthy


def test_wrong_bytes_open_claims_and_a_differing_index_are_faults() -> None:
    report = healthy_report()
    report.verify.mismatches = 2
    report.claims.open, report.claims.released = 1, 8
    report.events.index_matches = False
    assert report.identities() == []
    assert [fault.split()[:2] for fault in report.faults()] == [["2", "restored"], ["1", "claims"], ["the", "index"]]


def test_percentiles_are_nearest_rank() -> None:
    timing = Timing(1.0, array("q", range(1_000, 101_000, 1_000)))
    assert (timing.step_us(50), timing.step_us(99), Timing().step_us(50)) == (50.0, 99.0, 0.0)


def test_the_table_shows_every_tier_and_every_fault() -> None:
    report = healthy_report()
    report.verify.mismatches = 3
    output = io.StringIO()
    render(report, Console(file=output, width=160))
    text = output.getvalue()
    for words in ("device", "host", "store", "cancelled 4", "3 MiB", "unhealthy: 3 restored pages held wrong bytes"):
        assert words in text


def series(requests: int) -> HitSeries:
    made = HitSeries()
    for number in range(requests):
        made.add(4, {Tier.DEVICE: 1, Tier.HOST: 2 if number % 2 else 0, Tier.STORE: 0})
    return made


def test_ratios_group_requests_evenly_and_weigh_them_by_blocks() -> None:
    ends, ratios = series(10).ratios(5)
    assert ends == [2, 4, 6, 8, 10]
    assert ratios == {Tier.DEVICE: [0.25] * 5, Tier.HOST: [0.25] * 5, Tier.STORE: [0.0] * 5}
    assert series(7).ratios(3)[0] == [3, 6, 7]
    assert series(2).ratios(200)[0] == [1, 2]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")], ids=["png", "pdf", "svg"]
)
@pytest.mark.parametrize("requests", [1, 500])
def test_the_plot_is_drawn_in_the_format_of_its_suffix(
    tmp_path: Path, suffix: str, magic: bytes, requests: int
) -> None:
    target = tmp_path / "without_suffix"
    draw_hits(series(requests), target, suffix)
    assert target.read_bytes().startswith(magic)
