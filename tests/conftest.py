from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.harness import Service


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services that end with the test."""
    services: list[Service] = []

    def start(*options: str, start: bool = True, module: str = "salus") -> Service:
        folder = tmp_path / str(len(services))
        folder.mkdir()
        services.append(Service(folder, *options, start=start, module=module))
        return services[-1]

    yield start
    for service in services:
        service.stop()
