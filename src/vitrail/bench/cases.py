"""What is measured: a case is one network in one setting; the cases of a group are compared with each other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

from vitrail.errors import ConfigError, did_you_mean

MODES = ("train", "inference", "latency", "explain")
OWN = "vitrail"
PRODUCT = "matrix product"
"""Library of the case that measures the rate of a large matrix product."""
EXPORT_ENGINES = ("onnxruntime", "openvino")

# Size -> batch size on a GPU for images of 224 px: those of numbers that are published for one H200.
TRAIN_BATCH = {"T": 512, "S": 512, "B": 256, "L": 128, "H": 64}
INFERENCE_BATCH = {"T": 1024, "S": 1024, "B": 512, "L": 256, "H": 256}
OTHER_BATCH = 64
CPU_BATCHES = (1, 16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network in one setting. It is measured in a process of its own, which gets it as JSON."""

    library: str
    """vitrail, a peer, an engine for exported files, or PRODUCT."""
    work: str = "forward"
    """forward, train, attention, rollout, streamed rollout, or product."""
    model: str = "ViT-B/16"
    """Name of a model, or a checkpoint."""
    engine: str = "torch"
    """torch, onnxruntime, openvino or auto."""
    compile: str | None = None
    """Mode of torch.compile; None: eager."""
    precision: str = "float32"
    """float32, bfloat16, int8 or float8: e4m3 products, the rest in bfloat16."""
    kernels: str = "auto"
    """This package's kernels, as in VITRAIL_KERNELS: auto, plain, or kernels by operation."""
    batch_size: int = 1
    device: str = "cpu"
    synchronize: bool = False
    """Wait for the device after each step: the latency, not the throughput."""
    pixels: bool = False
    """The input is uint8 pixels on the CPU, B H W C, which every setting normalizes; else images on the device."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changed fields of the network's config."""
    data: str | None = None
    """Labeled images for the top-1 accuracy."""
    root: str | None = None
    calibrate: str | None = None

    @property
    def setting(self) -> str:
        """How the network runs, in words."""
        if self.engine != "torch":
            return "auto" if self.engine == "auto" else "exported file"
        parts = {"attention": ["attention of all layers"], "rollout": ["rollout"], "streamed rollout": [self.work]}
        words = parts.get(self.work, [])
        words += ["eager" if self.compile is None else "compiled"]
        words += [self.compile] if self.compile not in (None, "default") else []
        words += ["sdpa"] if self.library == "transformers" and "SwinV2" not in self.model else []
        words += ["experimental fused attention"] if self.library == "timm-fused" else []
        words += ["fused AdamW"] if self.work == "train" else []
        words += ["plain kernels" if self.kernels == "plain" else self.kernels] if self.kernels != "auto" else []
        return ", ".join(words)

    @property
    def shown_precision(self) -> str:
        """The precision, and for bfloat16 whether the weights have it too."""
        mixed = self.precision == "bfloat16" and self.work == "train"
        return "bfloat16 autocast" if mixed else "chosen" if self.engine == "auto" else self.precision

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are measured in turns and compared."""

    model: str
    mode: str
    batch_size: int
    cases: tuple[Case, ...]
    baseline: str = "peer"
    """What ratios refer to: "peer" (the best other library) or "first" (the first case)."""
    variable: str = ""
    """What differs from group to group in a sweep, such as image_size=320."""

    @property
    def title(self) -> str:
        mode = {"train": "training", "explain": "attention"}.get(self.mode, self.mode)
        return f"{self.model} {mode}, batch {self.batch_size}{f', {self.variable}' * bool(self.variable)}"

    @property
    def key(self) -> str:
        """Name of its file: readable, and different for different cases."""
        digest = blake2b(json.dumps([asdict(case) for case in self.cases]).encode(), digest_size=4).hexdigest()
        name = f"{self.model.rpartition('/')[0][-12:]}-{self.mode}-{self.batch_size}"
        return f"{''.join(c if c.isalnum() else '-' for c in name).strip('-')}-{digest}"

    @property
    def weight(self) -> float:
        """Expected relative cost of its setup, which grows with the number of blocks that are compiled."""
        from vitrail.models.model_names import config_from_name

        try:
            depth = getattr(config_from_name(self.model), "depth", 12)
        except Exception:  # a checkpoint
            depth = 12
        return depth * (2.0 if self.mode == "train" else 1.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; None stands for the device's default."""

    against: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    precision: str = "auto"
    device: str = "auto"
    eager: bool = False
    """Run everything without torch.compile."""
    data: str | None = None
    root: str | None = None
    calibrate: str | None = None


