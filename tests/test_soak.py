"""A short soak: the long one is tools/soak.py without arguments."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parents[1] / "tools" / "soak.py"


def test_a_short_soak() -> None:
    """Random kills and cuts, with another seed each time: on failure the output says which, and where the logs are."""
    done = subprocess.run(
        [sys.executable, SOAK, "--rows", "120", "--servers", "2", "--faults", "7"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
