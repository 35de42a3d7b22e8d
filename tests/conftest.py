"""torch is imported once, here; every rank of every test is forked from this process."""

import tests.world  # noqa: F401
