from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

from kvcr_actors.replay.trace import shipped_trace

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sample_trace.py"


def test_the_script_makes_the_trace_that_ships(tmp_path: Path) -> None:
    made = tmp_path / "made.jsonl.gz"
    subprocess.run([sys.executable, SCRIPT, "--output", made], check=True, timeout=60)
    # Compressed bytes depend on the zlib at hand, so compare what they hold.
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(shipped_trace().read_bytes())
