"""`salus` on the host device, with a made-up NVML: python -m tests.service.with_nvml serve ...

As on a GPU, every process has a context that no arena knows of, and that grows: SALUS_TEST_CONTEXT_MIB after 20
iterations, a fifth less before the first. So what was seen of a job comes in between whatever it says itself, as
nothing else on the host device does.
"""

from __future__ import annotations

import asyncio
import os

from salus.cli.main import main
from salus.protocol.page import Word
from salus.service import live as live_module
from salus.service.live import Live
from salus.service.sizes import Sizes

CONTEXT_BYTES = int(os.environ.get("SALUS_TEST_CONTEXT_MIB", "640")) << 20
LOOK_S = 0.05
GROWS_FOR = 20
"""Iterations; a hundredth with each."""


class SeenSizes(Sizes):
    def __init__(self, live: Live, *options: object) -> None:
        super().__init__(live, *options)  # type: ignore[arg-type]
        self._context_bytes = CONTEXT_BYTES
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        used = {}
        for job in self._live.jobs.values():
            if job.worker is not None and job.page is not None:
                words = job.page.words
                context = CONTEXT_BYTES * (80 + min(words[Word.ITERATIONS], GROWS_FOR)) // 100
                known = words[Word.PRIVATE_BYTES] - words[Word.OUT_BYTES] + words[Word.MADE_BYTES]
                used[job.worker.pid] = context + known
        self.gpu_seen(used, sum(used.values()))
        asyncio.get_running_loop().call_later(LOOK_S, self._look)


if __name__ == "__main__":
    live_module.Sizes = SeenSizes  # type: ignore[misc]
    main()