def plan(request: Request, device: str, bfloat16: bool, float8: bool = False, kernels: str = "") -> list[Group]:
    """The groups of a request, the most telling first.

    `device` is resolved; `bfloat16` and `float8`: it computes in them; `kernels`: those that are not plain there.
    """
    from vitrail.bench.libraries import LIBRARIES, libraries_for

    gpu = device != "cpu"
    for name in request.against or ():
        if name not in LIBRARIES:
            raise ConfigError(f"unknown library {name!r}{did_you_mean(name, LIBRARIES)}")
    modes = request.modes or (("train", "inference") if gpu else ("inference",))
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"unknown mode {mode!r}{did_you_mean(mode, MODES)}")
    precisions = {"auto": ("float32", "bfloat16") if bfloat16 else ("float32",)}.get(
        request.precision, (request.precision,)
    )
    groups = []
    for model in request.models or (("B/16", "L/16", "S/16", "H/14") if gpu else ("Ti/16", "B/16")):
        name = full_name(model)
        found = request.against if request.against is not None else libraries_for(name)
        against = found if gpu or request.against is not None else tuple(n for n in found if n == "timm")
        for mode in modes:
            for batch_size in request.batch_sizes or default_batches(name, mode, gpu):
                base = Case(library=OWN, model=name, batch_size=batch_size, device=device)
                groups.append(_group(request, base, mode, against, precisions, float8, kernels))
    return groups


def default_batches(model: str, mode: str, gpu: bool) -> tuple[int, ...]:
    if mode == "latency":
        return (1,)
    if not gpu:
        return CPU_BATCHES if mode == "inference" else CPU_BATCHES[1:]
    table = {"train": TRAIN_BATCH, "inference": INFERENCE_BATCH}.get(mode, {})
    size = re.split(r"[-/@]", model.partition("-")[2])[0]
    batch = table.get(size, OTHER_BATCH) // (2 if model.startswith("Swin") else 1)  # whose first maps are large
    image = re.search(r"@(\d+)", model)
    if image and int(image[1]) > 224:  # as many pixels, rounded down to a power of two
        batch = max(2 ** int(math.log2(batch * (224 / int(image[1])) ** 2)), 1)
    return (batch,)


def full_name(model: str) -> str:
    """B/16 -> ViT-B/16; other names, and checkpoints, are unchanged."""
    head, slash, tail = model.partition("/")
    return f"ViT-{model}" if slash and head.isalpha() and len(head) <= 2 and tail[:1].isdigit() else model


def _group(
    request: Request,
    base: Case,
    mode: str,
    against: Sequence[str],
    precisions: tuple[str, ...],
    float8: bool,
    kernels: str,
) -> Group:
    if mode == "inference" and base.device == "cpu":
        cases = _cpu_cases(request, base, against, precisions)
    else:
        base = replace(base, precision=precisions[-1], compile=None if request.eager else "default")
        if mode == "train":
            base = replace(base, work="train")
        if mode == "latency":  # CUDA graphs take away the time of launching kernels
            graphs = base.compile is not None and base.device != "cpu"
            base = replace(base, synchronize=True, compile="reduce-overhead" if graphs else base.compile)
        if mode == "explain":
            works = ("forward", "attention", "rollout")
            cases = [replace(base, work=work) for work in works]
            cases.append(replace(base, work="streamed rollout", compile=None))
        else:
            cases = [replace(base, library=library) for library in (OWN, *against)]
            if kernels and mode != "latency":  # whose few tokens have plain kernels
                cases.insert(1, replace(base, kernels="plain"))
            if float8 and mode != "train" and request.precision == "auto":
                cases.insert(1, replace(base, precision="float8"))
    used = dict.fromkeys(case.precision for case in cases if case.precision != "int8")
    products = [Case(library=PRODUCT, work="product", precision=name, device=base.device) for name in used]
    return Group(
        model=base.model,
        mode=mode,
        batch_size=base.batch_size,
        cases=(*cases, *products),
        baseline="first" if mode == "explain" else "peer",
    )


def _cpu_cases(request: Request, base: Case, against: Sequence[str], precisions: tuple[str, ...]) -> list[Case]:
    """Eager and compiled torch in each precision, for this package and its peers; and the other engines."""
    from vitrail.engines.optional_packages import is_installed

    base = replace(base, pixels=True, data=request.data, root=request.root, calibrate=request.calibrate)
    compiles = (None,) if request.eager else (None, "default")
    cases = [
        replace(base, library=library, compile=compile, precision=precision)
        for library in (OWN, *against)
        for compile in compiles
        for precision in precisions
    ]
    if request.precision != "auto":
        return cases
    for engine in EXPORT_ENGINES:
        kinds = ["float32"]
        if is_installed(engine):
            from vitrail.exporting.autotune import candidates

            kinds = [kind for name, kind in candidates(request.calibrate is not None) if name == engine]
        cases += [replace(base, library=engine, engine=engine, precision=kind) for kind in kinds]
    return [*cases, replace(base, engine="auto")]
