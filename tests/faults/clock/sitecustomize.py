"""A wall clock that can be stepped from outside: read by every Python that finds this folder on its path first.

The file named in ``HEADRACE_STEPPED_CLOCK`` holds the offset in seconds, a double.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("HEADRACE_STEPPED_CLOCK")
if _path:
    with open(_path, "rb") as _file:
        _page = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
    _real = time.time
    time.time = lambda: _real() + struct.unpack_from("d", _page)[0]
