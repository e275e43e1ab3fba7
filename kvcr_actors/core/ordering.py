"""The order that readers of inventory events rely on: parents are stored first, leaves removed first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcr_actors.types import PageKey


def parents_first(pages: Mapping[PageKey, PageKey | None]) -> list[PageKey]:
    """Order keys so that none comes before its parent; `pages` maps each key to its parent, held or not.

    What needs no other place keeps it. A loop, which only damaged data has, ends at the key that closes it.
    """
    ordered: list[PageKey] = []
    seen: set[PageKey] = set()
    for key, parent in pages.items():
        if key in seen:
            continue
        if parent not in pages or parent in seen:
            seen.add(key)
            ordered.append(key)
            continue
        chain: list[PageKey] = []
        step: PageKey | None = key
        while step is not None and step in pages and step not in seen:
            seen.add(step)
            chain.append(step)
            step = pages[step]
        ordered.extend(reversed(chain))
    return ordered


def leaves_first(keys: Iterable[PageKey], parents: Mapping[PageKey, PageKey | None]) -> list[PageKey]:
    """Order keys so that none comes before a key below it; `parents` knows the parent of each that is held."""
    named = list(dict.fromkeys(keys))
    gone: set[PageKey] = set()
    for key in named:
        if parents.get(key) in gone:
            break
        gone.add(key)
    else:
        return named
    ordered = parents_first({key: parents.get(key) for key in reversed(named)})
    ordered.reverse()
    return ordered
