"""Settings for all tests, read when they are begun. There is no time limit per hypothesis example, so that a busy
machine does not make a test fail. Nobody asks the hub of data sets. Whatever computes on no number of threads that was
chosen has one, in this process and in those that it starts: more than there are free cores spin against each other. A
closed terminal ends what tests start, though they were started by nohup."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import settings

settings.register_profile("potluck", deadline=None)
settings.load_profile("potluck")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup sets it aside, and what is started inherits that
