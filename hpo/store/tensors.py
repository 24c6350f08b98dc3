"""Files of tensors: written whole and flushed, by the user's umask, and never unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors on the CPU, by their names, and texts about them; the file is flushed when this returns."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # by the user's umask; safetensors would let no other user read
    save_file(dict(tensors), path, dict(about))
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())
