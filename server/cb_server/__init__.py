"""CacheBack over HTTP: our routes, mounted in SGLang's own FastAPI app."""
