"""TorchScript archives are read as data: torch's own tensors, no code executed, damage and attacks in one sentence."""

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

TORCH = zipfile.ZIP_STORED


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


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Inner(), nn.GELU())
        for number, dtype in enumerate((torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64)):
            self.register_buffer(f"number{number}", torch.tensor([1, 0], dtype=dtype))
        self.register_buffer("empty", torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda net: torch.jit.trace(net, torch.ones(2, 3)),
}


def program(path: Path, how: str = "script", net: nn.Module | None = None) -> Path:
    MAKE[how]((net or Whole()).eval()).save(path)
    return path


def rewritten(source: Path, target: Path, compression: int = TORCH, **members: bytes | None) -> Path:
    """The archive with members replaced by what is given, or left out (None)."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            key = info.filename.rsplit("/", 1)[-1].replace(".", "_")
            data = members.get(key, old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return target


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_archive(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("how", MAKE)
def test_the_tensors_are_those_of_torchs_own_reader(how: str, tmp_path: Path) -> None:
    path = program(tmp_path / "net.pt", how)
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


def test_a_program_of_no_known_network_is_refused_by_its_names(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tensor names \(scale, number0"):
        checkpoint.read(program(tmp_path / "net.pt"))


def test_a_program_without_tensors_says_so(tmp_path: Path) -> None:
    assert "contains no tensors" in refused(program(tmp_path / "net.pt", net=nn.GELU()))


# Attacks


class Evil:
    """What `pickle` would call."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


def unicode(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def module(attributes: bytes) -> bytes:
    """A pickle of one module with these attributes, keys and values in turn."""
    return b"\x80\x02c__torch__\nNet\n)\x81}(" + attributes + b"ub."


def tensor(key: str = "0", numel: int = 1, offset: int = 0, shape: bytes = b")", stride: bytes = b")") -> bytes:
    storage = b"(" + unicode("storage") + b"ctorch\nFloatStorage\n" + unicode(key) + unicode("cpu")
    storage += b"J" + struct.pack("<i", numel) + b"tQ"
    rest = b"J" + struct.pack("<i", offset) + shape + stride + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


@pytest.mark.parametrize("protocol", range(5))
def test_a_pickle_that_would_run_code_runs_none(protocol: int, tmp_path: Path) -> None:
    path = program(tmp_path / "net.pt")
    for number, call in enumerate((os.mkdir, eval, exec)):
        made = tmp_path / f"made{number}"
        asked = str(made) if call is os.mkdir else f"__import__('os').mkdir({str(made)!r})"
        evil = rewritten(path, tmp_path / "evil.pt", data_pkl=pickle.dumps(Evil(call, asked), protocol))
        with pytest.raises(CheckpointError, match=r"refused: .* nothing in it was executed"):
            open_archive(evil)
        assert not made.exists()
        pickle.loads(pickle.dumps(Evil(call, asked), protocol))  # it would have
        assert made.exists()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (unicode("a") + b"cposix\nsystem\n", "it requires posix.system"),
        (unicode("a") + b"cbuiltins\neval\n" + unicode("1") + b"\x85R", "it requires builtins.eval"),
        (unicode("a") + b"ctorch\nload\n", "it requires torch.load"),
        (unicode("a") + b"ctorch._utils\n_rebuild_qtensor\n", "it requires torch._utils._rebuild_qtensor"),
        (unicode("a") + unicode("os") + unicode("system") + b"\x93", "the opcode STACK_GLOBAL"),
        (unicode("a") + b"(ios\nsystem\n", "the opcode INST"),
        (unicode("a") + b"\x82\x01", "the opcode EXT1"),
        (unicode("a") + b"Pname\n", "the opcode PERSID"),
    ],
)
def test_a_name_or_an_instruction_that_torch_does_not_write_is_refused_by_name(
    attributes: bytes, message: str, tmp_path: Path
) -> None:
    evil = rewritten(program(tmp_path / "net.pt"), tmp_path / "evil.pt", data_pkl=module(attributes))
    assert message in refused(evil)


