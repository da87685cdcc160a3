"""The node table names the file of every kernel of ours: one it does not find would be listed as a library's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def node_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import node_table

    return node_table


def test_every_cuda_kernel_has_a_file(node_table):
    sources = [path.read_text(encoding="utf-8") for path in node_table.PACKAGE.rglob("*.cu*")]
    kernels = sum(len(re.findall("__global__", source)) for source in sources)
    found = [file for (form, _), file in node_table.kernel_files().items() if form == "CUDA"]
    assert len(found) == kernels > 15
    assert node_table.form_of("void up_grouped_kernel<16, 5>(Up)") == "CUDA"  # it stands in a header
    assert node_table.form_of("ampere_bf16_s16816gemm") == "library"
