"""NCCL's enums and structures as its C interface lays them out. Owns no library.

`ncclConfig_t` only ever grows at its end, so one structure with the newest layout (120 bytes, NCCL 2.32) serves every
version from 2.22.3 on, if its `version` is that of the running library: an older one reads the part that it knows.
"""
from __future__ import annotations

import ctypes
from enum import IntEnum

UNIQUE_ID_BYTES = 128
CONFIG_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(1 << 31)
SUSPEND_MEMORY = 1
NO_COLOR = -1  # of a split: this member joins no child


class Result(IntEnum):
    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class DataType(IntEnum):
    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11


class RedOp(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class MemoryStat(IntEnum):
    SUSPENDABLE = 0
    IS_SUSPENDED = 1
    PERSISTENT = 2
    TOTAL = 3


class UniqueId(ctypes.Structure):
    """Names a communicator that is about to be made. Passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


_INT, _TEXT = ctypes.c_int, ctypes.c_char_p


class Config(ctypes.Structure):
    """`ncclConfig_t`, newest layout; make one with `make_config`."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("blocking", _INT), ("cgaClusterSize", _INT), ("minCTAs", _INT), ("maxCTAs", _INT), ("netName", _TEXT),
        ("splitShare", _INT), ("trafficClass", _INT), ("commName", _TEXT), ("collnetEnable", _INT),
        ("CTAPolicy", _INT), ("shrinkShare", _INT), ("nvlsCTAs", _INT), ("nChannelsPerNetPeer", _INT),
        ("nvlinkCentricSched", _INT), ("graphUsageMode", _INT), ("numRmaCtx", _INT), ("maxP2pPeers", _INT),
        ("graphStreamOrdering", _INT), ("launchOrderImplicit", _INT), ("numRmaSig", _INT), ("rmaEagerInit", _INT),
        ("hostCftMode", _INT), ("nvlsHostMode", _INT),
    ]


def make_config(library_version: int, **fields: int | bytes) -> Config:
    """A configuration with `fields` set and the rest left to the library. Raises AttributeError for an unknown field.

    NCCL keeps `commName` by its pointer: whoever passes a name keeps the configuration alive as long as the
    communicator.
    """
    config = Config(size=ctypes.sizeof(Config), magic=CONFIG_MAGIC, version=library_version)
    known = {name: kind for name, kind in Config._fields_[3:]}
    for name, kind in known.items():
        if kind is _INT:
            setattr(config, name, UNDEFINED_INT)
    for name, value in fields.items():
        if name not in known:
            raise AttributeError(f"ncclConfig_t has no field {name}; known are {', '.join(known)}")
        setattr(config, name, value)
    return config
