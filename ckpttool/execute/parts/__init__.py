"""One part of a run (``--part K/N``): equal processes without a coordinator, numbered by launchers."""
