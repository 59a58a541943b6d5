import pytest

from cua_rl.host.gpu_peaks import BFLOAT16_TFLOP_PER_S, data_sheet_tflop_per_s
from cua_rl.planning.gpu_speed import GPU_KINDS

PEAKS = (
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA GH200 480GB", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A10G", 70),
    ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA L40", None), ("NVIDIA GeForce RTX 4090", 165),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None), ("NVIDIA T1000", None),
)  # fmt: skip


@pytest.mark.parametrize(("name", "peak"), PEAKS)
def test_peaks_are_those_of_data_sheets_without_sparsity(name: str, peak: float | None) -> None:
    assert data_sheet_tflop_per_s(name) == peak


def test_the_planner_counts_with_the_same_peaks() -> None:
    assert GPU_KINDS["h100"].tflop_per_s == data_sheet_tflop_per_s("NVIDIA H100 80GB HBM3") == 989
    assert {gpu.tflop_per_s for gpu in GPU_KINDS.values()} <= set(BFLOAT16_TFLOP_PER_S.values())
