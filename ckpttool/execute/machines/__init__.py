"""A run on several machines: who gives out its tasks, who does them, and the same call for many items."""
