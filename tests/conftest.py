"""What holds for all tests."""

import os

# As the command line does it, and before numpy is imported: a process with threads cannot fork the workers of a merge,
# and has to start an interpreter for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
