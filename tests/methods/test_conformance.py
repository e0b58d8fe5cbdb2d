"""Every method does what every method has to."""

from __future__ import annotations

import pytest

from qevict.methods import get_method, method_names
from qevict.testing import check_method


@pytest.mark.parametrize("name", method_names())
def test_every_method_conforms(name: str) -> None:
    check_method(get_method(name))
