"""How a command ends."""

import subprocess
import sys

ENDING = """
import atexit, gc, sys
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))
sys.argv = ["hotlap", "recipes"]
from hotlap.cli import main
main()
"""


def test_python_does_not_collect_what_libraries_made_before_a_command_ends():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "frozen True")
