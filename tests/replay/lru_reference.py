"""The sequential rule by itself: one LRU over whole blocks. It shares no code with the package.

`python tests/replay/lru_reference.py TRACE CAPACITY...` prints the block hits at each capacity.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path


def hits_at(requests: Iterable[Sequence[int]], capacity: int) -> int:
    """Count the blocks found: of each request the leading run that is resident; then its blocks are touched tail to
    head, and the least recently used blocks beyond the capacity leave.
    """
    return sum(hits_by_request(requests, capacity))


def hits_by_request(requests: Iterable[Sequence[int]], capacity: int) -> list[int]:
    """Count as `hits_at` does, one number a request."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits: list[int] = []
    for blocks in requests:
        run = 0
        while run < len(blocks) and blocks[run] in resident:
            run += 1
        hits.append(run)
        for block in reversed(blocks):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits


def main() -> None:
    """Print one line a capacity."""
    path, *capacities = sys.argv[1:]
    with Path(path).open() as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    asked = sum(map(len, requests))
    for capacity in map(int, capacities):
        print(f"{capacity}: {hits_at(requests, capacity)} of {asked}")


if __name__ == "__main__":
    main()
