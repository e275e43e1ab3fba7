"""Refuses systems that the package cannot run on, before anything that only Linux has is imported."""

import sys

from kvcr_actors.errors import UnsupportedPlatformError

if sys.platform != "linux":
    raise UnsupportedPlatformError(f"this is {sys.platform}; kvcr-actors runs on Linux only, so use a Linux machine")
