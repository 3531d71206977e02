from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts.disk import compile_shim
from headrace.kernels.select import native_module


@pytest.fixture(params=["native", "python"])
def native(request: pytest.FixtureRequest) -> Any:
    """The native module, and None for lanes in Python."""
    if request.param == "python":
        return None
    module = native_module()
    if module is None:
        pytest.skip("the native module was not built")
    return module


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compile_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler to make reads fail with")
    return library
