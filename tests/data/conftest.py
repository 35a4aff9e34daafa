"""A photograph that the tests of this folder share."""

from __future__ import annotations

import numpy as np
import pytest
from images import encoded
from PIL import Image
from sklearn.datasets import load_sample_image


@pytest.fixture(scope="session")
def photo() -> np.ndarray:
    """A temple by a lake, 90 x 130."""
    return np.array(load_sample_image("china.jpg")[200:290, 100:230])


@pytest.fixture(scope="session")
def jpeg(photo: np.ndarray) -> bytes:
    return encoded(Image.fromarray(photo), "JPEG", quality=92)
