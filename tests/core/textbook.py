"""Replacement policies as their papers state them, over single pages: no tree, no shared code, no care for speed."""

from __future__ import annotations

from collections import OrderedDict, deque


def sieve(uses: list[int], capacity: int) -> list[bool]:
    queue: list[list[int]] = []  # [page, visited], oldest first
    hand = 0
    found: list[bool] = []
    for page in uses:
        entry = next((entry for entry in queue if entry[0] == page), None)
        found.append(entry is not None)
        if entry is not None:
            entry[1] = 1
            continue
        if len(queue) == capacity:
            while queue[hand % len(queue)][1]:
                hand %= len(queue)
                queue[hand][1] = 0
                hand += 1
            hand %= len(queue)
            del queue[hand]
        queue.append([page, 0])
    return found


def s3fifo(uses: list[int], capacity: int) -> list[bool]:
    small_limit = max(1, capacity // 10)
    ghost_limit = capacity - small_limit
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: OrderedDict[int, None] = OrderedDict()
    counts: dict[int, int] = {}
    found: list[bool] = []

    def evict() -> None:
        while True:
            if small and (len(small) >= small_limit or not main):
                page = small.popleft()
                if counts[page] > 1:
                    counts[page] = 0
                    main.append(page)
                    continue
                ghosts[page] = None
                if len(ghosts) > ghost_limit:
                    ghosts.popitem(last=False)
            else:
                page = main.popleft()
                if counts[page]:
                    counts[page] -= 1
                    main.append(page)
                    continue
            del counts[page]
            return

    for page in uses:
        found.append(page in counts)
        if page in counts:
            counts[page] = min(3, counts[page] + 1)
            continue
        if len(counts) == capacity:
            evict()
        if page in ghosts:
            del ghosts[page]
            main.append(page)
        else:
            small.append(page)
        counts[page] = 0
    return found


def two_queues(uses: list[int], capacity: int) -> list[bool]:
    first_limit, ghost_limit = max(1, capacity // 4), max(1, capacity // 2)
    first: deque[int] = deque()
    second: OrderedDict[int, None] = OrderedDict()
    ghosts: OrderedDict[int, None] = OrderedDict()
    found: list[bool] = []
    for page in uses:
        found.append(page in first or page in second)
        if page in second:
            second.move_to_end(page)
        if found[-1]:
            continue
        if len(first) + len(second) == capacity:
            if len(first) > first_limit or not second:
                gone = first.popleft()
                ghosts[gone] = None
                if len(ghosts) > ghost_limit:
                    ghosts.popitem(last=False)
            else:
                second.popitem(last=False)
        if page in ghosts:
            del ghosts[page]
            second[page] = None
        else:
            first.append(page)
    return found


def lfu(uses: list[int], capacity: int) -> list[bool]:
    ranks: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    age = 0
    found: list[bool] = []
    for now, page in enumerate(uses):
        found.append(page in ranks)
        if page not in ranks:
            if len(ranks) == capacity:
                gone = min(ranks, key=lambda held: ranks[held])
                age = max(age, ranks.pop(gone)[0])
            counts[page] = 0
        counts[page] += 1
        ranks[page] = (age + counts[page], now)
    return found
