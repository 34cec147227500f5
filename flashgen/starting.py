"""What workers' forkserver imports first: a worker that cannot start ends in silence.

Its pool was stopped meanwhile, as by Ctrl-C; whoever waits for it learns of its death. Once it has started, what it
prints is kept (flashgen.workers).
"""

from __future__ import annotations

import sys

sys.excepthook = lambda *_: None
