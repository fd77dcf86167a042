"""Wheels of what is installed in this environment, so that another can be made without a network."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def with_what_they_need(names: list[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    todo = list(names)
    while todo:
        one = distribution(todo.pop())
        if one.name in found:
            continue
        found[one.name] = one
        needs = [Requirement(text) for text in one.requires or []]
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def make_wheel(installed: Distribution, folder: Path) -> Path:
    """As it was before it was installed, without its programs."""
    tags = re.findall("^Tag: (.*)-(.*)-(.*)$", installed.read_text("WHEEL") or "", re.MULTILINE)
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    name = installed.name.replace("-", "_").replace(".", "_")
    path = folder / f"{name}-{installed.version}-{tag}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(path, "w") as wheel:
        info = ""
        for file in installed.files or []:
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            if file.parent.suffix == ".dist-info":
                info = str(file.parent)
                if file.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                    continue
            content = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow([file, f"sha256={digest}", len(content)])
            wheel.writestr(str(file), content)
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())
    return path
