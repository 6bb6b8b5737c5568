"""Registers senders in a process that is killed, again and again; prints the numbers of those that were acknowledged.

Run as ``registrar.py FILE KILLS SEED``. It forks, so that a round costs no start of Python; nothing here has threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from cb_sglang.database import Database
from cb_sglang.registry import Lease
from cb_sglang.rows import Rows
from cb_sglang.senders import RegisteredSender, SenderContent, new_sender
from cb_sglang.store import SenderStore

NUMBERS_A_ROUND = 100_000


def numbered(number: int) -> RegisteredSender:
    """A sender of up to a few pages, all of it known from the number."""
    ids, size = [number + 1] * (1 + number * 37 % 3_000), 4 * (1 + number % 50)
    rows = Rows(tuple(range(len(ids), len(ids) + 4)), "float32", size // 4, bytes(4 * size))
    content = SenderContent(input_ids=[*ids, 0, 0, 0, 0], rows=rows, private=[(0, 1)])
    return new_sender(f"tenant{number % 2}", "model", content, id_key=b"key", created=float(number))


def register_from(number: int, path: Path, acknowledgements: int) -> None:
    """Without end; each number is written once its sender is on the disk."""
    store = SenderStore(Database(path), model_fingerprint="model")
    while True:
        store.save(numbered(number), Lease(None, None))
        os.write(acknowledgements, b"%d\n" % number)
        number += 1


def killed_round(number: int, path: Path, moments: random.Random) -> bytes:
    """What one process acknowledged, from this number on, before it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            register_from(number, path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as acknowledgements:
        # One in two dies while it opens the file, or soon after, the others while they write.
        first = acknowledgements.readline() if moments.random() < 0.5 else b""
        time.sleep(moments.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError("the registrar ended by itself")
        return first + acknowledgements.read()


if __name__ == "__main__":
    chance = random.Random(int(sys.argv[3]))
    for round_number in range(int(sys.argv[2])):
        said = killed_round(round_number * NUMBERS_A_ROUND, Path(sys.argv[1]), chance)
        sys.stdout.write(said.decode())
