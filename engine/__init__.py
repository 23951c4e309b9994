"""What computes: model, pages, recall. Knows nothing of the command line, HTTP or gates."""

import os

# The threads of torch's CPU kernels wait for each other after every operation. If they spin, one core that another
# program uses stalls them all: 64 decode steps took over 100 s on two cores at load 9, and 4.7 s when they sleep.
# Read once, when torch is first imported; somebody's own choice stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
