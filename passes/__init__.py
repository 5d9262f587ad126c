"""Passes: graph to graph, one per file, each checkable alone. `pipeline.py` names and orders them."""
