"""CUDA of any capability on fake tensors, without a GPU: everything private of torch and Triton."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rope_ext.attention import flex
from rope_ext.attention.cards import Card

# A build of torch for CPUs has no CUDA device that the autograd engine could ask for streams.
_DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
const c10::Device first(c10::DeviceType::CUDA, 0);
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return first; }
  c10::Device exchangeDevice(c10::Device) const override { return first; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, first);
  }
};
struct Hooks : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
extern "C" void mock_device() {
  static Guard guard;
  static Hooks hooks;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
  // The hooks have no members and were created with torch: replace their virtual table.
  auto& found = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&found), &hooks, sizeof(void*));
}
"""


class _AllocatedError(Exception):
    """Triton knows the bytes of shared memory."""


@contextlib.contextmanager
def mocked(
    card: Card, compiled: list[dict[str, Any]] | None = None, whole: bool = True
) -> Iterator[None]:
    """CUDA is the card, on fake tensors only.

    ``compiled`` gets each kernel; if it is None, Triton compiles none.

    For a process of its own: the device stays. Unless ``whole``, Triton stops when it has
    allocated shared memory.
    """
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler as nvidia
    from triton.compiler import ASTSource

    def only_compile(kernel: Any, *_given: Any, **_options: Any) -> None:
        if compiled is None:
            return
        source = kernel.fn.src
        template = "BLOCK_N" in source
        # The sizes that inductor would try for other kernels differ in speed only.
        for chosen in kernel.configs if template else kernel.configs[:1]:
            meta = kernel._create_compile_meta(chosen)
            code = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
            options = kernel._create_compile_options(chosen, meta)
            try:
                shared = triton.compile(code, target=target, options=options).metadata.shared
            except _AllocatedError as error:
                (shared,) = error.args
            blocks = re.findall(r"(BLOCK_[MN][12]?) : tl.constexpr = (\d+)", source)
            compiled.append(
                {
                    "name": kernel.inductor_meta["kernel_name"],
                    "shared": shared,
                    "stages": chosen.num_stages,
                    "warps": chosen.num_warps,
                    **{name: int(value) for name, value in blocks},
                }
            )

    def allocate(_backend: Any, module: Any, _metadata: Any, options: Any, arch: int) -> None:
        passes = nvidia.passes
        manager = nvidia.ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = nvidia.get_ptx_version_from_options(options, arch)
        nvidia.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, version)
        manager.run(module, "allocate")
        raise _AllocatedError(module.get_int_attr("ttg.shared"))

    def lower(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        compile_fx_inner(graph, inputs, **options)

        def run(given: list[Any]) -> Any:  # on the fake tensors
            mine = list(given)
            given.clear()
            return graph(*mine)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_only(function: Any, **options: Any) -> Any:
        return compile(function, backend=backend, **options)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=lower)

    compile = torch.compile
    arch = 10 * card.capability[0] + card.capability[1]
    target = GPUTarget("cuda", arch, 32)
    properties = types.SimpleNamespace(
        name="mocked",
        gcnArchName="",
        major=card.capability[0],
        minor=card.capability[1],
        shared_memory_per_block_optin=card.shared,
        multi_processor_count=80,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        total_memory=24 * 2**30,
    )
    cuda = {
        "_get_device_properties": lambda index: properties,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_rng_state": lambda *given: torch.zeros(1),
        "set_rng_state": lambda *given: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value, create=True))
        for place, name, value in (
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
            (CudaInterface, "current_device", lambda: 0),
            (CachingAutotuner, "precompile", only_compile),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (joint_graph, "lazy_init", lambda *given: None),  # its patterns are of real tensors
            (torch, "compile", compile_only),
            (flex, "_COMPILERS", ()),  # raise every error
        ):
            stack.enter_context(patch.object(place, name, value, create=True))
        settings = {
            "compile_threads": 1,
            "force_disable_caches": True,
            "joint_graph_constant_folding": False,  # it computes on the device
        }
        stack.enter_context(config.patch(settings))
        if not whole:
            stack.enter_context(patch.object(nvidia.CUDABackend, "make_llir", allocate))
        driver = types.SimpleNamespace(get_current_target=lambda: target)
        triton.runtime.driver.set_active(driver)
        for known in vars(_triton).values():  # from before there was a GPU
            getattr(known, "cache_clear", lambda: None)()
        with tempfile.TemporaryDirectory() as folder:
            _library(Path(folder)).mock_device()
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _library(folder: Path) -> ctypes.CDLL:
    from torch.utils import cpp_extension

    source = folder / "device.cpp"
    library = folder / "device.so"
    source.write_text(_DEVICE)
    options = [f"-I{path}" for path in cpp_extension.include_paths()]
    options += [f"-L{path}" for path in cpp_extension.library_paths()]
    compiler = os.environ.get("CXX", "c++")
    command = [
        compiler,
        "-std=c++20",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
        *options,
    ]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    return ctypes.CDLL(str(library))
