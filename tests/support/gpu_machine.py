"""A machine with everything, as `gpu_parts.found` would find it."""

from gpu_parts.found import PACKAGES, Machine

H200 = Machine("NVIDIA H200", (9, 0), 139.8, "580.1", "13.0", "13.0", "3.12.3", dict.fromkeys(PACKAGES, "1.0"))
