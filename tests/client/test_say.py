"""What code in a user's process says, and where it must not."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.service.harness import SOURCE

PROGRAM = "from salus.client.say import say; say('nobody hears this'); print('finished')"


def test_a_process_that_was_started_without_stderr_says_nothing_on_stdout():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, PROGRAM]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "finished\n"
