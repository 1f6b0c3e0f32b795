"""The examples run as they stand; each checks its own result and fails if that is wrong."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name):
    """-P: the installed package, not the source folder."""
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLES / name],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
