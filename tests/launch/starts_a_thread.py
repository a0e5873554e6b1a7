"""A module that cannot be imported before a fork: it starts a thread. See `test_warm_process`."""

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
