"""The GPUs of this box, as NVIDIA's driver shows them (NVML)."""

import contextlib
import os

import msgspec
import pynvml

from gend.errors import Unavailable


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `pids` are the host's, which a container does not know; `nvlinks` counts the links that are up."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    pids: tuple[int, ...] = ()
    nvlinks: int = 0
    worn_out: bool = False
    """Memory rows failed and could not be replaced."""
    celsius: int | None = None


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The driver: its version, the newest CUDA (major, minor) that it can run, and its GPUs."""

    version: str
    cuda: tuple[int, int]
    gpus: list[Gpu]


def read_driver() -> Driver | None:
    """What the driver shows; None where there is no driver. Raises Unavailable where there is one that does not work.

    Takes tens of milliseconds, or seconds where the driver is not kept loaded (persistence mode off).
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise Unavailable(f"the NVIDIA driver does not work: {error}; see nvidia-smi and dmesg") from error
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=[_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
        )
    except pynvml.NVMLError as error:  # a GPU that fell off the bus, say
        raise Unavailable(f"the NVIDIA driver does not answer: {error}; see nvidia-smi and dmesg") from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    links, worn_out, celsius = 0, False, None
    with contextlib.suppress(pynvml.NVMLError):  # "not supported": there are none, or no more of them
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            links += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
    with contextlib.suppress(pynvml.NVMLError):  # cards without row remapping
        worn_out = bool(pynvml.nvmlDeviceGetRemappedRows(handle)[3])
    with contextlib.suppress(pynvml.NVMLError):
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        pids=tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        nvlinks=links,
        worn_out=worn_out,
        celsius=celsius,
    )


def processors(index: int) -> set[int]:
    """The CPUs near GPU `index` (its NUMA node); empty where the driver does not say."""
    words = (os.cpu_count() or 1) // 64 + 1
    try:
        pynvml.nvmlInit()
        mask = pynvml.nvmlDeviceGetCpuAffinity(pynvml.nvmlDeviceGetHandleByIndex(index), words)
    except pynvml.NVMLError:
        return set()
    near = {64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1}
    return near & os.sched_getaffinity(0)
