"""`python tests/support/golden.py DIR` over the real daemon, as a person starts it."""

import subprocess
import sys


def test_the_tiny_golden_agrees_through_the_daemon(root, tiny_dir, tmp_path):
    tool = root / "tests" / "support" / "golden.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(tiny_dir)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("agrees")
