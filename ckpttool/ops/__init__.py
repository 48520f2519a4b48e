"""One file per command: it builds a plan, hands it to execute, and turns what comes back into a result object."""
