"""A message as a value: labels, positions and content must fit together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from payload_examples import ENCODINGS, example

from cb_sglang.errors import InvalidRequestError
from cb_sglang.message_payload import PayloadEncoding
from cb_sglang.rows import Rows

TWO_ROWS = Rows((0, 3), "float32", 1, bytes(8))


def test_spans_are_the_runs_of_positions() -> None:
    assert example("text").spans == ((0, 2), (4, 6), (8, 9))


@pytest.mark.parametrize(
    ("encoding", "size"),
    [
        ("token_ids", 5 * 4),
        ("embeddings", 5 * 3 * 2),
        ("mixed", 5 * 4 + 2 * 2 * 4),
        ("text", len("Señor 鯨 [...] 🐋".encode())),
    ],
)
def test_payload_bytes(encoding: PayloadEncoding, size: int) -> None:
    assert example(encoding).payload_bytes == size


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": ""}, "^id must be"),
        ({"sender": "a" * 257}, "^sender must be"),
        ({"model_fingerprint": 'a"b'}, "^model_fingerprint must be"),
        ({"tokenizer_fingerprint": "a\n"}, "^tokenizer_fingerprint must be"),
        ({"query_hash": "é"}, "^query_hash must be"),
        ({"index": -1}, "^index must be"),
        ({"index": 1 << 31}, "^index must be"),
        ({"sender_positions": 1 << 31}, "^sender_positions must be"),
        ({"positions": (0, 1, 4, 4, 8)}, "must ascend"),
        ({"positions": (1, 0, 4, 5, 8)}, "must ascend"),
        ({"positions": (-1, 1, 4, 5, 8)}, "sender's 9 positions"),
        ({"positions": (0, 1, 4, 5, 9)}, "sender's 9 positions"),
        ({"encoding": "kv"}, "unknown encoding kv"),
    ],
)
def test_what_no_encoding_allows(encoding: PayloadEncoding, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        example(encoding, **changes)


@pytest.mark.parametrize(
    ("encoding", "changes", "says"),
    [
        ("token_ids", {"token_ids": None}, "token_ids needs token_ids"),
        ("token_ids", {"rows": TWO_ROWS}, "takes no rows"),
        ("embeddings", {"token_ids": (1, 2, 3, 4, 5)}, "takes no token_ids"),
        ("embeddings", {"rows": None}, "needs rows"),
        ("mixed", {"rows": None}, "needs rows"),
        ("mixed", {"text": "x"}, "takes no text"),
        ("text", {"text": None}, "needs text"),
        ("text", {"rows": TWO_ROWS}, "takes no rows"),
        ("text", {"text": "\ud800"}, "surrogate"),
        ("token_ids", {"token_ids": (1, 2)}, "2 token_ids for 5 positions"),
        ("token_ids", {"token_ids": (1, 2, 3, 4, -1)}, "from 0 to 2"),
        ("token_ids", {"token_ids": (1, 2, 3, 4, 1 << 31)}, "from 0 to 2"),
        ("embeddings", {"rows": TWO_ROWS}, "2 rows for 5 positions"),
        ("embeddings", {"rows": Rows((0, 1, 2, 3, 5), "float16", 1, bytes(10))}, "one for each"),
        ("mixed", {"rows": Rows((0, 5), "float32", 1, bytes(8))}, "a row at 5"),
        ("mixed", {"rows": Rows((0, 2), "float32", 1, bytes(8))}, "must be 0"),
    ],
)
def test_content_must_fit_the_encoding(encoding: PayloadEncoding, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        example(encoding, **changes)


def test_importing_the_wire_form_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, cb_sglang.payload; sys.exit(bool({'torch', 'sglang'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
