"""A process that compiles Triton functions to cubins: one job a line on standard input, one answer a line on output.

It is a process of its own because Triton decides when it is imported whether functions will be compiled or interpreted,
and because compilation holds the interpreter's lock.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: instructions of note, by what they say of a kernel: regular expressions over the disassembly
INSTRUCTIONS = {
    "wgmma": r"\b[HQI]GMMA\.",
    "tcgen05": r"\bUTC\w*MMA",
    "mma": r"\b(?:HMMA|QMMA|OMMA|IMMA)\.",
    #: of the two above, those that apply scales: from registers, or from tensor memory behind their descriptor
    "block_scaled": r"\bQMMA\.SF\.|\bUTCQMMA [^;\n]*idesc\[\w+\], tmem",
    "load_16_bytes": r"\bLDG\.\S*128",
    "async_copy_16_bytes": r"\bLDGSTS\.\S*128",
    "tma": r"\bUTMALDG|\bUBLKCP",
    "store_16_bytes": r"\bSTG\.\S*128",
    "atomic_float": r"\b(?:ATOMG|RED)\S*\.F(?:16|32|64)",
}


def main() -> None:
    """Serve jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints must not be taken for an answer
    for line in sys.stdin:
        try:
            answer = compile_function(json.loads(line))
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {_root(error)}".split())[-500:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _root(error: BaseException) -> BaseException:
    """What an error began with: Triton wraps it once for every function that calls the one at fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def compile_function(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one function and write its cubin.

    `job`: module, function, parameters [[name, type], …], constants, warps, stages, capability (90 for sm_90), file.
    The answer says what a launch needs and what the machine code is made of: function, warps, shared_bytes, registers,
    spill_bytes, instructions.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job["module"]), job["function"])
    types = dict(job["parameters"])
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if types[name].startswith("*")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=job["constants"], attrs=aligned)
    options = {"num_warps": job["warps"], "num_stages": job["stages"], "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", job["capability"], 32), options=options)
    if made.metadata.global_scratch_size:
        raise ValueError(
            f"{job['function']}: expected no global scratch memory, got {made.metadata.global_scratch_size}"
        )
    cubin: bytes = made.asm["cubin"]
    Path(job["file"]).write_bytes(cubin)
    registers, stack_bytes = _resources(cubin, made.metadata.name)
    return {
        "function": made.metadata.name,
        "warps": made.metadata.num_warps,
        "shared_bytes": made.metadata.shared,
        "registers": registers,
        "spill_bytes": _spills(made.asm["ptx"]) if stack_bytes else 0,
        "instructions": _instructions(cubin),
    }


def _tool(name: str) -> str:
    import triton.backends.nvidia

    return str(Path(triton.backends.nvidia.__file__).parent / "bin" / name)


def _output(name: str, options: list[str], content: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        return subprocess.run([_tool(name), *options, file.name], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, without which nothing can have been spilled."""
    listing = _output("cuobjdump", ["--dump-resource-usage"], cubin)
    found = re.search(rf"Function {re.escape(name)}:\s*\n.*?REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise ValueError(f"cuobjdump: expected the resources of {name}, found none")
    return int(found.group(1)), int(found.group(2))


def _spills(ptx: str) -> int:
    """Bytes of spill stores and loads, as the assembler reports them for the PTX."""
    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("PTX: expected a target, found none")
    assembler = _tool("ptxas-blackwell" if int(target.group(2)) >= 90 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", f"-arch={target.group(1)}", file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))


def _instructions(cubin: bytes) -> dict[str, int]:
    listing = _output("nvdisasm", ["-c"], cubin)
    counts = {name: len(re.findall(pattern, listing)) for name, pattern in INSTRUCTIONS.items()}
    return {name: count for name, count in counts.items() if count}


if __name__ == "__main__":
    main()
