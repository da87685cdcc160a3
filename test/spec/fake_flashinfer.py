"""A stand-in for the flashinfer package: records every plan, refuses device tensors in it, attends by the plan."""

from __future__ import annotations

import sys
import types

import torch


class DeviceToHostCopyError(AssertionError):
    """A device value was read by the host."""


class OnDevice(torch.Tensor):
    """A CPU tensor that plays a GPU tensor: results of operations are too, and every way to read it raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        reads = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__", "__array__"}
        to_host = name == "to" and any(str(value) == "cpu" for value in (*args[1:], *(kwargs or {}).values()))
        if name in reads or to_host:
            raise DeviceToHostCopyError(f"{name} of a device tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


class Plan(dict):
    """Keyword arguments of one plan call, read as the real planner reads them."""

    def __init__(self, host: tuple[str, ...], arguments: dict):
        super().__init__(arguments)
        for name in host:
            value = arguments[name]
            assert value.dtype == torch.int32, name
            value.to("cpu").tolist()  # what a plan does first: free for host tensors, a wait for device tensors

    def spans(self, indptr: str) -> list[tuple[int, int]]:
        ends = self[indptr].tolist()
        return list(zip(ends, ends[1:], strict=False))


class _Wrapper:
    instances: list = []

    def __init__(self, workspace: torch.Tensor, layout: str = "NHD"):
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.plans: list[Plan] = []
        _Wrapper.instances.append(self)

    def _attend(self, q, keys, values, kv: str, causal: bool, window: int, scale: float) -> torch.Tensor:
        """Query rows q [N, H, D] over pages keys [.., KVH, D], values [.., KVH, V], request by request."""
        plan, out = self.plans[-1], []
        indices = plan["paged_kv_indices" if "paged_kv_indices" in plan else "kv_indices"].long()
        for (q0, q1), (k0, k1) in zip(plan.spans("qo_indptr"), plan.spans(kv), strict=True):
            slots = indices[k0:k1]
            group = q.shape[1] // keys.shape[1]
            key, value = (x[slots].float().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), key) * scale
            own = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
            position = torch.arange(k1 - k0)
            hidden = (position > own) if causal else torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
            if window >= 0:
                hidden = hidden | (position < own - window)
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value))
        return torch.cat(out).to(q.dtype)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def plan(self, **arguments) -> None:
        self.plans.append(Plan(("qo_indptr", "kv_indptr", "kv_len_arr"), arguments))

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache) -> torch.Tensor:
        plan = self.plans[-1]
        assert plan["causal"] and plan["page_size"] == ckv_cache.shape[1] == 1
        assert q_nope.shape[1:] == (plan["num_heads"], plan["head_dim_ckv"]) and kpe_cache.shape[-1] == q_pe.shape[-1]
        lens = [end - start for start, end in plan.spans("kv_indptr")]
        assert plan["kv_len_arr"].tolist() == lens
        keys = torch.cat((ckv_cache, kpe_cache), -1)
        return self._attend(torch.cat((q_nope, q_pe), -1), keys, ckv_cache, "kv_indptr", True, -1, plan["sm_scale"])


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, **arguments) -> None:
        self.plans.append(Plan(("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"), arguments))

    def run(self, q, paged_kv_cache) -> torch.Tensor:
        plan, (keys, values) = self.plans[-1], paged_kv_cache
        assert (q.shape[1], keys.shape[2]) == (plan["num_qo_heads"], plan["num_kv_heads"])
        shape = (plan["causal"], plan["window_left"], plan["sm_scale"])
        return self._attend(q, keys[:, 0], values[:, 0], "paged_kv_indptr", *shape)


def install(monkeypatch) -> list[_Wrapper]:
    """Make ``import flashinfer`` find the fake; returns the list that collects its wrappers."""
    package, mla = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mla")
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    package.mla = mla
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(_Wrapper, "instances", [])
    return _Wrapper.instances
