"""Entry point of group ``sglang.srt.platforms``: SGLang on a plain CPU.

SGLang calls ``activate`` in every process. Without CUDA it gets our CPU platform; with CUDA it gets None and
runs exactly as if cb-sglang were not installed.
"""

from __future__ import annotations


def activate() -> str | None:
    """Dotted name of the platform class, or None to step aside."""
    import torch

    if torch.cuda.is_available():
        return None
    return "cb_sglang.seam.cpu_platform.PortableCpuPlatform"
