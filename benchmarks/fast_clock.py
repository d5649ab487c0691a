"""A wall clock that runs fast, and jumps: months of certificates and logs in some minutes.

A library that is preloaded answers what asks for the wall time: so many times the monotonic clock,
plus what the file that all processes share says. Waits and timeouts are monotonic and stay as long
as they are, and so do files' modification times, which the kernel writes.
"""

from __future__ import annotations

import struct
import subprocess
import time
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *shared;  /* monotonic zero, wall zero, speed, jump */

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("FAST_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *at = mmap(0, 4 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (at != MAP_FAILED) shared = at;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!shared || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
    return syscall(SYS_clock_gettime, clock, now);
  struct timespec real;
  long failed = syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &real);
  double passed = real.tv_sec + real.tv_nsec / 1e9 - shared[0];
  double wall = shared[1] + passed * shared[2] + shared[3];
  now->tv_sec = (time_t)wall;
  now->tv_nsec = (long)((wall - (time_t)wall) * 1e9);
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  int failed = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *where) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (where) *where = found.tv_sec;
  return found.tv_sec;
}
"""


class FastClock:
    """A clock that begins at the present and passes ``speed`` seconds in each."""

    def __init__(self, folder: Path, *, speed: float) -> None:
        """Compile the library.

        Raises:
            subprocess.CalledProcessError, FileNotFoundError: there is no C compiler.
        """
        source, library = folder / "fast_clock.c", folder / "fast_clock.so"
        source.write_text(SOURCE)
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        self._path = folder / "fast_clock"
        self._begun, self._wall, self._speed = time.monotonic(), time.time(), speed
        self._jump = 0.0
        self._write()
        self.variables = {"LD_PRELOAD": str(library), "FAST_CLOCK": str(self._path)}

    def jump(self, seconds: float) -> None:
        """Set the clock ahead, or back, for all processes at once."""
        self._jump += seconds
        self._write()

    @property
    def days(self) -> float:
        """How many days have passed, without the jumps."""
        return (time.monotonic() - self._begun) * self._speed / 86_400

    def _write(self) -> None:
        values = struct.pack("4d", self._begun, self._wall, self._speed, self._jump)
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(values)
