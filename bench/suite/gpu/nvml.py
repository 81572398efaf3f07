"""How much of a GPU's memory a process takes, as the driver tells: NVIDIA's management library, called directly."""

import ctypes
import time

EVERY = 0.02  # seconds between two looks
NOT_AVAILABLE = 2**64 - 1


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of the functions whose names end in _v2 and _v3."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint)]


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpu:
    """The first one."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self.nvml = ctypes.CDLL(library)
        self.handle = ctypes.c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))

    def call(self, function: str, *arguments) -> None:
        status = getattr(self.nvml, function)(*arguments)
        if status != 0:
            raise OSError(f"{function}: NVML's error {status}")

    def text(self, function: str, *arguments) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(function, *arguments, buffer, len(buffer))
        return buffer.value.decode()

    def name(self) -> str:
        return self.text("nvmlDeviceGetName", self.handle)

    def driver(self) -> str:
        return self.text("nvmlSystemGetDriverVersion")

    def memory(self) -> Memory:
        memory = Memory()
        self.call("nvmlDeviceGetMemoryInfo", self.handle, ctypes.byref(memory))
        return memory

    def used_by(self, pid: int) -> int | None:
        """Bytes, if the driver knows that process by this number and tells."""
        count, infos = ctypes.c_uint(64), (ProcessInfo * 64)()
        self.call("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, ctypes.byref(count), infos)
        found = [info.used for info in infos[:count.value] if info.pid == pid]
        return found[0] if found and found[0] != NOT_AVAILABLE else None


class Peak:
    """The most that was seen; call it with a process's number as often as you like.

    Where the driver does not tell of single processes, it is what the GPU had beyond what it had before the process."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.before, self.last = gpu.memory().used, 0.0
        self.of_process = self.of_gpu = 0

    def __call__(self, pid: int) -> None:
        now = time.monotonic()
        if now - self.last < EVERY:
            return
        self.last = now
        self.of_process = max(self.of_process, self.gpu.used_by(pid) or 0)
        self.of_gpu = max(self.of_gpu, self.gpu.memory().used - self.before)

    @property
    def bytes(self) -> int:
        return self.of_process or self.of_gpu

    @property
    def source(self) -> str:
        return "the process's" if self.of_process else "the GPU's beyond before"


class NoPeak:
    """Stand-in for machines without a GPU."""

    bytes, source = 0, ""

    def __call__(self, pid: int) -> None:
        pass
