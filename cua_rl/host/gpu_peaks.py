"""Peak throughput of GPUs according to their makers' data sheets, to which published utilisation figures refer."""

import re
from collections.abc import Mapping

BFLOAT16_TFLOP_PER_S: Mapping[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "L4": 121.0,
    "A10G": 70.0,
}
"""Dense (without sparsity) bfloat16 with float32 accumulation, 10^12 operations per second, by words of the name that
the driver reports; of several that fit, the first counts."""


def data_sheet_tflop_per_s(device_name: str) -> float | None:
    """The peak of a device such as "NVIDIA H100 80GB HBM3"; None for another one, or for a slice of one (MIG)."""
    words = set(re.split(r"[ -]", device_name))
    if words & {"MIG", "Laptop", "D"}:
        return None
    return next((peak for name, peak in BFLOAT16_TFLOP_PER_S.items() if words.issuperset(name.split())), None)
