"""What hangs from a page is what was attached and not yet taken off, in that order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.events.children import ChildTable

names = st.binary(min_size=1, max_size=1).map(lambda name: bytes([name[0] % 4]))


@given(st.lists(st.tuples(st.booleans(), names, names)))
def test_a_table_of_children_is_a_dictionary_of_lists(changes: list[tuple[bool, bytes, bytes]]) -> None:
    table, model = ChildTable(), dict[bytes, list[bytes]]()
    for adds, parent, key in changes:
        known = model.setdefault(parent, [])
        if adds:
            table.add(parent, key)
            known += [key] if key not in known else []
        else:
            table.remove(parent, key)
            known[:] = [other for other in known if other != key]
    assert {parent: list(table.of(parent)) for parent in model} == model
    table.clear()
    assert not any(table.of(parent) for parent in model)
