"""A process that fills a disk store until it is killed: `python -m tests.stores.crash_writer FOLDER SEED`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.testing.store_driver import ALL_POOLS, chain
from tests.stores.pages import NAMESPACE, Pages

CAPACITY = 60
PREFIXES = [chain(str(index), 12) for index in range(12)]


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    backend = disk_backend(folder, CAPACITY, NAMESPACE, flush_pages=40)
    pages = Pages(backend)
    print("open", flush=True)
    while True:
        keys = rng.choice(PREFIXES)
        pages.write(keys, pools=rng.choice([0b001, 0b011, ALL_POOLS]))
        pages.read(keys, pools=0b001)
        backend.align(keys)


if __name__ == "__main__":
    main()
