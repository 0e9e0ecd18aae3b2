"""critkl on a pretend device. In a process of its own: torch keeps a device that is made known."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def test_the_cases_of_the_pretend_device():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "notebooks/device_cases.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout and "skipped" not in done.stdout
