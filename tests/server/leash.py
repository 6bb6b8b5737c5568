"""Run a command and end its whole process group when the process that started this one is gone.

A test session that is killed cannot tear its server down; this does it for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> int:
    parent = os.getppid()
    child = subprocess.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.5)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
