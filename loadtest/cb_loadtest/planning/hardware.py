"""A GPU as a planner sees it: three numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cb_sglang.errors import InvalidRequestError


class HardwareError(InvalidRequestError):
    """The GPU is unknown, or one of its numbers makes no sense."""

    code = "invalid_hardware"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Data sheet values and how much of them a real engine reaches.

    flops:                  dense bfloat16 operations a second.
    bandwidth:              bytes a second from its memory.
    memory:                 bytes.
    compute_efficiency:     share of ``flops`` that large multiplications reach. 0.5 puts Qwen3-8B's scoring on an
                            H100 into the range that the project expects of today's kernels.
    bandwidth_efficiency:   share of ``bandwidth`` that reading weights and KV reaches.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    compute_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.85

    def __post_init__(self) -> None:
        for field in ("flops", "bandwidth", "memory"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise HardwareError(f"{field} must be a positive number, not {value:g}", param="gpu")
        for field in ("compute_efficiency", "bandwidth_efficiency"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise HardwareError(f"{field} must be above 0 and at most 1, not {value:g}", param=field)

    def seconds(self, flops: float, moved: float) -> float:
        """Time for work that overlaps ``flops`` operations with ``moved`` bytes: the longer of the two."""
        return max(flops / (self.flops * self.compute_efficiency), moved / (self.bandwidth * self.bandwidth_efficiency))

    def times(self, count: int) -> Hardware:
        """``count`` of them as one (tensor parallel), communication left out. Raises HardwareError."""
        if not 1 <= count <= 64:
            raise HardwareError(f"between 1 and 64 GPUs make a server, not {count}", param="tp")
        if count == 1:
            return self
        return replace(
            self,
            name=f"{count} x {self.name}",
            flops=self.flops * count,
            bandwidth=self.bandwidth * count,
            memory=self.memory * count,
        )


# Data sheets: dense bfloat16 FLOP/s, bytes/s, bytes. The SXM variants where there are several.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("A100", 312e12, 2.0e12, 80e9),
        Hardware("H100", 989e12, 3.35e12, 80e9),
        Hardware("H200", 989e12, 4.8e12, 141e9),
        Hardware("B200", 2_250e12, 8.0e12, 180e9),
        Hardware("L40S", 362e12, 0.864e12, 48e9),
        Hardware("RTX4090", 165e12, 1.008e12, 24e9),
    )
}


def parse_gpu(text: str) -> Hardware:
    """A name from ``GPUS``, or ``flops,bandwidth,memory`` in FLOP/s, bytes/s and bytes. Raises HardwareError."""
    known = GPUS.get(text.strip().upper())
    if known is not None:
        return known
    parts = text.split(",")
    if len(parts) == 3:
        try:
            flops, bandwidth, memory = map(float, parts)
        except ValueError:
            pass
        else:
            return Hardware("custom", flops, bandwidth, memory)
    raise HardwareError(
        f"{text!r} is no GPU; give one of {', '.join(GPUS)}, or three numbers as in 989e12,3.35e12,80e9 "
        "(FLOP/s, bytes/s, bytes)",
        param="gpu",
    )
