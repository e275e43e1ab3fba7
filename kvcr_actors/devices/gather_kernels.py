# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The kernel of both directions, in Triton: rows of pages to or from page-first staging, all pools in one launch."""

# No postponed annotations here: Triton reads `tl.constexpr` from the annotation itself.
from typing import Any

import triton
import triton.language as tl


@triton.jit
def move_rows(
    table: tl.tensor,
    header: tl.tensor,
    plan: tl.tensor,
    staging: tl.tensor,
    POOLS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    TO_STAGING: tl.constexpr,  # noqa: N803
) -> None:
    """Move `ROWS` rows of up to `COLUMNS` words; a row is a chunk of one plane of one page.

    `table` (int64) has for each pool (index of its first plane address, words a plane, bytes from page to page), then
    every plane's address. `header` (int64) is a part's header of `copy_program.encode`, `plan` the buffer it points
    into. `EVEN` says that every plane is a whole number of rows, `ALIGNMENT` what every address is a multiple of.
    """
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    program = tl.program_id(0)
    pool = 0
    for other in tl.static_range(1, POOLS):
        pool = tl.where(program >= tl.load(header + other * 6), other, pool)
    first_program = tl.load(header + pool * 6).to(tl.int32)
    pages = tl.load(header + pool * 6 + 1).to(tl.int32)
    index = tl.load(header + pool * 6 + 2)
    offset = tl.load(header + pool * 6 + 3)
    first_plane = tl.load(header + pool * 6 + 4).to(tl.int32)
    planes = tl.load(header + pool * 6 + 5).to(tl.int32)
    addresses = tl.load(table + pool * 3).to(tl.int32)
    words = tl.load(table + pool * 3 + 1).to(tl.int32)
    page_stride = tl.load(table + pool * 3 + 2)

    chunks = tl.cdiv(words, COLUMNS)
    row = (program - first_program) * ROWS + tl.arange(0, ROWS)
    live = row < pages * planes * chunks
    chunk = row % chunks
    plane = row // chunks % planes
    page = row // (chunks * planes)
    device_page = tl.load(plan + index + page, mask=live, other=0)
    address = tl.load(table + addresses + first_plane + plane, mask=live, other=0)

    columns = tl.arange(0, COLUMNS)
    in_plane = chunk.to(tl.int64) * (COLUMNS * word_bytes)
    device = (address + device_page * page_stride + in_plane).to(tl.pointer_type(WORD))
    staged = staging + (offset + (page.to(tl.int64) * planes + plane) * words * word_bytes + in_plane)
    staged = staged.to(tl.pointer_type(WORD), bitcast=True)
    # The hints make the accesses 16 bytes wide: the compiler cannot see alignment through loaded addresses.
    device = tl.max_contiguous(tl.multiple_of(device[:, None] + columns[None, :], (ALIGNMENT, ALIGNMENT)), (1, COLUMNS))
    staged = tl.max_contiguous(tl.multiple_of(staged[:, None] + columns[None, :], (ALIGNMENT, ALIGNMENT)), (1, COLUMNS))
    mask = live[:, None] & (columns[None, :] < COLUMNS)
    if not EVEN:
        left = tl.multiple_of(words - chunk * COLUMNS, ALIGNMENT // word_bytes)
        mask = mask & (columns[None, :] < left[:, None])
    # Evicted first: the bytes pass through once, and the model's own data should stay in the cache.
    if TO_STAGING:
        content = tl.load(device, mask=mask, eviction_policy="evict_first")
        tl.store(staged, content, mask=mask, eviction_policy="evict_first")
    else:
        content = tl.load(staged, mask=mask, eviction_policy="evict_first")
        tl.store(device, content, mask=mask, eviction_policy="evict_first")


class RowKernel:
    """The kernel for one device's constants (`move_rows`' constexpr arguments up to `EVEN`, in order), either way.

    After the first launch the compiled kernel is called directly, which saves the compiler's look-up: every pointer is
    16-byte aligned at every launch, so that it stays the right one.
    """

    def __init__(self, *constants: object) -> None:
        self._constants = constants
        self._compiled: dict[bool, Any] = {}

    def launch(
        self, table: object, header: object, plan: object, staging: object, programs: int, *, to_staging: bool
    ) -> None:
        """Launch `programs` programs on the current stream."""
        arguments = (table, header, plan, staging, *self._constants, to_staging)
        compiled = self._compiled.get(to_staging)
        if compiled is None:
            # The interpreter has nothing compiled to give, and is asked each time.
            self._compiled[to_staging] = move_rows[(programs,)](*arguments, num_warps=4)
        else:
            compiled[(programs, 1, 1)](*arguments)


WORDS: dict[int, object] = {1: tl.uint8, 4: tl.int32}
"""The kernel's word types by their size in bytes."""
