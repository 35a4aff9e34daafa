"""TorchScript archives are read as data: like torch.jit.load, without executing code; errors for bad files."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import CheckpointError, FormatError
from vitrail.weights import checkpoint
from vitrail.weights.archive import open_archive
from vitrail.weights.torchscript import MAX_ATTRIBUTES, open_torchscript

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")

UNCOMPRESSED = zipfile.ZIP_STORED


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float16)
        self.register_buffer("whole", torch.arange(12.0))
        self.register_buffer("part", self.whole.view(3, 4).t()[1:])
        self.sizes = [1, 2, 3]
        self.names = {"a": 1}
        self.rate, self.title, self.nothing = 0.5, "é", None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.half()).float() + len(self.sizes) + self.names["a"] + self.rate


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Inner(), nn.GELU())
        for number, dtype in enumerate((torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64)):
            self.register_buffer(f"number{number}", torch.tensor([1, 0], dtype=dtype))
        self.register_buffer("empty", torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda net: torch.jit.trace(net, torch.ones(2, 3)),
}


def save_program(path: Path, compiler: str = "script", net: nn.Module | None = None) -> Path:
    COMPILERS[compiler]((net or Outer()).eval()).save(path)
    return path


def copy_archive(source: Path, target: Path, compression: int = UNCOMPRESSED, **members: bytes | None) -> Path:
    """Copies the archive with some members replaced, or removed if None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            key = info.filename.rsplit("/", 1)[-1].replace(".", "_")
            data = members.get(key, old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return target


def refusal_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_archive(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("compiler", COMPILERS)
def test_tensors_match_torch_jit_load(compiler: str, tmp_path: Path) -> None:
    path = save_program(tmp_path / "net.pt", compiler)
    expected = torch.jit.load(path).state_dict()
    archive = open_archive(path)
    assert set(archive.tensors) == set(expected)
    for name, tensor in archive.tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert archive.shape(name) == tuple(expected[name].shape), name
        assert torch.equal(tensor, expected[name]), name
    assert archive.extras["modules"]["layers.0.linear"] == "Linear"
    assert archive.extras["modules"]["layers.1"] == "GELU"
    archive.close()


def test_program_of_an_unknown_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tensor names \(scale, number0"):
        checkpoint.read(save_program(tmp_path / "net.pt"))


def test_program_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "contains no tensors" in refusal_of(save_program(tmp_path / "net.pt", net=nn.GELU()))


# Attacks


class CallOnUnpickle:
    """An object whose unpickling calls a function."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


def pickle_text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def pickle_module(attributes: bytes) -> bytes:
    """A pickle of one module with these attributes, keys and values in turn."""
    return b"\x80\x02c__torch__\nNet\n)\x81}(" + attributes + b"ub."


def pickle_tensor(key: str = "0", numel: int = 1, offset: int = 0, shape: bytes = b")", stride: bytes = b")") -> bytes:
    storage = b"(" + pickle_text("storage") + b"ctorch\nFloatStorage\n" + pickle_text(key) + pickle_text("cpu")
    storage += b"J" + struct.pack("<i", numel) + b"tQ"
    arguments = b"J" + struct.pack("<i", offset) + shape + stride + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"tR"


@pytest.mark.parametrize("protocol", range(5))
def test_malicious_pickle_executes_no_code(protocol: int, tmp_path: Path) -> None:
    path = save_program(tmp_path / "net.pt")
    for number, call in enumerate((os.mkdir, eval, exec)):
        folder = tmp_path / f"made{number}"
        argument = str(folder) if call is os.mkdir else f"__import__('os').mkdir({str(folder)!r})"
        malicious = copy_archive(
            path, tmp_path / "evil.pt", data_pkl=pickle.dumps(CallOnUnpickle(call, argument), protocol)
        )
        with pytest.raises(CheckpointError, match=r"refused: .* nothing in it was executed"):
            open_archive(malicious)
        assert not folder.exists()
        pickle.loads(pickle.dumps(CallOnUnpickle(call, argument), protocol))  # plain pickle does run it
        assert folder.exists()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (pickle_text("a") + b"cposix\nsystem\n", "it requires posix.system"),
        (pickle_text("a") + b"cbuiltins\neval\n" + pickle_text("1") + b"\x85R", "it requires builtins.eval"),
        (pickle_text("a") + b"ctorch\nload\n", "it requires torch.load"),
        (pickle_text("a") + b"ctorch._utils\n_rebuild_qtensor\n", "it requires torch._utils._rebuild_qtensor"),
        (pickle_text("a") + pickle_text("os") + pickle_text("system") + b"\x93", "the opcode STACK_GLOBAL"),
        (pickle_text("a") + b"(ios\nsystem\n", "the opcode INST"),
        (pickle_text("a") + b"\x82\x01", "the opcode EXT1"),
        (pickle_text("a") + b"Pname\n", "the opcode PERSID"),
    ],
)
def test_unexpected_global_or_opcode_is_refused_by_name(attributes: bytes, message: str, tmp_path: Path) -> None:
    malicious = copy_archive(
        save_program(tmp_path / "net.pt"), tmp_path / "evil.pt", data_pkl=pickle_module(attributes)
    )
    assert message in refusal_of(malicious)


MALFORMED = {
    "class called as a function": pickle_text("a") + b"c__torch__\nNet\n)R",
    "function instantiated as an object": pickle_text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n)\x81)b",
    "state for a non-module": pickle_text("a") + b"ccollections\nOrderedDict\n}b",
    "persistent id that is not a storage": pickle_text("a") + b"(" + pickle_text("module") + b"NNNNtQ",
    "storage of unknown type": pickle_text("a") + pickle_tensor().replace(b"ctorch\nFloatStorage\n", b"N"),
    "missing storage": pickle_text("a") + pickle_tensor("9999"),
    "storage outside the archive": pickle_text("a") + pickle_tensor("../../etc/passwd"),
    "storage of another size": pickle_text("a") + pickle_tensor(numel=2**30),
    "tensor beyond its storage": pickle_text("a") + pickle_tensor(offset=5),
    "negative stride": pickle_text("a") + pickle_tensor(shape=b"K\x02\x85", stride=b"J\xff\xff\xff\xff\x85"),
    "negative size": pickle_text("a") + pickle_tensor(shape=b"J\xff\xff\xff\xff\x85", stride=b"K\x01\x85"),
    "sizes without strides": pickle_text("a") + pickle_tensor(shape=b"K\x01\x85"),
    "size that is not an integer": pickle_text("a")
    + pickle_tensor(shape=pickle_text("a") + b"\x85", stride=b"K\x01\x85"),
    "attribute name that is a tuple": b"))\x86K\x01",
    "very long attribute name": pickle_text("a" * 1000) + b"N",
    "attribute name that is an integer": b"K\x01N",
    "missing mark": pickle_text("a") + b"tt",
    "stack underflow": pickle_text("a") + b"\x87\x87\x87",
    "missing memo entry": pickle_text("a") + b"h\x07",
}


@pytest.mark.parametrize("defect", MALFORMED)
def test_malformed_pickle_is_reported_as_damaged(defect: str, tmp_path: Path) -> None:
    source = save_program(tmp_path / "net.pt", net=nn.PReLU())  # a single storage of one number
    assert "damaged" in refusal_of(copy_archive(source, tmp_path / "odd.pt", data_pkl=pickle_module(MALFORMED[defect])))


def test_exponential_or_cyclic_module_nesting_is_refused(tmp_path: Path) -> None:
    """Each module contains the previous one twice: 2 ** 40 names in two kilobytes. Another contains itself."""
    empty = b"c__torch__\nNet\n)\x81}b"
    chain = b"q\x00" + b"".join(
        b"c__torch__\nNet\n)\x81}(" + pickle_text("a") + b"h\x00" + pickle_text("b") + b"h\x00ubq\x00"
        for _ in range(40)
    )
    cyclic = b"\x80\x02c__torch__\nNet\n)\x81q\x00}" + pickle_text("a") + b"h\x00sb."
    source = save_program(tmp_path / "net.pt")
    for data in (b"\x80\x02" + empty + chain + b".", cyclic):
        assert "nested too deeply" in refusal_of(copy_archive(source, tmp_path / "many.pt", data_pkl=data))
    assert MAX_ATTRIBUTES >= 100_000  # the largest published models have about ten thousand


def test_compressed_member_is_refused_before_decompression(tmp_path: Path) -> None:
    bomb = copy_archive(save_program(tmp_path / "net.pt"), tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal_of(bomb)


# Damage


def test_truncated_archive_is_a_one_sentence_error(tmp_path: Path) -> None:
    data = save_program(tmp_path / "net.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(1, len(data) - 1, 97):
        path.write_bytes(data[:length])
        refusal_of(path)


def test_truncated_pickle_is_reported_as_damaged(tmp_path: Path) -> None:
    source = save_program(tmp_path / "net.pt")
    with zipfile.ZipFile(source) as archive:
        data = archive.read("net/data.pkl")
    for length in range(0, len(data) - 1, 13):
        assert "damaged" in refusal_of(copy_archive(source, tmp_path / "cut.pt", data_pkl=data[:length]))


def test_changed_byte_of_a_tensor_is_detected(tmp_path: Path) -> None:
    path = save_program(tmp_path / "net.pt")
    script = open_torchscript(path)
    info = script.archive.NameToInfo[f"{script.root}data/{script.tensors['scale'].storage.key}"]
    script.close()
    data = bytearray(path.read_bytes())
    start = info.header_offset + 30 + sum(struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30]))
    data[start] ^= 1
    path.write_bytes(data)
    archive = open_archive(path)
    with pytest.raises(CheckpointError, match="cannot read 'scale'"):
        archive.tensors["scale"]


def test_big_endian_archive_is_refused(tmp_path: Path) -> None:
    swapped = copy_archive(save_program(tmp_path / "net.pt"), tmp_path / "swapped.pt", byteorder=b"big")
    assert "byte order" in refusal_of(swapped)


def test_archive_with_a_bad_pickle_or_missing_storage_is_damaged(tmp_path: Path) -> None:
    source = save_program(tmp_path / "net.pt", net=nn.PReLU())
    stream = io.BytesIO()
    pickle.dump([1], stream, 2)
    assert "damaged" in refusal_of(copy_archive(source, tmp_path / "list.pt", data_pkl=stream.getvalue()))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "less.pt", "w", UNCOMPRESSED) as new:
        for info in old.infolist():
            if "/data/" not in info.filename:
                new.writestr(info.filename, old.read(info))
    assert "data/0 does not hold the 4 bytes" in refusal_of(tmp_path / "less.pt")
