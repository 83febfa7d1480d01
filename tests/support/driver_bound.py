"""Fake GPU packages whose import loads the CUDA driver, and so raises OSError on a machine without one."""

PACKAGES = ("flashinfer", "flash_mla", "sgl_kernel", "deep_gemm", "transformer_engine")


def install(folder):
    """Write the packages into a folder, and return its path for PYTHONPATH."""
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text('import ctypes\n\nctypes.CDLL("no-driver/libcuda.so.1")\n')
    return str(folder)
