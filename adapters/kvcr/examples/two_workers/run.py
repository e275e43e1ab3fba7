"""Two workers on this host: the second reuses the first one's pages through a router's hint.

The source computes a prompt and stores it. The target, which never saw the prompt, finds nothing without a hint, and
all but the last page with one. Prints the figures; exits with 1 if they are not those.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcr_actors_kvcr import FetchHint

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.two_workers.process import WorkerProcess


def main() -> int:
    """Run both workers and compare."""
    with WorkerProcess() as source, WorkerProcess() as target:
        stored = source.ask("store")
        cold = target.ask("reuse")
        hint = FetchHint(stored["endpoint"], frozenset(stored["hashes"])).envelope("request-2")
        warm = target.ask("reuse", hint=hint)
        state = target.ask("state")
        statuses = (target.quit(), source.quit())
    equal = warm["digests"] == stored["digests"][: len(warm["digests"])]
    faults = state["failed_deliveries"] + state["partial_deliveries"]
    print(f"cold reuse: {cold['reused']:,} of {cold['tokens']:,} tokens")
    print(f"with the hint: {warm['reused']:,} of {warm['tokens']:,} tokens")
    print(
        f"delivered: {state['delivered']} blocks, {state['spans_delivered']} spans, {state['bytes_delivered']:,} bytes"
    )
    print(f"failed or partial transfers: {faults}")
    print(f"digests {'equal' if equal else 'DIFFER'} on both sides")
    print(f"exit statuses: {statuses}")
    figures = (cold["reused"], warm["reused"], state["delivered"], state["spans_delivered"], state["bytes_delivered"])
    fine = figures == (0, 1_984, 31, 62, 227_540_992) and equal and not faults and statuses == (0, 0)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
