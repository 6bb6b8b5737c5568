"""What an operator sets for the service; the command line fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cb_sglang.admission import AdmissionLimits
from cb_sglang.errors import InvalidRequestError
from cb_sglang.registry import SenderLimits
from cb_sglang.templates import DEFAULT_TEMPLATE, check_template


@dataclass(frozen=True, slots=True)
class Settings:
    """Every field has a default; the two limits have their own (registry.py, admission.py).

    data_dir:          where senders, the audit record and the server's secret are kept; None: in memory, gone with the
                       process.
    tenant_keys:       the file of tenants' keys; None: the environment's, or none.
    pin_share:         the part of the KV pool that pinned senders may hold together, 0 to 1.
    max_registrations: registrations under way at once; further ones are refused until one is done.
    max_audit:         how many records of sent messages are kept.

    Raises InvalidRequestError for values that cannot be used.
    """

    query_template: str = DEFAULT_TEMPLATE
    senders: SenderLimits = field(default_factory=SenderLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    data_dir: Path | None = None
    tenant_keys: Path | None = None
    pin_share: float = 0.5
    max_registrations: int = 64
    max_audit: int = 200_000

    def __post_init__(self) -> None:
        check_template(self.query_template)
        if not 0.0 <= self.pin_share <= 1.0:
            raise InvalidRequestError(f"pin_share must lie between 0 and 1, not {self.pin_share:g}", param="pin_share")
        for name in ("max_registrations", "max_audit"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
