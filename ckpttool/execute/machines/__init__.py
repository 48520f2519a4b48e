"""Runs on several machines: shares of a run, who gives them out, who does them, and processes with nobody in charge."""
