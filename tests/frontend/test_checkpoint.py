"""Checkpoints: the tensor list of a configuration, lazy reads, and one clear line for every damaged or foreign file."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from v41c.errors import CheckpointError
from v41c.frontend.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorFormats, expected_tensors
from v41c.frontend.config import parse_config, read_config
from v41c.frontend.finite import first_not_finite
from v41c.frontend.weights import array_reader, tensor_reader
from v41c.ir.graph import Value
from v41c.ir.torch_types import type_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
TRAINED = ROOT / "v41c" / "data" / "tiny-v41"
RELEASE = ROOT / "v41c" / "data" / "release"
FIRST_SHARD, SECOND_SHARD = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def test_release_list_is_exact() -> None:
    expected = expected_tensors(read_config(RELEASE))
    found: Counter[str] = Counter()
    for name, spec in expected.items():
        numbered = re.sub(r"\b(layers|mtp|blocks)\.\d+\.", r"\1.N.", re.sub(r"\bexperts\.\d+\.", "experts.E.", name))
        found[f"{numbered}\t{spec.dtype}\t{list(spec.shape)}"] += 1
    lines = (Path(__file__).parent / "data" / "release_tensors.txt").read_text().splitlines()
    listed = {line.rsplit("\t", 1)[0]: int(line.rsplit("\tx", 1)[1]) for line in lines}
    assert found == listed
    assert len(expected) == 96_085
    assert sum(spec.size_bytes for spec in expected.values()) == 510_286_023_000


def test_release_engram_tables() -> None:
    specs = expected_tensors(read_config(RELEASE))
    tables = [specs[f"layers.{layer}.engram.embed.{part}"] for layer in (1, 14) for part in ("weight", "scale")]
    assert sum(table.size_bytes for table in tables) == 768_022_850 * 264


@pytest.mark.parametrize("folder", [GOLDEN / "case_00", GOLDEN / "case_02", GOLDEN / "case_04", TRAINED], ids=str)
def test_known_checkpoints_verify(folder: Path) -> None:
    checkpoint, config = Checkpoint(folder), read_config(folder)
    checkpoint.verify(config)
    expected = expected_tensors(config, checkpoint.formats(config))
    assert set(checkpoint) == set(expected)
    for name, spec in expected.items():
        tensor = checkpoint.tensor(name)
        assert tuple(tensor.shape) == spec.shape
        assert tensor.nbytes == spec.size_bytes


def test_storage_choices_are_detected() -> None:
    config = read_config(TRAINED)
    assert TensorFormats.of(config) == TensorFormats(wo_a="fp8", engram_table="fp8")
    assert Checkpoint(TRAINED).formats(config) == TensorFormats(wo_a="bf16", engram_table="fp8")
    assert Checkpoint(GOLDEN / "case_02").formats(read_config(GOLDEN / "case_02")).wo_a == "bf16"


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A writable copy of case_04: one file, fp8 and fp4."""
    for name in ("config.json", SINGLE_FILE):
        shutil.copy(GOLDEN / "case_04" / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A writable copy of the trained checkpoint: two shards and an index."""
    for file in TRAINED.glob("*.*"):
        shutil.copy(file, tmp_path / file.name)
    return tmp_path


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "norm.weight: expected BF16 [64], found nothing"),
        (
            {"norm.weight": torch.ones(63, dtype=torch.bfloat16)},
            "model.safetensors: norm.weight: expected BF16 [64], found BF16 [63]",
        ),
        ({"norm.weight": torch.ones(64)}, "model.safetensors: norm.weight: expected BF16 [64], found F32 [64]"),
        (
            {"layers.3.spare": torch.ones(2)},
            "model.safetensors: layers.3.spare: expected no such tensor, found F32 [2]",
        ),
        (
            {"layers.0.attn.wo_b.scale": torch.ones(2, 4, dtype=torch.uint8)},
            "layers.0.attn.wo_b.scale: expected F8_E8M0 [2, 4], found U8 [2, 4]",
        ),
        (
            {"layers.2.ffn.experts.5.w1.weight": torch.zeros(32, 64, dtype=torch.bfloat16)},
            "layers.2.ffn.experts.5.w1.weight: expected I8 [32, 32], found BF16 [32, 64]",
        ),
        ({"image_start": torch.ones(64, dtype=torch.bfloat16)}, "image_start: expected no such tensor"),
        ({"layers.1.ffn.gate.bias_vl": torch.ones(6)}, "layers.1.ffn.gate.bias_vl: expected no such tensor"),
    ],
)
def test_wrong_tensors_are_named(case: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    rewrite(case, changes)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        Checkpoint(case).verify(read_config(case))
    assert str(caught.value).startswith(f"{case}: ")
    assert "\n" not in str(caught.value)


def test_many_problems_are_counted(case: Path) -> None:
    wider = json.loads((case / "config.json").read_text()) | {"dim": 128}
    with pytest.raises(CheckpointError, match=r"and \d+ more$") as caught:
        Checkpoint(case).verify(parse_config(wider))
    assert str(caught.value).count("; ") == 4


def test_missing_vision_is_named() -> None:
    config = parse_config(json.loads((GOLDEN / "case_00" / "config.json").read_text()) | {"vision_n_layers": 3})
    with pytest.raises(CheckpointError, match=r"vision.blocks.2.norm1.weight: expected BF16 \[64\], found nothing"):
        Checkpoint(GOLDEN / "case_00").verify(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a complete safetensors file, found a damaged one"),
        (b"PK\x03\x04 not a tensor file at all", "expected a complete safetensors file, found a damaged one"),
        (struct.pack("<Q", 2**60), "expected a complete safetensors file, found a damaged one"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "expected a complete safetensors file, found a damaged one"),
        (struct.pack("<Q", 8) + b"\xff" * 8, "expected a complete safetensors file, found a damaged one"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / SINGLE_FILE))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 7, 8, 1000, -1])
def test_truncated_file(case: Path, kept: int) -> None:
    content = (case / SINGLE_FILE).read_bytes()
    (case / SINGLE_FILE).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match="expected a complete safetensors file"):
        Checkpoint(case)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected model.safetensors or model.safetensors.index.json in this folder"
    ):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="in this folder, found neither"):
        Checkpoint(tmp_path / "absent")


def test_missing_shard(sharded: Path) -> None:
    (sharded / SECOND_SHARD).unlink()
    with pytest.raises(
        CheckpointError, match=rf"{SECOND_SHARD}: expected this shard with \d+ tensors of .*, found no file"
    ):
        Checkpoint(sharded)


def test_truncated_shard(sharded: Path) -> None:
    (sharded / SECOND_SHARD).write_bytes((sharded / SECOND_SHARD).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{SECOND_SHARD}: expected a complete safetensors file"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers.0.absent": FIRST_SHARD},
            f"{FIRST_SHARD}: expected tensor layers.0.absent of the index, found no such name",
        ),
        (
            {"embed.weight": None},
            f"{FIRST_SHARD}: expected no tensor embed.weight, which {INDEX_FILE} does not place here",
        ),
        ({"embed.weight": "../model.safetensors"}, "tensor embed.weight: expected a file name in this folder, got"),
        ({"embed.weight": ".."}, "tensor embed.weight: expected a file name in this folder, got"),
        ({"embed.weight": 7}, "tensor embed.weight: expected a file name in this folder, got 7"),
        ({"embed.weight": [FIRST_SHARD]}, "tensor embed.weight: expected a file name in this folder, got ['model-"),
    ],
)
def test_index_and_shards_disagree(sharded: Path, changes: dict[str, Any], message: str) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        Checkpoint(sharded)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a"'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=f'{INDEX_FILE}: expected JSON with a "weight_map"'):
        Checkpoint(sharded)


def test_tensors_named_twice(sharded: Path) -> None:
    index = (sharded / INDEX_FILE).read_text()
    repeated = index.replace('"embed.weight":', f'"embed.weight": "{SECOND_SHARD}", "embed.weight":', 1)
    (sharded / INDEX_FILE).write_text(repeated)
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: expected every tensor once, found 'embed.weight' twice"):
        Checkpoint(sharded)


@pytest.mark.parametrize("offsets", [(0, 4), (4, 8)], ids=["shared bytes", "own bytes"])
def test_header_that_names_a_tensor_twice(tmp_path: Path, offsets: tuple[int, int]) -> None:
    entries = [
        f'"norm.weight": {{"dtype": "F32", "shape": [1], "data_offsets": [{start}, {start + 4}]}}'
        for start in (0, offsets[0])
    ]
    header = ("{" + ", ".join(entries) + "}").encode()
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(offsets[1]))
    message = rf"{SINGLE_FILE}: expected every tensor once in the header, found 'norm.weight' twice"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


# (tensor, its index, the bytes to write there, what the message calls it): one-tensor checkpoints of case_04
POISONED = [
    ("layers.0.attn.wo_b.weight", (63, 5), 0x7F, "nan"),
    ("layers.0.attn.wo_b.weight", (0, 0), 0xFF, "nan"),
    ("layers.0.attn.wo_b.scale", (1, 3), 0xFF, "nan"),
    ("layers.2.ffn.experts.{}.w1.scale", (4, 31, 1), 0xFF, "nan"),
    ("norm.weight", (63,), 0x7F80, "inf"),
    ("embed.weight", (511, 63), 0xFFC0, "nan"),
    ("layers.0.attn.attn_sink", (7,), 0xFF800000, "-inf"),
    ("layers.3.hc_ffn_fn", (23, 255), 0x7F800001, "nan"),
]


@pytest.mark.parametrize(("pattern", "place", "code", "shown"), POISONED, ids=[f"{n}={c:x}" for n, _, c, _ in POISONED])
def test_weights_that_are_no_numbers_are_refused(
    case: Path, pattern: str, place: tuple[int, ...], code: int, shown: str
) -> None:
    clean = Checkpoint(case)
    stacked = "{}" in pattern
    name, inside = (pattern.format(place[0]), place[1:]) if stacked else (pattern, place)
    tensor = clean.stack(pattern, 6) if stacked else clean.tensor(pattern)
    value = Value(pattern, type_of(tensor))
    assert tensor_reader(clean, None)(value).dtype == tensor.dtype
    poisoned = clean.tensor(name).clone()
    bits = poisoned.view(torch.uint8).numpy().view(f"u{poisoned.element_size()}")
    bits[inside] = code
    rewrite(case, {name: poisoned})
    where = f"{case / SINGLE_FILE}: {name}[{', '.join(map(str, inside))}]: expected finite numbers, found {shown}"
    for reader in (tensor_reader, array_reader):
        with pytest.raises(CheckpointError, match=f"^{re.escape(where)}$"):
            reader(Checkpoint(case), None)(value)


def test_codes_next_to_the_refused_ones_are_numbers() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    eights = every[(every & 0x7F) != 0x7F]
    assert first_not_finite(eights.view(torch.float8_e4m3fn)) is None
    assert first_not_finite(every[:255].view(torch.float8_e8m0fnu)) is None
    assert first_not_finite(every.view(torch.int8)) is None
    for dtype in (torch.bfloat16, torch.float32):
        largest = torch.finfo(dtype).max
        assert first_not_finite(torch.tensor([largest, -largest, -0.0, 1e-40], dtype=dtype)) is None


def test_the_first_of_several_places_far_inside_is_named() -> None:
    table = torch.full((3000, 1000), 0.5, dtype=torch.bfloat16)
    table[2999, 999] = table[2500, 7] = torch.nan
    assert first_not_finite(table) == (2500, 7)


def test_unknown_tensor_name() -> None:
    with pytest.raises(CheckpointError, match=r"expected tensor layers.99.x, found no such name"):
        Checkpoint(TRAINED).tensor("layers.99.x")


def test_stack_copies_in_order() -> None:
    checkpoint = Checkpoint(TRAINED)
    for kind in ("weight", "scale"):
        pattern = f"layers.3.ffn.experts.{{}}.w1.{kind}"
        stacked = checkpoint.stack(pattern, 8)
        assert stacked.dtype == checkpoint.tensor(pattern.format(0)).dtype
        for expert in range(8):
            part = checkpoint.tensor(pattern.format(expert))
            assert torch.equal(stacked[expert].view(torch.uint8), part.view(torch.uint8))


def test_rows_in_the_order_asked_for() -> None:
    checkpoint = Checkpoint(TRAINED)
    indices = [24737, 0, 5, 5, 811]
    for kind in ("weight", "scale"):
        name = f"layers.1.engram.embed.{kind}"
        whole = checkpoint.tensor(name)
        for form in (indices, np.array(indices), torch.tensor(indices, dtype=torch.int32)):
            rows = checkpoint.rows(name, form)
            assert rows.dtype == whole.dtype
            assert torch.equal(rows.view(torch.uint8), whole.view(torch.uint8)[torch.tensor(indices)])
    assert checkpoint.rows("embed.weight", []).shape == (0, 192)


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * 4096


def test_rows_do_not_read_the_table(tmp_path: Path) -> None:
    rows, width = 2**23, 256
    entry = {"dtype": "F8_E4M3", "shape": [rows, width], "data_offsets": [0, rows * width]}
    header = json.dumps({"layers.1.engram.embed.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(width * (rows - 1), 1)
        file.write(bytes(range(width)))  # the rest is a hole: 2 GiB that take no disk
    checkpoint = Checkpoint(tmp_path)
    before = resident_bytes()
    found = checkpoint.rows("layers.1.engram.embed.weight", [0, rows - 1])
    assert found.view(torch.uint8).tolist() == [[0] * width, list(range(width))]
    assert resident_bytes() - before < 64 * 2**20


def naive_scales(scale: torch.Tensor) -> np.ndarray:
    values: np.ndarray = np.exp2(scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    return values


def test_fp8_blocks_are_dequantised_exactly() -> None:
    checkpoint = Checkpoint(GOLDEN / "case_00")
    name = "layers.2.attn.wq_b"
    values = checkpoint.tensor(f"{name}.weight").to(torch.float64).numpy()
    scales = naive_scales(checkpoint.tensor(f"{name}.scale"))
    expected = np.array([[values[i, j] * scales[i // 32, j // 32] for j in range(96)] for i in range(256)])
    assert np.array_equal(checkpoint.dequantized(f"{name}.weight").numpy(), expected)


def test_fp4_pairs_are_dequantised_exactly() -> None:
    checkpoint = Checkpoint(GOLDEN / "case_00")
    name = "layers.2.ffn.experts.7.w2"
    packed = checkpoint.tensor(f"{name}.weight").view(torch.uint8).numpy()
    scales = naive_scales(checkpoint.tensor(f"{name}.scale"))
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    expected = np.empty((96, 64))
    for i in range(96):
        for j in range(64):
            code = packed[i, j // 2] >> 4 if j % 2 else packed[i, j // 2] & 15
            expected[i, j] = (-1 if code & 8 else 1) * magnitudes[code & 7] * scales[i, j // 32]
    assert np.array_equal(checkpoint.dequantized(f"{name}.weight").numpy(), expected)


def test_tables_are_dequantised_row_by_row() -> None:
    checkpoint = Checkpoint(TRAINED)
    name = "layers.4.engram.embed"
    values = checkpoint.tensor(f"{name}.weight").to(torch.float64).numpy()
    expected = values * naive_scales(checkpoint.tensor(f"{name}.scale"))  # 32 wide: one scale per row
    assert np.array_equal(checkpoint.dequantized(f"{name}.weight").numpy(), expected)


def test_plain_tensors_become_fp32() -> None:
    checkpoint = Checkpoint(TRAINED)
    for name in ("embed.weight", "layers.0.attn.wo_a.weight", "layers.0.attn.attn_sink"):
        assert checkpoint.dequantized(name).dtype == torch.float32
        assert torch.equal(checkpoint.dequantized(name), checkpoint.tensor(name).float())
