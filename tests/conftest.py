"""What every test runs under: one torch thread, so that many small operations do not wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
