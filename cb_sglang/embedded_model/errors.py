"""The one error of the embedded model."""

from __future__ import annotations

from cb_sglang.errors import CacheBackError


class EmbeddedModelError(CacheBackError):
    """The embedded model could not be put into the cache folder; the message says what to do about it."""

    status = 503
    code = "embedded_model_unavailable"
