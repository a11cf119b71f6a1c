"""What ``pipefill configure`` knows of Megatron's flags is what Megatron's parser has."""

from __future__ import annotations

import megatron.core
import pytest
from packaging.version import Version

from scripts import megatron_flags


@pytest.mark.skipif(Version(megatron.core.__version__) < Version("0.19"), reason="the list is that of the newest")
def test_the_list_of_flags_and_their_values_is_that_of_the_parser():
    known = set(megatron_flags.PATH.read_text(encoding="utf-8").splitlines())
    assert set(megatron_flags.lines().values()) <= known
