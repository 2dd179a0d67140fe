#!/usr/bin/env python3
"""What a large run costs in Redis, and `gend status` with it: a Valkey of its own, made-up runs, no servers.

    tools/ledger_bench.py              914,000 and 10,000,000 rows, in batches of 128, half of them done

Memory is `used_memory` of INFO, the whole server. Status is timed as a user waits for it: a cold process, best of 5.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gend import valkey
from gend.ledger import Control, Ledger
from gend.loader import JOBS_AHEAD
from gend.records import PromptSet, Run, Sampling


def main() -> None:
    print("| rows | batches | Redis MB, half done | Redis MB, all done | gend status s |")
    print("|---|---|---|---|---|")
    for rows in (914_000, 10_000_000):
        with tempfile.TemporaryDirectory(prefix="gend-ledger-") as temporary:
            folder = Path(temporary) / "box"
            with valkey.hold(folder) as url:
                measure(folder, Ledger(url), rows)


def measure(folder: Path, ledger: Ledger, rows: int) -> None:
    prompt_set = PromptSet(fingerprint="0" * 64, source="made up", read=rows, accepted=rows, rejected=0, bytes=0)
    run = Run(
        id="large-000000000000", name="large", set=prompt_set, model="m", sampling=Sampling(), batch_size=128,
        created="2026-01-01T00:00:00.000+00:00", gend_version="0",
    )  # fmt: skip
    ledger.add_run(run, Control())
    ledger.add_done(run.id, set(range(0, run.batches, 2)))
    ledger.stock(run, JOBS_AHEAD)
    half = ledger.redis.info("memory")["used_memory"]
    config = folder / "config.toml"
    config.write_text(f'store = {{ url = "file://{folder}/store" }}\nwork = {{ folder = "{folder}" }}\n')
    command = [sys.executable, "-m", "gend", "--config", str(config), "status"]
    waited = []
    for _ in range(5):
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        waited.append(time.monotonic() - started)
    ledger.add_done(run.id, set(range(run.batches)))
    whole = ledger.redis.info("memory")["used_memory"]
    print(f"| {rows:,} | {run.batches:,} | {half / 1e6:.1f} | {whole / 1e6:.1f} | {min(waited):.2f} |", flush=True)


if __name__ == "__main__":
    main()
