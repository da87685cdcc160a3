"""The helpers every CUDA source is made of: in the emulation without a GPU, the real instructions on one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgling_kernel import cuda, dispatch
from sgling_kernel.cuda.build import BuildError, Target, build, library_path

SOURCE = Path(__file__).parent / "cuda" / "primitives.cu"
GPU = torch.cuda.is_available() and shutil.which("nvcc") is not None
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(not GPU and shutil.which("g++") is None, reason="neither nvcc nor g++ is installed")


@pytest.fixture(autouse=True)
def _emulated_without_a_gpu(request):
    if GPU:
        yield
        return
    with cuda.emulation():
        yield


def call(name: str, *arguments) -> None:
    cuda.launch(cuda.function(SOURCE, name), *arguments)


def test_mma_fragments_are_laid_out_as_documented():
    a, b = torch.randn(16, 16).bfloat16().to(DEVICE), torch.randn(8, 16).bfloat16().to(DEVICE)
    d = torch.empty(16, 8, device=DEVICE)
    call("tile", d, a, b)
    torch.testing.assert_close(d.double(), a.double() @ b.double().t(), atol=1e-5, rtol=1e-5)


def test_blocks_share_memory_shuffle_and_vote():
    x = torch.randn(3, 64, device=DEVICE)
    out, mirrored = torch.empty(3, 3, device=DEVICE), torch.empty(3, 64, device=DEVICE)
    call("blocks", out, mirrored, x, 3, -2.0)
    scaled = x.cpu() * -2.0
    torch.testing.assert_close(out[:, 0].cpu(), scaled.sum(1))
    assert torch.equal(out[:, 1].cpu(), scaled[:, :32].max(1).values)
    bits = out[:, 2].cpu().view(torch.int32)[:, None] >> torch.arange(32)
    assert torch.equal((bits & 1).bool(), scaled[:, :32] > 0)
    assert torch.equal(mirrored, x.flip(1))


def test_rounding_is_to_nearest_even_like_torch():
    special = [0.0, -0.0, 1.00390625, 1.01171875, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, -1e-40]
    x = torch.cat((torch.tensor(special), torch.randn(54))).to(DEVICE)
    pairs, single = (torch.empty(64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    call("rounding", pairs, single, x, 32)
    for got in (pairs, single):
        assert torch.equal(got.isnan(), x.isnan())
        assert torch.equal(got.nan_to_num(), x.bfloat16().nan_to_num())


@pytest.mark.skipif(GPU, reason="a GPU would hang or be damaged")
@pytest.mark.parametrize(
    ("fault", "text"), [(0, "never reach the barrier"), (1, "different operations"), (2, "beyond the dynamic shared")]
)
def test_the_emulation_refuses_faulty_kernels(fault, text):
    with pytest.raises(RuntimeError, match=text):
        call("faulty", fault)


def test_wrong_calls_are_refused():
    with pytest.raises(TypeError, match="takes 3 arguments, got 2"):
        call("tile", None, None)
    with pytest.raises(TypeError, match="no extern"):
        call("sgling_error")


def test_a_compiler_error_carries_the_compilers_words(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('#include "sgling.cuh"\nint f() { return undeclared_thing; }\n')
    with pytest.raises(BuildError, match="undeclared_thing"):
        build(source, Target(None))
    assert not library_path(source, Target(None)).exists()


def test_the_key_follows_source_and_headers(tmp_path):
    source, header = tmp_path / "a.cu", tmp_path / "a.cuh"
    source.write_text('#include "a.cuh"\n')
    paths = set()
    for text in ("// 1\n", "// 2\n"):
        header.write_text(text)
        paths.add(library_path(source, Target(None)))
    assert len(paths) == 2


def test_two_processes_build_one_library(tmp_path):
    source = tmp_path / "twice.cu"
    source.write_text('#include "sgling.cuh"\nextern "C" int f(int pdl, void* stream) { return 0; }\n')
    script = (
        "import sys; from pathlib import Path; from sgling_kernel.cuda.build import Target, build; "
        f"print(build(Path({str(source)!r}), Target(None)))"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {job.communicate(timeout=120)[0].strip() for job in jobs}
    assert len(printed) == 1 and Path(printed.pop()).is_file()
    assert all(job.returncode == 0 for job in jobs)


def test_switched_off_kernels_say_so():
    dispatch.set_kernel_switches(cuda_kernels=False)
    try:
        assert "SGLING_DISABLE_CUDA_KERNELS" in cuda.why_not()
    finally:
        dispatch.set_kernel_switches()
    assert cuda.why_not() is None
