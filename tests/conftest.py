"""Settings for all tests: no time limit per hypothesis example, so that a busy machine does not make a test fail."""

from hypothesis import settings

settings.register_profile("potluck", deadline=None)
settings.load_profile("potluck")
