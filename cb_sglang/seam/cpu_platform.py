"""A CPU platform for SGLang that needs no AMX or AVX-512 kernels (sglang/srt/platforms/interface.py)."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

BACKEND_NAME = "cacheback_cpu"
# Host memory is shared with everything else on the machine, unlike a GPU's.
DEFAULT_MEMORY_FRACTION = 0.4


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """SGLang's native torch operators, with our attention backend as the default."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """What an operator left open (sglang/srt/arg_groups/platform_hook.py); explicit arguments stay."""
        if server_args.attention_backend in (None, "intel_amx"):
            # SGLang has defaulted to its AMX backend by now; this platform exists for machines without AMX.
            server_args.attention_backend = BACKEND_NAME
        if server_args.dtype == "auto":
            # bfloat16 is 3-6 times slower than float32 without AVX-512.
            server_args.dtype = "float32"
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEMORY_FRACTION

    def get_default_attention_backend(self) -> str:
        return BACKEND_NAME

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
