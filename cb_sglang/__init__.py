"""CacheBack for SGLang: receiver-conditioned messages from a live server's KV cache.

Importing this package imports neither SGLang nor torch; see docs/path-of-a-request.md for the way of a request.
"""

__version__ = "0.1.0"
