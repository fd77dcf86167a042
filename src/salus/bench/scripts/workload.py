"""An ordinary script that trains, or serves, one of the models of the experiments. It knows nothing of Salus.

It builds its model, says "ready", and waits for the file --go to be there: whatever starting up costs is over then, on
every side alike. --at seconds after the moment that the file was made it begins. It prints one line of JSON: when it
began, when each iteration ended (on the clock of the machine), and how much memory it used at the most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import models  # type: ignore[import-not-found]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--seconds", type=float, help="go on for so long, and for as many iterations at the least")
parser.add_argument("--serve", action="store_true", help="inference, not training")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--go")
parser.add_argument("--at", type=float, default=0.0)
parser.add_argument("--block", type=int, help="before each block, wait for a line of input; at its end, stop")
parser.add_argument("--late", action="store_true", help="build the model when it begins, without a warm-up")
parser.add_argument("--warm-up", type=int, default=0, help="iterations before it says that it is ready")


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.device != "cpu":
        torch.zeros(1, device=options.device)
    if options.late:
        _wait_for_clock(options.go, options.at)
    model, loss_of = models.build(options.model, options.batch, options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        if options.serve:
            with torch.no_grad():
                loss_of().item()
            return
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        loss.item()

    model.train(not options.serve)
    if not options.late:
        for _ in range(options.warm_up):
            step()
        if options.go:
            _wait_for_clock(options.go, options.at)
    began = time.monotonic()
    ends: list[float] = []
    seconds: list[float] = []
    until = began + (options.seconds or 0.0)
    while len(ends) < options.iterations or time.monotonic() < until:
        if options.block and len(ends) % options.block == 0:
            print("block", flush=True)
            if not sys.stdin.readline():
                break
        start = time.monotonic()
        step()
        ends.append(time.monotonic())
        seconds.append(ends[-1] - start)
    peak = torch.cuda.max_memory_allocated() if options.device != "cpu" else 0
    print(json.dumps({"began_s": began, "ends_s": ends, "seconds": seconds, "peak_bytes": peak}), flush=True)


def _wait_for_clock(go: str, at_s: float) -> None:
    print("ready", flush=True)
    while not os.path.exists(go):
        time.sleep(0.005)
    # The clock of the machine, which is the same in all processes, as the file says it.
    start = float(Path(go).read_text() or time.monotonic()) + at_s
    time.sleep(max(0.0, start - time.monotonic()))


if __name__ == "__main__":
    main()
