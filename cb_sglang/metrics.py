"""Prometheus metrics of the service, ``cacheback_*``, on SGLang's own ``/metrics`` (``--enable-metrics``).

SGLang collects by prometheus_client's multiprocess mode: every metric lies in a file of the folder that
PROMETHEUS_MULTIPROC_DIR names, and ``/metrics`` reads the files. The client looks at that variable when it is first
imported, so it is imported here only when ``Metrics`` is made, which must be after SGLang has started. Without
``--enable-metrics`` the same numbers are counted in memory and nobody reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cb_sglang import wire

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from cb_sglang.admission import AdmissionState
    from cb_sglang.registry import Amounts

MAX_LABEL_VALUES = 64
OTHER = "other"
REGISTRATION = "registration"
"""The reason of a miss that a registration pays for. A message's reasons are those of wire.CacheMiss."""

_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_POSITIONS = tuple(float(4**n) for n in range(1, 12))
_BYTES = tuple(float(4**n) for n in range(3, 15))


class BoundedLabel:
    """The values that one label may take: the first ``most`` that are seen, and ``OTHER`` for all that come later.

    A time series is kept for each value and never dropped, so what callers and operators name must not grow them.
    """

    def __init__(self, most: int = MAX_LABEL_VALUES) -> None:
        self._most = most
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen and len(self._seen) >= self._most:
            return OTHER
        self._seen.add(value)
        return value


class Metrics:
    """What is counted, in the words of the service. One a server process; for one thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """``registry``: who reads the metrics in one process; None: nobody, multiprocess mode reads the files."""
        import prometheus_client as client

        at = client.CollectorRegistry() if registry is None else registry
        self._tenant, self._selector, self._code = BoundedLabel(), BoundedLabel(), BoundedLabel()

        def counter(name: str, text: str, *labels: str) -> client.Counter:
            return client.Counter(f"cacheback_{name}", text, labels, registry=at)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> client.Histogram:
            return client.Histogram(f"cacheback_{name}", text, labels, buckets=buckets, registry=at)

        def gauge(name: str, text: str, *labels: str) -> client.Gauge:
            # Only the HTTP process sets them; of files that an earlier one has left, the latest number counts.
            return client.Gauge(f"cacheback_{name}", text, labels, registry=at, multiprocess_mode="mostrecent")

        self._messages = counter("messages_total", "Messages made.", "selector", "encoding")
        self._of_tenant = counter("tenant_messages_total", "Messages made for a tenant.", "tenant")
        self._grants = counter("grants_total", "Messages by the limit that bound their budget.", "limit")
        self._errors = counter("errors_total", "Calls and transfers that failed, by error code.", "code")
        self._seconds = histogram(
            "message_seconds",
            "Of a message: waiting for admission, in the engine, in all.",
            _SECONDS,
            "stage",
        )
        self._kept = histogram("message_kept_positions", "Positions that a message kept.", _POSITIONS)
        self._sender = histogram("message_sender_positions", "Positions of a message's sender.", _POSITIONS)
        self._payload = histogram("message_payload_bytes", "Bytes of what a receiver needs of a message.", _BYTES)
        self._cache = counter("cache_positions_total", "Sender positions found in the cache, or computed.", "result")
        self._misses = counter(
            "cache_misses_total", "Messages and registrations whose sender the cache did not hold whole.", "reason"
        )
        self._registrations = counter("registrations_total", "Senders registered or extended.")
        self._requests = gauge("requests", "Requests waiting for a turn, or in the engine.", "state")
        self._work = gauge("work", "Their work: query rows times sender positions.", "state")
        self._rows = gauge("query_rows", "Their query rows.", "state")
        self._senders = gauge("senders", "Senders registered.")
        self._positions = gauge("positions", "Positions of the registered senders.")
        self._row_bytes = gauge("row_bytes", "Bytes of the registered senders' continuous rows.")
        self._pinned = gauge("pinned_positions", "Positions that are pinned.")
        self._tenants = gauge("tenants", "Tenants that have a sender.")

    def message(self, message: wire.Message, tenant: str) -> None:
        """A message that leaves."""
        self._messages.labels(self._selector(message.selector), message.encoding).inc()
        self._of_tenant.labels(self._tenant(tenant)).inc()
        if message.grant is not None:
            self._grants.labels(message.grant.limit).inc()
        timings = message.timings
        self._seconds.labels("queue").observe(timings.queue_seconds)
        self._seconds.labels("engine").observe(timings.engine_seconds)
        self._seconds.labels("total").observe(timings.total_seconds)
        self._kept.observe(len(message.positions))
        self._sender.observe(message.sender_positions)
        self._payload.observe(message.payload_bytes)
        self._cached(message.cached_positions, message.sender_positions, message.cache_miss)

    def registered(self, sender: wire.Sender, *, missed: bool) -> None:
        """A sender as a registration or an extension answers it. ``missed``: the cache did not hold it whole."""
        self._registrations.inc()
        if sender.cached_positions is not None:
            self._cached(sender.cached_positions, sender.positions, REGISTRATION if missed else None)

    def error(self, code: str) -> None:
        """A call, or one pair of a transfers call, that was answered with this error code."""
        self._errors.labels(self._code(code)).inc()

    def load(self, admission: AdmissionState, usage: Amounts, *, tenants: int) -> None:
        """The load now: of the admission, of the registry, and how many tenants have a sender."""
        for state, load in (("queued", admission.queued), ("running", admission.running)):
            self._requests.labels(state).set(load.requests)
            self._work.labels(state).set(load.work)
            self._rows.labels(state).set(load.rows)
        self._senders.set(usage.senders)
        self._positions.set(usage.positions)
        self._row_bytes.set(usage.row_bytes)
        self._pinned.set(usage.pinned_positions)
        self._tenants.set(tenants)

    def _cached(self, cached: int, positions: int, reason: str | None) -> None:
        self._cache.labels("hit").inc(cached)
        self._cache.labels("miss").inc(max(0, positions - cached))
        if reason is not None:
            self._misses.labels(reason).inc()
