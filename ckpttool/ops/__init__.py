"""One file or folder per command: it builds a plan, hands it to execute, and makes a result of what comes back."""