ODD = {
    "a class called like a function": unicode("a") + b"c__torch__\nNet\n)R",
    "a function made like an object": unicode("a") + b"ctorch._utils\n_rebuild_tensor_v2\n)\x81)b",
    "state for what is no module": unicode("a") + b"ccollections\nOrderedDict\n}b",
    "a storage that is none": unicode("a") + b"(" + unicode("module") + b"NNNNtQ",
    "a storage of no known type": unicode("a") + tensor().replace(b"ctorch\nFloatStorage\n", b"N"),
    "a storage that is not there": unicode("a") + tensor("9999"),
    "a storage outside the archive": unicode("a") + tensor("../../etc/passwd"),
    "a storage of another size": unicode("a") + tensor(numel=2**30),
    "a tensor beyond its storage": unicode("a") + tensor(offset=5),
    "a negative stride": unicode("a") + tensor(shape=b"K\x02\x85", stride=b"J\xff\xff\xff\xff\x85"),
    "a negative size": unicode("a") + tensor(shape=b"J\xff\xff\xff\xff\x85", stride=b"K\x01\x85"),
    "sizes without strides": unicode("a") + tensor(shape=b"K\x01\x85"),
    "a size that is no number": unicode("a") + tensor(shape=unicode("a") + b"\x85", stride=b"K\x01\x85"),
    "a key whose hash is work": b"))\x86K\x01",
    "a name without end": unicode("a" * 1000) + b"N",
    "an attribute without a name": b"K\x01N",
    "a mark that is not there": unicode("a") + b"tt",
    "more taken than there is": unicode("a") + b"\x87\x87\x87",
    "a memory that is empty": unicode("a") + b"h\x07",
}


@pytest.mark.parametrize("what", ODD)
def test_a_pickle_that_makes_no_sense_is_damaged(what: str, tmp_path: Path) -> None:
    source = program(tmp_path / "net.pt", net=nn.PReLU())  # whose storage is one number
    assert "damaged" in refused(rewritten(source, tmp_path / "odd.pt", data_pkl=module(ODD[what])))


def test_modules_that_share_their_branches_without_end_are_refused(tmp_path: Path) -> None:
    """Each module holds the one before it twice: 2 ** 40 names in a file of two kilobytes; and one holds itself."""
    empty = b"c__torch__\nNet\n)\x81}b"
    chain = b"q\x00" + b"".join(
        b"c__torch__\nNet\n)\x81}(" + unicode("a") + b"h\x00" + unicode("b") + b"h\x00ubq\x00" for _ in range(40)
    )
    itself = b"\x80\x02c__torch__\nNet\n)\x81q\x00}" + unicode("a") + b"h\x00sb."
    source = program(tmp_path / "net.pt")
    for data in (b"\x80\x02" + empty + chain + b".", itself):
        assert "nested too deeply" in refused(rewritten(source, tmp_path / "many.pt", data_pkl=data))
    assert MAX_ATTRIBUTES >= 100_000  # the largest published models have some ten thousand


def test_a_compressed_member_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = rewritten(program(tmp_path / "net.pt"), tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(bomb)


# Damage


def test_every_truncation_is_one_sentence(tmp_path: Path) -> None:
    whole = program(tmp_path / "net.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(1, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        refused(path)


def test_a_pickle_cut_anywhere_is_one_sentence(tmp_path: Path) -> None:
    source = program(tmp_path / "net.pt")
    with zipfile.ZipFile(source) as archive:
        data = archive.read("net/data.pkl")
    for length in range(0, len(data) - 1, 13):
        assert "damaged" in refused(rewritten(source, tmp_path / "cut.pt", data_pkl=data[:length]))


def test_a_changed_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    path = program(tmp_path / "net.pt")
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


def test_another_byte_order_is_refused(tmp_path: Path) -> None:
    swapped = rewritten(program(tmp_path / "net.pt"), tmp_path / "swapped.pt", byteorder=b"big")
    assert "byte order" in refused(swapped)


def test_an_archive_without_its_pickle_or_storage_is_damaged(tmp_path: Path) -> None:
    source = program(tmp_path / "net.pt", net=nn.PReLU())
    stream = io.BytesIO()
    pickle.dump([1], stream, 2)
    assert "damaged" in refused(rewritten(source, tmp_path / "list.pt", data_pkl=stream.getvalue()))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "less.pt", "w", TORCH) as new:
        for info in old.infolist():
            if "/data/" not in info.filename:
                new.writestr(info.filename, old.read(info))
    assert "data/0 does not hold the 4 bytes" in refused(tmp_path / "less.pt")
