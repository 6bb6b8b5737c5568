"""Selectors that the server's operator allows besides the built-in ones.

They run in every SGLang process, so the allow-list travels in an environment variable, which child processes inherit.
A client can only name what is on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cb_kernels import selectors
from cb_kernels.errors import ScoringInputError
from cb_sglang.errors import InvalidRequestError

VARIABLE = "CB_SGLANG_SELECTORS"


def allow(specs: Sequence[str]) -> None:
    """Put ``package.module:function`` specs on the list of this process and its children, and load them.

    Raises InvalidRequestError when one cannot be imported or is no selector.
    """
    os.environ[VARIABLE] = ",".join(specs)
    load_allowed()


def load_allowed() -> None:
    """Register what the list holds. Raises InvalidRequestError."""
    for spec in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            selectors.load(spec)
        except ScoringInputError as error:
            raise InvalidRequestError(f"--allow-selector: {error}") from error
