"""How one rank publishes its events; checked whole before a socket is opened."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.events.endpoints import Endpoint, check_endpoints
from kvcr_actors.events.stream import StreamLimits
from kvcr_actors.events.wire import Dialect, find_dialect

LONGEST_SILENCE_S = 10.0
"""A publisher that is silent for this long has been noticed; heartbeats are far more frequent."""


@attrs.frozen
class EventsConfig:
    """One publisher a data-parallel rank, at base port plus rank. Building one raises ConfigError for what cannot be.

    `endpoint` and `replay_endpoint` are a port (on loopback), `tcp://HOST:PORT` or `ipc://PATH`. A host that is not
    loopback opens them to others: events carry the tokens of users' prompts.
    """

    endpoint: str
    replay_endpoint: str | None = None
    dialect: str = "dynamo"
    topic: str = "kv-events"
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    tensor_rank: int = 0
    """Only rank 0 publishes: the others hold the same pages, and open no socket."""
    sequence_file: Path | None = None
    """Keeps sequence numbers over restarts; without, they start at the clock's microseconds. See `sequence_path`."""
    heartbeat_s: float = 1.0
    silent_after_s: float = 5.0
    """A publisher that sent nothing for this long is reported."""
    queue_batches: int = 1_000
    """Batches that may wait for one slow reader; beyond it they are lost to it, and it must ask for a replay."""
    snapshot_on_join: bool | None = None
    """Whether a reader that joins makes the stream begin anew, for all; None is yes where it cannot ask for a replay.

    A router's state agent asks for none: say yes for one beside other readers that do.
    """
    limits: StreamLimits = attrs.field(factory=StreamLimits)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank {self.data_parallel_rank} of {self.data_parallel_size} does not exist"
            )
        if self.tensor_rank < 0 or self.queue_batches < 1:
            raise ConfigError("tensor_rank must be 0 or more, and queue_batches 1 or more")
        if not 0 < self.heartbeat_s < self.silent_after_s < LONGEST_SILENCE_S:
            raise ConfigError(
                f"heartbeat_s {self.heartbeat_s:g} and silent_after_s {self.silent_after_s:g}: they must rise, from "
                f"above 0 to below {LONGEST_SILENCE_S:g} s"
            )
        find_dialect(self.dialect)
        check_endpoints(self.events, self.replay, self.data_parallel_size)

    @property
    def events(self) -> Endpoint:
        """The base endpoint of the events."""
        return Endpoint.parse(self.endpoint, "events")

    @property
    def replay(self) -> Endpoint | None:
        """The base endpoint of the replays."""
        return None if self.replay_endpoint is None else Endpoint.parse(self.replay_endpoint, "replay")

    @property
    def sequence_path(self) -> Path | None:
        """The sequence file of this rank: the one given with, above rank 0, `_dp` and the rank."""
        if self.sequence_file is None or self.data_parallel_rank == 0:
            return self.sequence_file
        return self.sequence_file.with_name(f"{self.sequence_file.name}_dp{self.data_parallel_rank}")

    @property
    def wire(self) -> Dialect:
        """The dialect."""
        return find_dialect(self.dialect)

    @property
    def begins_anew_on_join(self) -> bool:
        """Whether a reader that joins is told everything."""
        return self.replay_endpoint is None if self.snapshot_on_join is None else self.snapshot_on_join

    @property
    def is_active(self) -> bool:
        """Whether this rank publishes."""
        return self.tensor_rank == 0

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can read the events."""
        return not self.events.is_local or (self.replay is not None and not self.replay.is_local)
