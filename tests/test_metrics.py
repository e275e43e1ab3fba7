from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvcr_actors.core.accounting import PrefixOutcome, settle
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.metrics import Gauges, Metrics
from kvcr_actors.types import MissReason, SkipReason


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_a_scrape_tells_the_counters_as_they_are_then() -> None:
    stats = ControllerStats()
    gauges = Gauges(claims_open=2, inbox_depth={"backup": 3}, restarts={"backup": 1}, event_silence_s={"5557": 0.5})
    metrics = Metrics(lambda: stats, lambda: gauges)
    stats.backup.nodes, stats.backup.submits = 9, 4
    stats.backup.skipped[SkipReason.NO_HOST_MEMORY] = 5
    stats.settle(settle(PrefixOutcome(total=10, device=1, host=3, ready=6, used=6, miss=MissReason.DEADLINE)))
    stats.prefetch.started = stats.prefetch.used = 1
    found = samples(metrics)
    assert found["kvcr_actors_backup_nodes_total",] == 9
    assert found["kvcr_actors_backup_submits_total",] == 4
    assert found["kvcr_actors_backup_skipped_nodes_total", "no_host_memory"] == 5
    assert found["kvcr_actors_pages_used_total", "host"] == 2
    assert found["kvcr_actors_pages_used_total", "store"] == 3
    assert found["kvcr_actors_pages_not_used_total", "deadline", "store"] == 4
    assert found["kvcr_actors_pages_recomputed_total", "deadline"] == 4
    assert found["kvcr_actors_prefetches_ended_total", "used"] == 1
    assert found["kvcr_actors_claims_open",] == 2
    assert found["kvcr_actors_inbox_messages", "backup"] == 3
    assert found["kvcr_actors_actor_restarts_total", "backup"] == 1
    assert found["kvcr_actors_event_silence_seconds", "5557"] == 0.5
    stats.backup.nodes = 10
    assert samples(metrics)["kvcr_actors_backup_nodes_total",] == 10


def test_two_controllers_in_one_process_do_not_share_metrics() -> None:
    first, second = ControllerStats(), ControllerStats()
    first.backup.nodes = 1
    assert samples(Metrics(lambda: first))["kvcr_actors_backup_nodes_total",] == 1
    assert samples(Metrics(lambda: second))["kvcr_actors_backup_nodes_total",] == 0


def test_scenario_55_every_counter_of_the_controller_is_exported() -> None:
    stats = ControllerStats()
    exported = samples(Metrics(lambda: stats)).values()
    for section in (stats, stats.backup, stats.prefetch, stats.deposit):
        for number, field in enumerate(section.__attrs_attrs__):
            if isinstance(field.default, int):
                setattr(section, field.name, 1_000 + number)
    changed = samples(Metrics(lambda: stats)).values()
    set_here = sum(
        isinstance(field.default, int)
        for section in (stats, stats.backup, stats.prefetch, stats.deposit)
        for field in section.__attrs_attrs__
    )
    assert sum(value >= 1_000 for value in changed) == set_here
    assert not any(value >= 1_000 for value in exported)
