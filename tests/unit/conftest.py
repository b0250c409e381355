"""Settings for unit tests. There is no time limit per hypothesis example, so that a busy machine does not make a test
fail. Other tests draw no examples, and do not import it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("potluck", deadline=None)
settings.load_profile("potluck")
