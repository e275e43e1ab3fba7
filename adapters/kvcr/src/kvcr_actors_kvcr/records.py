"""Counters of the store, and the one form of diagnostic record for reads and writes."""

from __future__ import annotations

import attrs
import structlog

log = structlog.get_logger()


@attrs.define
class StoreCounters:
    """Pages unless the name says otherwise."""

    written: int = 0
    already_held: int = 0
    full: int = 0
    failed: int = 0
    read: int = 0
    missed: int = 0
    damaged: int = 0
    hinted: int = 0
    """Pages that a hint promised and a request asked for."""
    delivered: int = 0
    """Of those, pages that came from the peer."""
    partial_deliveries: int = 0
    failed_deliveries: int = 0
    confirmed: int = 0
    """Side blocks that a peer delivered to confirm a boundary."""
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_delivered: int = 0
    spans_written: int = 0
    spans_read: int = 0
    spans_delivered: int = 0


@attrs.frozen(kw_only=True)
class TransferRecord:
    """One operation of the runner, as `diagnostic_telemetry` logs it."""

    direction: str
    """`deposit`, `fetch`, `deliver` or `confirm`."""
    source: str
    pages: int
    succeeded: int
    spans: int
    bytes: int
    seconds: float


def log_record(record: TransferRecord) -> None:
    """Write a record; the one place that does."""
    log.info("kvcr.transfer", **attrs.asdict(record))
