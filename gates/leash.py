"""`python -m gates.leash MODULE ARGUMENT...` runs a module that ends when whoever started it is gone.

The starter keeps this process's stdin open and writes nothing. However it ends, also by a kill that runs no handler,
the system closes the pipe: then the module gets the time to stop itself, and after that none.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE = 5.0  # seconds between being asked to stop and being cut


def _watch() -> None:
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)  # whatever handler the module set; without one, this is the end
    time.sleep(GRACE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch, name="leash", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
