"""One row per C function, its prototype as a comment. Every call returns NCCL's code; nothing is checked here.

A row names the feature it belongs to (library.py). `Raw` binds the rows that the loaded library has; any other raises
MissingFeature when it is looked up, before it can be called. ctypes lets other threads run during each call.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from nccl_bindings.library import Library
from nccl_bindings.types import Config, UniqueId

_COMM = c_void_p    # ncclComm_t
_STREAM = c_void_p  # cudaStream_t
_DATA = c_void_p    # device pointer
_OUT_COMM, _OUT_INT = POINTER(c_void_p), POINTER(c_int)

# name: (feature, result, arguments)
PROTOTYPES: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    # ncclResult_t ncclGetVersion(int* version);
    "ncclGetVersion": ("init", c_int, (_OUT_INT,)),
    # ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
    "ncclGetUniqueId": ("init", c_int, (POINTER(UniqueId),)),
    # const char* ncclGetErrorString(ncclResult_t result);
    "ncclGetErrorString": ("init", c_char_p, (c_int,)),
    # const char* ncclGetLastError(ncclComm_t comm);
    "ncclGetLastError": ("init", c_char_p, (_COMM,)),
    # ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
    #                                     ncclConfig_t* config);
    "ncclCommInitRankConfig": ("init", c_int, (_OUT_COMM, c_int, UniqueId, c_int, POINTER(Config))),
    # ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config);
    "ncclCommSplit": ("split", c_int, (_COMM, c_int, c_int, _OUT_COMM, POINTER(Config))),
    # ncclResult_t ncclCommFinalize(ncclComm_t comm);
    "ncclCommFinalize": ("init", c_int, (_COMM,)),
    # ncclResult_t ncclCommDestroy(ncclComm_t comm);
    "ncclCommDestroy": ("init", c_int, (_COMM,)),
    # ncclResult_t ncclCommAbort(ncclComm_t comm);
    "ncclCommAbort": ("init", c_int, (_COMM,)),
    # ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
    "ncclCommRevoke": ("revoke", c_int, (_COMM, c_int)),
    # ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
    "ncclCommSuspend": ("suspend", c_int, (_COMM, c_int)),
    # ncclResult_t ncclCommResume(ncclComm_t comm);
    "ncclCommResume": ("suspend", c_int, (_COMM,)),
    # ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);
    "ncclCommMemStats": ("memory_stats", c_int, (_COMM, c_int, POINTER(c_uint64))),
    # ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
    "ncclCommGetAsyncError": ("init", c_int, (_COMM, _OUT_INT)),
    # ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
    "ncclCommCount": ("init", c_int, (_COMM, _OUT_INT)),
    # ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
    "ncclCommUserRank": ("init", c_int, (_COMM, _OUT_INT)),
    # ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
    #                            ncclComm_t comm, cudaStream_t stream);
    "ncclAllReduce": ("init", c_int, (_DATA, _DATA, c_size_t, c_int, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
    #                            ncclComm_t comm, cudaStream_t stream);
    "ncclBroadcast": ("init", c_int, (_DATA, _DATA, c_size_t, c_int, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclAllGather(const void* send, void* recv, size_t sendcount, ncclDataType_t type, ncclComm_t comm,
    #                            cudaStream_t stream);
    "ncclAllGather": ("init", c_int, (_DATA, _DATA, c_size_t, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t recvcount, ncclDataType_t type,
    #                                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
    "ncclReduceScatter": ("init", c_int, (_DATA, _DATA, c_size_t, c_int, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    #                       cudaStream_t stream);
    "ncclSend": ("init", c_int, (_DATA, c_size_t, c_int, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    #                       cudaStream_t stream);
    "ncclRecv": ("init", c_int, (_DATA, c_size_t, c_int, c_int, _COMM, _STREAM)),
    # ncclResult_t ncclGroupStart();
    "ncclGroupStart": ("init", c_int, ()),
    # ncclResult_t ncclGroupEnd();
    "ncclGroupEnd": ("init", c_int, ()),
}


class Raw:
    """The functions of one library as attributes, with their argument types."""

    def __init__(self, library: Library) -> None:
        self.library = library
        for name, (feature, result, arguments) in PROTOTYPES.items():
            if library.has(feature):
                setattr(self, name, _bind(library.handle, name, result, arguments))

    def __getattr__(self, name: str) -> Callable[..., Any]:  # only for what __init__ didn't bind
        if name not in PROTOTYPES:
            raise AttributeError(f"no row for {name} in nccl_bindings.raw.PROTOTYPES")
        self.library.require(PROTOTYPES[name][0])
        raise AssertionError(f"{name} exists and isn't bound")


def _bind(handle: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    function = handle[name]  # a new function object each time: another user's argument types aren't changed
    function.restype = result
    function.argtypes = arguments
    return function
