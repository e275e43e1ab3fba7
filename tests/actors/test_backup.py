"""Backup and confirmation, with the scenarios of their faults by number."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.metrics import Metrics
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.types import NO_SLOT, BackupNode, SkipReason
from tests.actors.rig import Rig, chain, live, page_bytes, virtual

pytestmark = pytest.mark.anyio


async def test_a_life_of_all_orders_balances_and_ends_quiet() -> None:
    rig = Rig()
    async with rig.running():
        await live(rig)
        await rig.quiet()
        rig.check()
    rig.check()
    assert rig.failure is None
    assert rig.stats.prefetch.used == 1


async def test_scenario_44_any_number_of_nodes_of_a_step_are_one_submit_and_one_ack() -> None:
    rig = Rig(host_slots=128)
    async with rig.running():
        for nodes in (1, 8, 64):
            before = rig.stats.backup.submits
            ack = await rig.back_up(*(rig.node(chain(f"{nodes}/{n}", 1)) for n in range(nodes)))
            assert ack is not None
            assert len(ack.node_ids) == nodes
            assert rig.stats.backup.submits == before + 1
        await rig.quiet()
    rig.check()
    assert rig.stats.backup.steps == rig.stats.backup.submits == rig.device.submits == 3


async def test_steps_that_wait_together_are_never_merged_and_keep_their_own_fences() -> None:
    rig = Rig()
    a, b = chain("a", 2), chain("b", 2)
    async with rig.running():
        fence = anyio.Event()
        late = rig.node(a)
        blocked, free = rig.give_step(late, fence=fence), rig.give_step(rig.node(b))
        for pool in range(2):  # what the kernel behind the fence writes last counts
            rig.device.load(pool, late.pages[pool], b"".join(page_bytes(key, pool) for key in a))
        fence.set()
        for step in (blocked, free):
            ack = await rig.ack(step)
            assert ack is not None
            assert not ack.failed
        assert rig.stats.backup.submits == 2
        await rig.quiet()
    rig.check()


async def test_scenario_01_the_host_holds_what_the_kernel_before_the_fence_wrote() -> None:
    rig = Rig(host_slots=64, store_pages=None)
    async with rig.running():
        for number in range(10):
            keys = chain(f"{number}", 3)
            fence, node = anyio.Event(), rig.node(keys)
            for pool in range(2):
                rig.device.poison(pool, node.pages[pool])
            step = rig.give_step(node, fence=fence)
            await anyio.sleep(0.005)
            for pool in range(2):
                rig.device.load(pool, node.pages[pool], b"".join(page_bytes(key, pool) for key in keys))
            fence.set()
            await rig.ack(step)
            finished = await rig.restored(f"r{number}", keys)  # compares the bytes
            assert finished is not None
            assert finished.pages == 3
        await rig.quiet()
    rig.check()


async def test_scenario_40_a_child_is_refused_whose_parent_failed_in_the_same_step() -> None:
    rig = Rig(device_faults=FaultPlan({("to_host.side", 0): Fault.FAIL}))
    a, b = chain("a", 2), chain("b", 1)
    async with rig.running():
        parent = rig.node(a)
        child = rig.node(chain("a", 3)[2:], a[1], pools=(0,))
        other = rig.node(b, pools=(0,))
        ack = await rig.back_up(parent, child, other)
        assert ack is not None
        assert ack.node_ids == (other.node_id,)
        assert dict(ack.failed) == {
            parent.node_id: SkipReason.COPY_FAILED,
            child.node_id: SkipReason.PARENT_ABSENT,
        }
        assert ack.missing == ((child.node_id, a[0]),)
        assert rig.assembly.host.contents() == set(b)
        await rig.quiet()
        again = await rig.back_up(rig.node(chain("a", 3)))
        assert again is not None
        assert not again.failed
    rig.check()


async def test_scenario_40_a_child_is_refused_whose_parent_the_host_never_had() -> None:
    rig = Rig()
    async with rig.running():
        child = rig.node(chain("a", 2)[1:], chain("a", 2)[0])
        ack = await rig.back_up(child)
        assert ack is not None
        assert ack.failed == ((child.node_id, SkipReason.PARENT_ABSENT),)
        assert ack.missing == ((child.node_id, chain("a", 2)[0]),)
        assert rig.device.submits == 0
    rig.check()


async def test_every_node_below_one_that_failed_names_the_first_key_that_the_host_lacks() -> None:
    rig = Rig(host_slots=4, store_pages=None)
    a, b = chain("a", 4), chain("b", 7)
    async with rig.running():
        nodes = [rig.node(a[1:2], a[0]), rig.node(a[2:3], a[1]), rig.node(a[3:], a[2])]
        ack = await rig.back_up(*nodes)
        assert ack is not None
        assert ack.missing == tuple((node.node_id, a[0]) for node in nodes)
        ack = await rig.back_up(rig.node(a))  # from there on
        assert ack is not None
        assert not ack.failed
        rig.forget_host()
        ack = await rig.back_up(rig.node(b[:2]))
        assert ack is not None
        assert (ack.failed, ack.missing) == ((), ())
        big, below = rig.node(b[2:6], b[1]), rig.node(b[6:], b[5])
        ack = await rig.back_up(big, below)
        assert ack is not None
        assert dict(ack.failed) == {
            big.node_id: SkipReason.NO_HOST_MEMORY,
            below.node_id: SkipReason.PARENT_ABSENT,
        }
        assert ack.missing == ((below.node_id, b[2]),)
        await rig.quiet()
    rig.check()


@virtual
async def test_a_node_whose_pages_another_step_still_copies_is_done_only_when_they_are() -> None:
    rig = Rig(device_faults=FaultPlan({("to_host", 0): Fault.LATE}), late_s=2.0)
    keys = chain("a", 3)
    async with rig.running():
        first, second = rig.give_step(rig.node(keys)), rig.give_step(rig.node(keys))
        for step, reason in ((first, SkipReason.COPY_FAILED), (second, SkipReason.PARENT_ABSENT)):
            ack = await rig.ack(step)
            assert ack is not None
            assert [why for _, why in ack.failed] == [reason]
            assert [key for _, key in ack.missing] == [keys[0]] * (reason is SkipReason.PARENT_ABSENT)
            assert not ack.node_ids
        third = await rig.back_up(rig.node(keys))
        assert third is not None
        assert len(third.node_ids) == 1
        assert rig.assembly.host.contents() == set(keys)
        await rig.quiet()
    rig.check()


@virtual
async def test_late_copies_settle_as_failed_and_give_their_slots_back_only_when_quiet() -> None:
    rig = Rig(host_slots=4, store_pages=None, device_faults=FaultPlan({("to_host", 0): Fault.LATE}), late_s=30.0)
    async with rig.running():
        ack = await rig.back_up(rig.node(chain("a", 3)))
        assert ack is not None
        assert [why for _, why in ack.failed] == [SkipReason.COPY_FAILED]
        ledger = rig.assembly.ledger
        assert (ledger.open, ledger.quarantined, ledger.quarantined_bytes) == (1, 1, 3 * 29)
        assert rig.assembly.host.filling_pages == 3
        rig.check(quiet=False)
        refused = await rig.back_up(rig.node(chain("b", 2)))
        assert refused is not None
        assert [why for _, why in refused.failed] == [SkipReason.NO_HOST_MEMORY]
        await rig.ports_quiet()
        rig.check()
        taken = await rig.back_up(rig.node(chain("b", 2)))
        assert taken is not None
        assert not taken.failed
    rig.check()


@virtual
async def test_scenario_28_a_copy_that_never_ends_is_given_up_at_its_deadline() -> None:
    rig = Rig(device_faults=FaultPlan({("to_host", 0): Fault.STALL}))
    keys = chain("a", 2)
    async with rig.running():
        ack = await rig.back_up(rig.node(keys))
        assert ack is not None
        assert [why for _, why in ack.failed] == [SkipReason.COPY_FAILED]
        assert anyio.current_time() < 10
        rig.check(quiet=False)
        # A request for the pages waits for them no longer than its own deadline.
        answer = await rig.prefetched("r", keys)
        assert answer.account is not None
        rig.device.release()
        await rig.ports_quiet()
        rig.check()
        assert (await rig.back_up(rig.node(keys))).failed == ()  # type: ignore[union-attr]
        await rig.quiet()
    rig.check()


async def test_scenario_39_without_host_memory_a_node_is_skipped_and_nothing_half_there() -> None:
    rig = Rig(host_slots=4, store_pages=None)
    a = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(a))
        held = await rig.prefetched("r", a)
        assert held.account is None
        big, small = rig.node(chain("b", 2)), rig.node(chain("c", 1))
        ack = await rig.back_up(big, small)
        assert ack is not None
        assert ack.failed == ((big.node_id, SkipReason.NO_HOST_MEMORY),)
        assert ack.node_ids == (small.node_id,)
        assert rig.assembly.host.contents() == {*a, *chain("c", 1)}
        rig.give_cancel("r")
        await rig.reply("r")
        await rig.quiet()
    rig.check()
    assert rig.stats.backup.skipped == {SkipReason.NO_HOST_MEMORY: 1}


async def test_scenario_41_no_more_is_evicted_than_a_node_needs() -> None:
    rig = Rig(host_slots=8, store_pages=None)
    async with rig.running():
        for name in "abc":
            await rig.back_up(rig.node(chain(name, 2)))
        await rig.back_up(rig.node(chain("d", 5)))  # 5 are needed, 2 are free
        assert rig.stats.host_evicted == 3
        assert len(rig.assembly.host.contents()) == 8
        await rig.quiet()
    rig.check()


async def test_partly_present_nodes_copy_only_what_the_host_lacks() -> None:
    rig = Rig()
    keys = chain("a", 5)
    async with rig.running():
        await rig.back_up(rig.node(keys[:3]))
        moved = rig.stats.backup.bytes
        await rig.back_up(rig.node(keys))
        assert rig.stats.backup.bytes - moved == 2 * 29
        finished = await rig.restored("r", keys)
        assert finished is not None
        assert finished.pages == 5
        await rig.quiet()
    rig.check()


def test_malformed_nodes_are_refused_where_they_are_made() -> None:
    with pytest.raises(InvalidNodeError, match="names a key twice"):
        BackupNode(1, (b"a" * 32, b"a" * 32), ((1, 2), (NO_SLOT, NO_SLOT)))
    with pytest.raises(InvalidNodeError, match="lists 1 pages for 2 keys"):
        BackupNode(1, (b"a" * 32, b"b" * 32), ((1,), (2, 3)))


async def test_a_step_whose_launch_fails_counts_as_a_step_and_not_as_a_submit() -> None:
    rig = Rig(device_faults=FaultPlan({("to_host", 0): Fault.FAIL}))
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys[:1]))
        await rig.back_up(rig.node(keys[:1]), rig.node(keys[1:], keys[0]))
        await rig.back_up(rig.node(keys))  # nothing to copy
        await rig.quiet()
        backup = rig.stats.backup
        assert (backup.nodes, backup.steps, backup.submits) == (3, 2, 1)
        scraped = Metrics(lambda: rig.stats).render().decode()
        assert "kvcr_actors_backup_submits_total 1.0" in scraped
        assert "kvcr_actors_backup_steps_total 2.0" in scraped
    rig.check()
