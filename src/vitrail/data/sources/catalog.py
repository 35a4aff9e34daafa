"""The built-in datasets: content, download URLs, checksums and usual folder names.

`digest` is a hash of the decoded content (decoded_cache.py), so files are verified in any layout and
compression. For datasets without a digest, the published MD5 of the files is checked after a download.
"""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = tuple(_CIFAR100_NAMES.split())
CIFAR_URLS = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")


@dataclass(frozen=True)
class PublishedFile:
    """A file to download."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A built-in dataset."""

    name: str
    title: str
    labels: tuple[str, ...]
    shape: tuple[int, int, int]
    """Height, width, channels."""
    split_sizes: tuple[int, int]
    """Number of training and test images."""
    files: tuple[PublishedFile, ...] = ()
    base_urls: tuple[str, ...] = ()
    """Prefixes of the files' URLs, in the order of preference."""
    digest: str = ""
    """SHA-256 of the content (`decoded_cache.content_digest`); empty if unknown."""
    folder_names: tuple[str, ...] = ()
    """Other usual names of its folder."""
    debian_package: str = ""
    """Name of the Debian package, if there is one."""

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(file.size for file in self.files)


def _like_mnist(
    name: str, title: str, labels: tuple[str, ...], *files: tuple[int, str], **fields: tuple[str, ...] | str
) -> DatasetInfo:
    """A dataset in MNIST's format and size; `files` are the size and MD5 of its four files."""
    names = (f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return DatasetInfo(
        name=name,
        title=title,
        labels=labels,
        shape=(28, 28, 1),
        split_sizes=(60_000, 10_000),
        files=tuple(PublishedFile(name, *file) for name, file in zip(names, files, strict=True)),
        **fields,  # type: ignore[arg-type]
    )


# fmt: off
DATASETS = (
    DatasetInfo(
        name="digits", title="handwritten digits, in scikit-learn", labels=DIGITS,
        shape=(8, 8, 1), split_sizes=(1438, 359),
        digest="67ee426a3ae64848fc9d172a8c2fa717a2c222e55a327a3eb8ab86cec98665a3",
    ),
    _like_mnist(
        "mnist", "handwritten digits", DIGITS,
        (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"), (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        (1_648_877, "9fb629c4189551a2d022fa330f9573f3"), (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        base_urls=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        digest="442a7e27a3d2dff03914f8c5418fdb5bf298a5bdce33d8cc33636df4152f3276",
        folder_names=("MNIST/raw", "MNIST"),
    ),
    _like_mnist(
        "fashion-mnist", "clothes, by Zalando", FASHION,
        (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"), (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        (4_422_102, "bef4ecab320f06d8554ea6380940ec79"), (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        base_urls=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        digest="b04c12d91c9073ab4a11d7447bd50d6fbfb28453937d9da72de1aa11d9ce4120",
        folder_names=("FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion"),
        debian_package="dataset-fashion-mnist",
    ),
    _like_mnist(
        "kmnist", "handwritten Japanese syllables", KUZUSHIJI,
        (18_165_135, "bdb82020997e1d708af4cf47b453dcf7"), (29_497, "e144d726b3acfaa3e44228e80efcd344"),
        (3_041_136, "5c965bf0a639b31b8f53240b1b52f4d7"), (5_120, "7320c461ea6c1c855c0b718fb2a4b134"),
        base_urls=("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        folder_names=("KMNIST/raw", "KMNIST"),
    ),
    DatasetInfo(
        name="cifar10", title="small photographs of animals and vehicles", labels=CIFAR10,
        shape=(32, 32, 3), split_sizes=(50_000, 10_000),
        files=(PublishedFile("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),),
        base_urls=CIFAR_URLS,
        digest="c3e5e6d0ab6b99e32ffc1b4b2d1e0a6b72394ba389f536ea621f11be93d054ee",
        folder_names=("cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin", "CIFAR10"),
    ),
    DatasetInfo(
        name="cifar100", title="small photographs of a hundred things", labels=CIFAR100,
        shape=(32, 32, 3), split_sizes=(50_000, 10_000),
        files=(PublishedFile("cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),),
        base_urls=CIFAR_URLS,
        folder_names=("cifar-100", "cifar-100-python", "cifar-100-binary", "CIFAR100"),
    ),
    DatasetInfo(
        name="svhn", title="house numbers, digit by digit", labels=DIGITS,
        shape=(32, 32, 3), split_sizes=(73_257, 26_032),
        files=(
            PublishedFile("train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
            PublishedFile("test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
        ),
        base_urls=("http://ufldl.stanford.edu/housenumbers/",),
        folder_names=("SVHN",),
    ),
)
# fmt: on
CATALOG = {entry.name: entry for entry in DATASETS}
