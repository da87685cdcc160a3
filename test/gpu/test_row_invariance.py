"""Row invariance of every decode operator on the GPU at the shapes of one of four tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from ops.row_cases import Sizes, check_kda, check_mla, check_rows, row_cases
from sgling_kernel import dispatch

POOL, COUNTS = 160, (1, 2, 6, 7, 8, 9, 16, 17, 25, 64, 160)
PRODUCTS = (
    (5128, 2560), (2560, 1024), (2120, 2560), (3072, 2560), (2560, 1536), (512, 2560), (2560, 5120), (39296, 2560)
)  # fmt: skip
SIZES = Sizes(PRODUCTS, ((2560, 8), (2560, 32)), 8, 2560, 512, 192, 39296)
FORMS = pytest.mark.parametrize("cuda_kernels", [True, False], ids=["cuda", "triton"])


@pytest.fixture(autouse=True)
def _on_the_gpu(cuda_kernels):
    torch.set_default_device("cuda")
    dispatch.set_kernel_switches(cuda_kernels=cuda_kernels)
    yield
    dispatch.set_kernel_switches()
    torch.set_default_device("cpu")
    torch.cuda.empty_cache()


@FORMS
@pytest.mark.parametrize("name", row_cases(SIZES, POOL))
def test_a_row_depends_on_itself_alone(name):
    check_rows(row_cases(SIZES, POOL)[name](), COUNTS, draws=4)


@FORMS
def test_verify_rows_are_decode_steps():
    check_kda(heads=8, dim=128, widths=(1, 2, 6, 9, 17))


@FORMS
def test_attention_rows_are_decode_steps():
    check_mla(heads=8, length=1000, widths=(1, 2, 6, 9, 17))
    check_mla(heads=8, length=8000, widths=(6,))
