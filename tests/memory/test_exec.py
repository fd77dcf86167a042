"""A process that replaces itself has lost all it had mapped, and may use the device again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from salus.protocol.page import Page
from salus.service.job import has_page
from tests.service.harness import SOURCE

JOB = Path(__file__).parent / "exec_job.py"


def test_a_process_that_replaces_itself_in_mid_iteration_is_let_in_again(serve):
    service = serve("--capacity", "4GiB")
    done = service.salus("run", "--name", "j", "--", sys.executable, str(JOB), str(SOURCE), "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    row = service.jobs()["j"]
    assert (row["iterations"], row["state"]) == (3 * 9 + 10, "done")


def test_a_process_shows_whether_it_still_has_the_page_it_was_given():
    page, descriptor = Page.create()
    assert has_page(os.getpid())
    page.close()
    os.close(descriptor)
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        assert not has_page(other.pid)
    finally:
        other.communicate()
    assert has_page(2**22 + 1), "one that cannot be looked at may have it"
