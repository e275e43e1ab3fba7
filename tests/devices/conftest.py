"""Triton's kernels run in its interpreter where there is no GPU; it must be told before it is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Copies here are small: on busy cores, torch's threads spend ten times as long spinning for each other.
torch.set_num_threads(1)
