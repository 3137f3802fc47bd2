"""The digest's kernel without a GPU: under Triton's interpreter, which runs it on the CPU, in a process of its own."""
from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                reason="needs triton, which torch's wheels with CUDA bring along")

BEGIN = """
import numpy as np
import torch
from migration import digest, digest_triton
CPU = torch.device("cpu")
WORDS = torch.randint(-2 ** 63, 2 ** 63 - 1, (70_000,), generator=torch.Generator().manual_seed(1))
MEMORY = WORDS.view(torch.uint8)

def check(*groups):
    found, expected = digest_triton.sums(groups, CPU), digest.sums_by_torch(groups, CPU)
    assert torch.equal(found, expected), (groups, found, expected)
"""

PROGRAMS = {
    "sizes": """
for num in [*range(20), 4095, 4096, 4097, 4104, 16384 + 5]:
    check([MEMORY[:num]])
    check([MEMORY[1:][:num], MEMORY[8:][:num]])
""",
    "addresses": """
for offset in range(1, 17):
    for num in (1, 7, 8, 9, 15, 16, 17, 4090, 4096):
        check([MEMORY[offset:offset + num]])
""",
    "bytes around a tensor": """
memory = torch.zeros(64, dtype=torch.uint8)
for offset in range(8):
    for num in range(1, 20):
        tensor = memory[8 + offset:8 + offset + num]
        tensor.copy_(MEMORY[:num])
        before = digest_triton.sums([[tensor]], CPU)
        memory[:8 + offset], memory[8 + offset + num:] = 255, 255
        assert torch.equal(digest_triton.sums([[tensor]], CPU), before), (offset, num)
        memory.zero_()
""",
    "dtypes": """
for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool):
    values = torch.arange(3001).remainder(5).to(dtype)
    check([values, values[1:], values[3:9], values[5], values[:0], values[:3000].view(30, 100)])
check([torch.nn.Parameter(torch.ones(5))])
""",
    "groups": """
check()
check([])
check([], [MEMORY[:0]], [WORDS[:3], MEMORY[3:7], WORDS[5]], [], [WORDS[:9]])
check([WORDS[i:i + 3] for i in range(60)], [MEMORY[i:i + 7] for i in range(60)])
""",
    "pieces": """
size = digest_triton.MIN_PIECE_BYTES
for num in (size - 1, size, size + 1, 4 * size, 4 * size + 3):
    check([MEMORY[:9], MEMORY[:num], MEMORY[5:num], WORDS[:2]])
""",
    "larger pieces": """
size, block = digest_triton.MIN_PIECE_BYTES, 8 * digest_triton.BLOCK_WORDS
pieces = digest_triton.cut_into_pieces([[MEMORY[:1]], [MEMORY[:0], MEMORY[8:13], MEMORY[8:8 + 4 * size]]], 3)
assert pieces[:, 1].tolist()[:3] == [1, 5, 4 * size // 3 // block * block + block], pieces
assert pieces[:, 1].max() == pieces[2, 1] > size and len(pieces) == 5
assert pieces[:, 1].sum() == 1 + 5 + 4 * size
assert pieces[:, 3].tolist() == [0, 1, 1, 1, 1]
assert pieces[:, 2].tolist() == [0, 0, 1, 1 + pieces[2, 1] // 8, 1 + pieces[2, 1] // 4]
assert (pieces[2:, 0] - MEMORY.data_ptr() - 8).tolist() == [0, pieces[2, 1], 2 * pieces[2, 1]]
table = digest_triton.cut_into_pieces
digest_triton.cut_into_pieces = lambda groups: table(groups, 3)
check([MEMORY[3:], WORDS, WORDS[1:]])
""",
    "the check before it is used": """
digest.check_sums(digest_triton.sums, CPU)
""",
}


RUN = """
import json, sys, traceback
found = {}
for name, program in json.load(sys.stdin).items():
    try:
        exec(program, dict(globals()))
        found[name] = ""
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


def run(programs: dict[str, str], **environment: str) -> dict[str, str]:
    """What each raised, of programs in one fresh process: it chooses the interpreter when it imports triton."""
    done = subprocess.run([sys.executable, "-c", BEGIN + RUN], cwd=ROOT, timeout=280, input=json.dumps(programs),
                          capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    wrong = """
right = digest.sums_by_torch
digest.sums_by_torch = lambda groups, device: right(groups, device) ^ 1
check([WORDS])
"""
    return run({**PROGRAMS, "wrong": wrong}, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_sums_as_torch(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


def test_the_comparison_notices_a_wrong_sum(interpreted: dict[str, str]) -> None:
    assert "AssertionError" in interpreted["wrong"]


def test_it_compiles() -> None:
    """For the GPU of an H200, by the assembler that comes with Triton."""
    program = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
made = ASTSource(fn=digest_triton._add_up, constexprs={(2,): digest_triton.BLOCK_WORDS},
                 signature={"pieces": "*i64", "lanes": "*i64", "BLOCK": "constexpr"})
compiled = compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": digest_triton.NUM_WARPS})
assert compiled.asm["cubin"] and "st.local" not in compiled.asm["ptx"]
"""
    assert run({"": program}, TRITON_INTERPRET="0") == {"": ""}
