"""Hardware: one file per family of targets; `target.py` says what passes and kernels may ask."""
