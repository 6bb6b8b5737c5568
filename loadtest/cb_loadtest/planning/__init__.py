"""Predictions without a server: what a model costs on a GPU, and what many agents do to many servers."""
