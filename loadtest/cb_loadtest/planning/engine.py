"""How long an engine takes for each kind of work: the interface, and the roofline from model and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cb_loadtest.planning.hardware import Hardware, HardwareError
from cb_loadtest.planning.model import ModelShape

# Share of a GPU's memory for weights and KV pool, as in SGLang's --mem-fraction-static.
MEMORY_FRACTION = 0.88


class Engine(Protocol):
    """Seconds of an engine that does one thing at a time; its KV pool in positions."""

    @property
    def name(self) -> str: ...

    @property
    def pool_positions(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def scoring_seconds(self, *, queries: int, rows: int, positions: int) -> float:
        """``queries`` queries of ``rows`` rows each over one cached sender, in one batch."""
        ...

    def prefill_seconds(self, *, rows: int, past: int = 0) -> float:
        """``rows`` new rows of one request after ``past`` cached positions."""
        ...

    def decode_seconds(self, *, sequences: int, positions: int, tokens: int) -> float:
        """``tokens`` steps of ``sequences`` sequences that begin at ``positions`` positions each."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Each stage takes the longer of its arithmetic and its memory traffic; the stages follow one another.

    overhead: seconds of one engine step (scheduling, launches) that nothing hides.
    """

    shape: ModelShape
    hardware: Hardware
    overhead: float = 0.001

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def pool_positions(self) -> int:
        """Raises HardwareError when the weights leave no room."""
        room = self.hardware.memory * MEMORY_FRACTION - self.shape.weights * self.shape.value_bytes
        positions = int(room // self.shape.kv_bytes_per_position)
        if positions < 1:
            raise HardwareError(
                f"{self.shape.name} needs {self.shape.weights * self.shape.value_bytes / 1e9:.0f} GB for its weights "
                f"and {self.hardware.name} has {self.hardware.memory * MEMORY_FRACTION / 1e9:.0f} GB for weights and "
                "KV; use more GPUs (--tp) or larger ones",
                param="gpu",
            )
        return positions

    @property
    def context_length(self) -> int:
        return self.shape.context_length

    def scoring_seconds(self, *, queries: int, rows: int, positions: int) -> float:
        """Linear layers, attention and moments; the sender's keys and values are read once for all queries."""
        total = queries * rows
        return (
            self.overhead
            + self._linear(tokens=total, logits=queries)
            + self._attention(rows=total, positions=positions, read=positions)
            + self._moments(queries=queries, rows=total, positions=positions)
        )

    def prefill_seconds(self, *, rows: int, past: int = 0) -> float:
        return (
            self.overhead
            + self._linear(tokens=rows, logits=1)
            + self._attention(rows=rows, positions=past + (rows + 1) // 2, read=past + rows)
        )

    def decode_seconds(self, *, sequences: int, positions: int, tokens: int) -> float:
        """Every sequence reads its own KV, also where sequences share a prefix."""
        middle = positions + tokens // 2
        step = (
            self.overhead
            + self._linear(tokens=sequences, logits=sequences)
            + self._attention(rows=sequences, positions=middle, read=sequences * middle)
        )
        return tokens * step

    def _linear(self, *, tokens: int, logits: int) -> float:
        shape = self.shape
        flops = 2 * (shape.active_weights * tokens + shape.head_weights * logits)
        return self.hardware.seconds(flops, shape.weights_read(tokens) * shape.value_bytes)

    def _attention(self, *, rows: int, positions: int, read: int) -> float:
        """``rows`` rows over ``positions`` positions each; ``read`` positions come from memory."""
        shape = self.shape
        sliding = shape.layers - shape.full_layers
        attended = shape.full_layers * positions + sliding * min(shape.window, positions)
        share = attended / (shape.layers * positions) if positions else 0.0  # sliding layers read only their window
        flops = 4 * rows * shape.heads * shape.head_dim * attended
        return self.hardware.seconds(flops, read * share * shape.kv_bytes_per_position)

    def _moments(self, *, queries: int, rows: int, positions: int) -> float:
        """Keys once more, and two float32 sums a query, KV head and position, written once and read once."""
        shape = self.shape
        flops = 2 * rows * shape.heads * shape.head_dim * shape.full_layers * positions
        keys = shape.full_layers * shape.kv_heads * shape.head_dim * shape.value_bytes * positions
        sums = queries * shape.full_layers * shape.kv_heads * positions * 2 * 4 * 2
        return self.hardware.seconds(flops, keys + sums)
