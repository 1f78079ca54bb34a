# SPDX-License-Identifier: Apache-2.0
"""What the CUDA and NPU backends rest on in torch and torch_npu, as facts about their source texts and binaries.

Paths are below the `torch` and the `torch_npu` package. torch_npu ships no stubs: what it has in C is looked for by its
name in the shared library, where every name that Python can ask for ends with a zero byte and begins behind one.
"""

from omni_core.integrations.vllm.releases.engine_contract import EngineFact, FactKind, extends, has, says, takes


def gives(module, *names):
    """A module imports these names, so that they can be asked of it."""
    return tuple(EngineFact(module, None, name, FactKind.EXPORT) for name in names)


_CUDA = "cuda/__init__.py"
_CUDA_STREAMS = "cuda/streams.py"
_TORCH_STUBS = "_C/__init__.pyi"

TORCH_CUDA = (
    # Streams and events, taken from the module that nobody replaces.
    extends(_CUDA_STREAMS, "Stream", "_CudaStreamBase"),
    takes(_CUDA_STREAMS, "Stream", "__new__", "device", "priority"),
    takes(_CUDA_STREAMS, "Stream", "wait_event", "event"),
    extends(_CUDA_STREAMS, "Event", "_CudaEventBase"),
    takes(_CUDA_STREAMS, "Event", "__new__", "enable_timing", "blocking", "interprocess"),
    takes(_CUDA_STREAMS, "Event", "record", "stream"),
    takes(_CUDA_STREAMS, "Event", "query"),
    *has(_TORCH_STUBS, "_CudaStreamBase", "stream_id", "device_index", "device_type"),
    *gives(_CUDA, "Stream", "Event"),
    # Below the functions that others replace.
    takes(_TORCH_STUBS, None, "_cuda_setDevice", "device"),
    takes(_TORCH_STUBS, None, "_cuda_getDevice"),
    takes(_TORCH_STUBS, None, "_cuda_getDeviceCount"),
    takes(_TORCH_STUBS, None, "_cuda_getCurrentStream", "device"),
    takes(_TORCH_STUBS, None, "_cuda_setStream", "stream_id", "device_index", "device_type"),
    *has(_TORCH_STUBS, None, "_has_cuda"),
    says(_CUDA, None, "current_stream", "torch._C._cuda_getCurrentStream("),
    says(_CUDA, None, "_set_stream_by_id", "torch._C._cuda_setStream("),
    says(_CUDA, None, "set_device", "torch._C._cuda_setDevice(device)"),
    takes(_CUDA, None, "init"),
    takes(_CUDA, None, "get_device_name", "device"),
    takes(_CUDA, None, "cudart"),
    # The runtime's binding is no Python: these are torch's own calls of it.
    says("cuda/_pin_memory_utils.py", None, "pin_memory", "cudart.cudaHostRegister("),
    says("cuda/_pin_memory_utils.py", None, "unpin_memory", "cudart().cudaHostUnregister("),
    says("cuda/memory.py", None, "mem_get_info", "torch.cuda.cudart().cudaMemGetInfo(device)"),
    says(_CUDA, "CudaError", "__init__", "_cudart.cudaGetErrorString("),
    says(_CUDA, None, "check_error", "_cudart.cudaError.success"),
)

_NPU = "npu/__init__.py"
_NPU_STREAMS = "npu/streams.py"
_NPU_UTILS = "npu/utils.py"

TORCH_NPU = (
    extends(_NPU_STREAMS, "Stream", "_NPUStreamBase"),
    takes(_NPU_STREAMS, "Stream", "__new__", "device", "priority"),
    takes(_NPU_STREAMS, "Stream", "wait_event", "event"),
    says(_NPU_STREAMS, "Stream", "wait_event", "event.wait(self)"),
    extends(_NPU_STREAMS, "Event", "_NPUEventBase"),
    takes(_NPU_STREAMS, "Event", "__new__", "enable_timing", "blocking", "interprocess"),
    takes(_NPU_STREAMS, "Event", "record", "stream"),
    takes(_NPU_STREAMS, "Event", "query"),
    *gives(_NPU, "Stream", "Event", "set_device", "current_device", "current_stream", "set_stream"),
    takes(_NPU_UTILS, None, "set_device", "device"),
    takes(_NPU_UTILS, None, "current_device"),
    takes(_NPU_UTILS, None, "current_stream", "device"),
    takes(_NPU_UTILS, None, "set_stream", "stream"),
    says(_NPU_UTILS, None, "set_stream", "stream_id=stream.stream_id"),
    takes(_NPU_UTILS, None, "get_cann_version", "module"),
    takes(_NPU, None, "get_device_name"),
    takes(_NPU, None, "mem_get_info", "device"),
    takes(_NPU, None, "is_available"),
    takes(_NPU, None, "device_count"),
    takes(_NPU, None, "npurt"),
    says(_NPU, None, "npurt", "return torch_npu._C._npurt"),
)

TORCH_NPU_LIBRARY = "lib/libtorch_npu.so"
TORCH_NPU_BINARY_NAMES = (
    "_NPUStreamBase",
    "_NPUEventBase",
    "stream_id",
    "device_index",
    "_npu_setDevice",
    "_npu_getDevice",
    "_npu_getDeviceCount",
    "_npu_getCurrentStream",
    "_npu_setStream",
    "_npurt",
    "npuHostRegister",
    "npuHostUnregister",
)


def names_lacking(library, names):
    """Those of the names that a shared library does not hold as whole strings."""
    content = library.read_bytes()
    return tuple(name for name in names if b"\0" + name.encode() + b"\0" not in content)
