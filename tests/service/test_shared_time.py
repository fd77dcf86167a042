"""Jobs in different lanes have the device at the same time, and its time is shared out among them."""

from __future__ import annotations

import sys

from tests.service.harness import SOURCE, eventually


def test_shares_are_equal_also_where_one_has_a_lane_to_itself(serve):
    """Two lanes, three jobs: what each gets of the device is the same though one could run all the time."""
    service = serve("--policy", "fair", "--capacity", "800MiB")
    script = service.folder / "job.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(SOURCE)!r})\n"
        "from salus.client.lease import of_this_process\n"
        "lease = of_this_process()\n"
        # One core is the device: two that run at the same time are half as fast.
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while True:\n"
        "    lease.begin()\n"
        "    sum(range(300_000))\n"
        "    lease.end()\n"
    )
    for name in "abc":
        service.salus_in_background(
            "run", "--name", name, "--persistent", "10MiB", "--ephemeral", "350MiB", "--", sys.executable, str(script)
        )
    eventually(lambda: len([1 for row in service.jobs().values() if row["iterations"] > 50]) == 3, "all run")
    assert sorted(row["lane"] for row in service.jobs().values()) in ([1, 1, 2], [1, 2, 2])
    before = {name: row["iterations"] for name, row in service.jobs().items()}
    eventually(lambda: service.jobs()["a"]["iterations"] > before["a"] + 200, "a while has passed")
    parts = [row["iterations"] - before[name] for name, row in service.jobs().items()]
    assert max(parts) / min(parts) < 1.25, parts
