"""Build a CUDA runtime, an NCCL and an NVML that pretend, for the installed CUDA build of torch.

torch's own code on the host is then the real one: dispatch, allocator, process groups. See cuda.c
for what behaves and what does not. It needs a C compiler, and the headers in the wheels of NVIDIA
on which torch depends.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

_SOURCES = Path(__file__).parent
_TORCH_LIBRARIES = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_python.so",
    "libtorch_cuda_linalg.so",
)
# Keywords of nvcc in the headers, which have no meaning for gcc.
_KEYWORDS = """#pragma once
#define __host__
#define __device__
#define __global__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(a) __align__(a)
#define __specialization_static static
#define __noinline__
#define __forceinline__ inline
#define __no_return__
#define __location__(a)
#define __annotate__(a)
"""
_BLAS = """
int cublasCreate_v2(void **handle) { *handle = malloc(64); return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130401; return 0; }
size_t cublasLtGetVersion(void) { return 130401; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
typedef struct {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} Result;
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g,
                                   int n, Result *found, int *count) {
  found[0].workspace = 0, found[0].state = 0, *count = 1;
  return 0;
}
"""


def find_obstacle() -> str:
    """Return why the fake cannot be built on this machine; an empty text if it can."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        return "gcc and nm are needed"
    return (
        ""
        if _find_headers()
        else "torch is not a CUDA build whose wheels have the headers of CUDA 13 and NCCL"
    )


def build_fake_gpu(folder: Path) -> dict[str, str]:
    """Build the libraries in `folder`, and return the variables with which torch uses them."""
    headers, defined = (
        _find_headers(),
        "".join((_SOURCES / name).read_text() for name in ("cuda.c", "nccl.c")),
    )
    needed = _list_undefined_symbols()
    missing = sorted(name for name in needed if not re.search(rf"\b{name}\(", defined + _BLAS))
    (folder / "crt").mkdir(parents=True)
    for name in ("host_config.h", "host_defines.h"):
        (folder / "crt" / name).write_text(_KEYWORDS)
    stubs = "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing)
    (folder / "stubs.c").write_text(f"#include <stdlib.h>\n{_BLAS}{stubs}")
    driver = sorted(
        set(re.findall(r"CUresult CUDAAPI (cu\w+)\(", (headers[0] / "cuda.h").read_text()))
    )
    stubs = "".join(
        f"int {name}(void) {{ return 0; }}\n" for name in driver if name != "cuCtxGetCurrent"
    )
    (folder / "driver.c").write_text(
        f"int cuCtxGetCurrent(void **found) {{ *found = found; return 0; }}\n{stubs}"
    )
    include = [f"-I{path}" for path in (folder, *headers, _SOURCES)]
    sources = [_SOURCES / "cuda.c", _SOURCES / "nccl.c", folder / "stubs.c"]
    _compile(folder / "libfakecuda.so", *include, *sources, "-lpthread", "-lrt")
    _compile(folder / "libcuda.so.1", folder / "driver.c")
    _compile(folder / "libnvidia-ml.so.1", _SOURCES / "nvml.c")
    return {"LD_PRELOAD": str(folder / "libfakecuda.so"), "LD_LIBRARY_PATH": str(folder)}


def _find_headers() -> list[Path]:
    root = Path(sysconfig.get_path("purelib"), "nvidia")
    folders = [root / "cu13" / "include", root / "nccl" / "include"]
    return folders if all(folder.is_dir() for folder in folders) else []


def _list_undefined_symbols() -> set[str]:
    """Return the functions of CUDA, NCCL and cuBLAS that torch's libraries need."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    names = set[str]()
    for library in _TORCH_LIBRARIES:
        path = Path(spec.origin).parent / "lib" / library
        command = ["nm", "--dynamic", "--undefined-only", str(path)]
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        names |= {line.split()[-1].partition("@")[0] for line in lines}
    return {name for name in names if re.match(r"_*cuda|nccl|cublas", name)}


def _compile(library: Path, *arguments: object) -> None:
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", library, *arguments]
    subprocess.run(list(map(str, command)), check=True)
