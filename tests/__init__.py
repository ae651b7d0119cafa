"""Tests; the modules named here hold assertions without being test modules."""

import pytest

pytest.register_assert_rewrite("tests.chaos.checks", "tests.chaos.headrace", "tests.e2e.faults")
