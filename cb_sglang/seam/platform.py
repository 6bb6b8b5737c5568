"""Entry point of group ``sglang.srt.platforms``: SGLang on a plain CPU.

SGLang calls ``activate`` in every process. Without CUDA it gets our CPU platform; with CUDA it gets None and
runs exactly as if cb-sglang were not installed.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """Dotted name of the platform class, or None to step aside."""
    import torch

    if torch.cuda.is_available():
        return None
    # Scheduler, detokenizer and HTTP process share the cores; OpenMP threads that spin while they wait starve the
    # others. Set here, in the parent, because a child's runtime reads it when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return "cb_sglang.seam.cpu_platform.PortableCpuPlatform"
