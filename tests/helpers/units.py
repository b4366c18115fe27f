"""Deployment units on disk for the tests: copies that may be damaged, with digests that fit again where wanted."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from eagle.kernels.plan import Plan


def copy_of(plan: Plan, folder: Path) -> Path:
    """A copy of the unit that a plan was built into."""
    shutil.copytree(plan.plugin.bundle.unit("host").folder, folder)
    return folder


def restamp(folder: Path) -> None:
    """Make the unit's digests fit its files, whatever they are now."""
    stamp = json.loads((folder / ".hawk_unit").read_text())
    for name in stamp["files"]:
        if (folder / name).exists():
            stamp["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / ".hawk_unit").write_text(json.dumps(stamp))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
